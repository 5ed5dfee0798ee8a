"""Program: kvmpoold that kills itself with SIGKILL at one of perform.POINTS, the first time that it comes there.

Run inside a lab's host as `python -m tests.e2e.killed_daemon POINT`.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from kvmpool import kvmpoold
from kvmpool.daemon import perform


def main() -> None:
    point = sys.argv.pop(1)

    def kill_there(reached: str) -> None:
        if reached == point:
            os.kill(os.getpid(), signal.SIGKILL)

    hands = perform._Hands
    original = hands.__init__

    def armed(self: Any, ledger: Any, _checkpoint: Any = None) -> None:
        original(self, ledger, kill_there)

    hands.__init__ = armed  # type: ignore[method-assign, assignment]
    kvmpoold.main()


if __name__ == "__main__":
    main()
