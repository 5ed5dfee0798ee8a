"""What the libvirt hook costs: a foreign domain against a bare shell, a claimed one against a bare interpreter."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path

from kvmpool.native import data
from tests.bench.figure import interleaved, line
from tests.hooks.server import FakeDaemon

ROUNDS = 30
FOREIGN_OVER_SH_MS = 10.0
CLAIMED_OVER_PYTHON_MS = 40.0

_PLAIN = b"<domain type='kvm'><name>vm0</name>" + b"<!-- " + b"x" * 8000 + b" --></domain>"
_CLAIM = b"<metadata><k:claims xmlns:k='urn:kvmpool:domain:1'><k:claim name='gpu0'/></k:claims></metadata>"
_CLAIMED = _PLAIN.replace(b"<!--", _CLAIM + b"<!--", 1)


def run() -> bool:
    """Print both figures; whether both goals are met."""
    with tempfile.TemporaryDirectory() as name:
        hook = Path(name, "qemu.d", "50-kvmpool")
        hook.parent.mkdir()
        shutil.copy(data("hooks", "qemu"), hook)
        client = Path(name, "kvmpool", "hook.py")
        client.parent.mkdir()
        shutil.copy(data("hooks", "hook.py"), client)
        client.with_name("hook.conf").write_text(f"socket={name}/api.sock\n")
        with FakeDaemon(Path(name, "api.sock")):
            taken = interleaved(
                {
                    "sh": lambda: _call(["/bin/sh", "-c", ":"], b""),
                    "foreign": lambda: _call([str(hook), "vm0", "prepare", "begin", "-"], _PLAIN),
                    "python": lambda: _call(["/usr/bin/python3", "-I", "-S", "-c", "pass"], b""),
                    "claimed": lambda: _call([str(hook), "vm0", "prepare", "begin", "-"], _CLAIMED),
                },
                ROUNDS,
            )
    foreign = taken["foreign"].median_ms - taken["sh"].median_ms
    claimed = taken["claimed"].median_ms - taken["python"].median_ms
    print(f"sh {taken['sh'].median_ms:.1f} ms, python3 -I -S {taken['python'].median_ms:.1f} ms (medians of {ROUNDS})")
    met = line("hook, foreign domain over sh", f"+{foreign:.1f} ms", "<= +10 ms", foreign <= FOREIGN_OVER_SH_MS)
    goal = "<= +40 ms"
    return (
        line("hook, claimed domain over python3", f"+{claimed:.1f} ms", goal, claimed <= CLAIMED_OVER_PYTHON_MS) and met
    )


def _call(command: list[str], text: bytes) -> None:
    done = subprocess.run(command, input=text, capture_output=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{command[0]} ended with {done.returncode}: {done.stderr!r}")
