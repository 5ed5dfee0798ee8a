"""QEMU's monitor: one command, its answer. Events are left unread.

Protocol: QEMU, docs/interop/qmp-spec.txt.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from kvmpool.errors import DeadlinePassed, Refused, Unreachable
from kvmpool.lab.vfio_channel import connected

_ANSWER_S = 30.0  # a monitor has one client at a time: the wait for an earlier one is in it


class Monitor:
    """An open monitor."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._connection.settimeout(_ANSWER_S)
        self._lines = connection.makefile("rb")

    def execute(self, command: str, **arguments: Any) -> Any:
        """The command's result. Raises Refused with QEMU's words, DeadlinePassed, Unreachable when QEMU ends."""
        try:
            self._connection.sendall(json.dumps({"execute": command, "arguments": arguments}).encode() + b"\n")
            answer = self._read()
            while "event" in answer or "QMP" in answer:
                answer = self._read()
        except TimeoutError:
            raise DeadlinePassed(f"QEMU's monitor did not answer {command} within {_ANSWER_S:g} s") from None
        except OSError as error:
            raise Unreachable(f"QEMU's monitor: {error}") from error
        if "error" in answer:
            raise Refused(f"QEMU refused {command}: {answer['error'].get('desc', answer['error'])}")
        return answer.get("return")

    def hmp(self, line: str) -> str:
        """What a command of the monitor for people prints: nothing, or its error."""
        return str(self.execute("human-monitor-command", **{"command-line": line}))

    def _read(self) -> dict[str, Any]:
        line = self._lines.readline()
        if not line:
            raise ConnectionResetError("QEMU has ended")
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextmanager
def monitor(folder: Path, name: str) -> Iterator[Monitor]:
    """The monitor behind the socket `name` in `folder`. Raises Unreachable where no QEMU listens."""
    with closing(connected(folder, name)) as connection:
        opened = Monitor(connection)
        opened.execute("qmp_capabilities")
        yield opened
