"""Builds worker, relay and acceptor with a stand-in session and driver, and speaks as guest and as kvmpoold."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import socket
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.dataplane.waiting import built_once, state
from tests.dataplane.waiting import gone as gone
from tests.dataplane.waiting import wait_until as wait_until

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "kvmpool" / "dataplane" / "src"
NATIVE = ROOT / "tests" / "native"
SHARED = ("control.c", "json.c", "log.c", "loop.c", "options.c", "refuse.c", "frame.c", "slots.c")
WARNINGS = ("-std=gnu11", "-Wall", "-Wextra", "-Werror", "-Wmissing-prototypes", f"-I{SOURCES}")
FLAVOURS = {
    "checked": ("-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
    "plain": ("-O2",),
}
UUID = "5c1f0a52-2f3b-4a4e-9b68-0d6f3f2d7c11"
CARD = "GPU-00000000-1111-2222-3333-444444444444"
VIRTUAL_UUID = "0f0e0d0c-0b0a-0908-0706-050403020100"
HELLO = struct.Struct("<I16s32s64sIIQQ64s")
FRAME = struct.Struct("<HHHHII")
WELCOME = struct.Struct("<i16s16s16sQQ16sQQ160s")
MAGIC, OP_HELLO, OP_WELCOME = 0x4B51, 1, 2


def build(flavour: str) -> Path:
    """A folder with kvmpool-worker (echo session), -relay, -acceptor and fake/libcuda.so.1; built once per source."""
    names = {Path(name).stem for name in SHARED} | {"account", "turns", "cache", "blake2b", "card", "session"}
    names |= {"acceptor", "window", "ring"}
    kinds = ("worker", "relay", "confine")
    ours = [file for file in SOURCES.glob("*.[ch]") if file.stem in names or file.stem.startswith(kinds)]
    files = sorted([*ours, NATIVE / "echo_session.c", NATIVE / "fake_cuda.c"])
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]
    folder = ROOT / "build" / "tests-native" / f"{flavour}-{digest}"
    return built_once(folder, lambda made: _compile(made, FLAVOURS[flavour]))


def _compile(folder: Path, flags: tuple[str, ...]) -> None:
    (folder / "fake").mkdir(parents=True, exist_ok=True)
    shared = [str(SOURCES / name) for name in SHARED]
    programs = {
        "kvmpool-worker": [*map(str, sorted(SOURCES.glob("worker*.c"))), str(SOURCES / "account.c"),
                           str(SOURCES / "turns.c"), str(SOURCES / "card.c"),
                           str(SOURCES / "cache.c"), str(SOURCES / "blake2b.c"),
                           *map(str, sorted(SOURCES.glob("confine*.c"))),
                           str(NATIVE / "echo_session.c"), *shared],
        "kvmpool-relay": [*map(str, SOURCES.glob("relay*.c")), *shared],
        "kvmpool-acceptor": [str(SOURCES / "acceptor.c"), *shared],
    }  # fmt: skip
    for name, sources in programs.items():
        subprocess.run(["gcc", *WARNINGS, *flags, "-o", str(folder / name), *sources], check=True)
    library = ["-shared", "-fPIC", "-o", str(folder / "fake" / "libcuda.so.1"), str(NATIVE / "fake_cuda.c")]
    subprocess.run(["gcc", *WARNINGS, "-O1", *library], check=True)


def hello(claim: str = "gpu0", token: str = "", program: str = "test", version: int = 1) -> bytes:
    """A whole hello frame."""
    body = HELLO.pack(version, b"caps", claim.encode(), token.encode(), os.getpid(), 0, 7, 1 << 40, program.encode())
    return FRAME.pack(MAGIC, OP_HELLO, 0, 0, len(body), 0) + body


@dataclass
class Welcome:
    status: int
    memory_bytes: int
    uuid: bytes
    pci: str
    text: str


class Guest:
    """A guest's connection to an endpoint."""

    def __init__(self, endpoint: str, timeout_s: float = 10.0) -> None:
        kind, rest = endpoint.split(":", 1)
        self.socket = socket.socket(socket.AF_UNIX if kind == "unix" else socket.AF_INET)
        if kind == "unix":
            with short_path(rest) as path:
                self.socket.connect(path)
        else:
            host, port = rest.rsplit(":", 1)
            self.socket.connect((host, int(port)))
        self.socket.settimeout(timeout_s)

    def __enter__(self) -> Guest:
        return self

    def __exit__(self, *error: object) -> None:
        self.socket.close()

    def read(self, length: int) -> bytes:
        """Exactly that many bytes; fewer at the end of the stream."""
        data = b""
        while len(data) < length:
            try:
                more = self.socket.recv(length - len(data))
            except ConnectionResetError:
                return data
            if not more:
                return data
            data += more
        return data

    def greet(self, claim: str = "gpu0", token: str = "", program: str = "test") -> Welcome:
        self.socket.sendall(hello(claim, token, program))
        return self.welcome()

    def welcome(self) -> Welcome:
        head = self.read(FRAME.size)
        assert len(head) == FRAME.size, f"the connection ended without a welcome: {head!r}"
        magic, op, _, _, length, _ = FRAME.unpack(head)
        assert (magic, op, length) == (MAGIC, OP_WELCOME, WELCOME.size)
        status, _, uuid, pci, memory, _, _, _, _, text = WELCOME.unpack(self.read(length))
        return Welcome(status, memory, uuid, pci.rstrip(b"\0").decode(), text.rstrip(b"\0").decode())

    def ask(self, line: str) -> str:
        """One line to the echo session and its answer; "" when the connection ended."""
        self.socket.sendall(line.encode() + b"\n")
        return self.line()

    def line(self) -> str:
        text = b""
        while not text.endswith(b"\n"):
            byte = self.read(1)
            if not byte:
                return text.decode()
            text += byte
        return text.decode().rstrip("\n")

    def ended(self, timeout_s: float = 5.0) -> bool:
        """Whether the other side ends the connection in that time; what it still sends is read away."""
        self.socket.settimeout(timeout_s)
        try:
            while self.socket.recv(4096):
                pass
        except ConnectionResetError:
            return True
        except TimeoutError:
            return False
        return True


@contextmanager
def short_path(path: str | Path) -> Iterator[str]:
    """The same socket under a name that fits sun_path, however deep the test's folder is."""
    folder = os.open(Path(path).parent, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{Path(path).name}"
    finally:
        os.close(folder)


class Control:
    """A connection to a control socket."""

    def __init__(self, path: Path, timeout_s: float = 10.0) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with short_path(path) as short:
            self.socket.connect(short)  # waits while the queue of new connections is full
        self.socket.settimeout(timeout_s)

    def __enter__(self) -> Control:
        return self

    def __exit__(self, *error: object) -> None:
        self.socket.close()

    def send(self, text: str | bytes, *descriptors: int) -> None:
        data = text.encode() if isinstance(text, str) else text
        if descriptors:
            socket.send_fds(self.socket, [data], list(descriptors))
        else:
            self.socket.send(data)

    def receive(self) -> str:
        return self.socket.recv(65536).decode()

    def ask(self, text: str) -> str:
        self.send(text)
        return self.receive()

    def status(self) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self.ask("STATUS"))
        return answer


def status(path: Path) -> dict[str, Any]:
    with Control(path) as control:
        return control.status()


def resident_kib(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1])
    raise AssertionError(f"process {pid} has no VmRSS")


@dataclass
class Plane:
    """One domain's relay and workers in a folder; `programs` is what `build` gave."""

    folder: Path
    programs: Path
    environment: dict[str, str] = field(default_factory=dict)
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def spawn(self, program: str, *options: str, ready: bool = True) -> tuple[subprocess.Popen[bytes], str]:
        """The process and the line it wrote when ready ("" when it left without one)."""
        reader, writer = os.pipe()
        environment = {**os.environ, "LD_LIBRARY_PATH": str(self.programs / "fake"), **self.environment}
        log = (self.folder / f"{program}.{len(self.processes)}.log").open("wb")
        process = subprocess.Popen(
            [str(self.programs / program), *options, "--ready-fd", str(writer)],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=[writer], env=environment,
        )  # fmt: skip
        log.close()
        os.close(writer)
        self.processes.append(process)
        with os.fdopen(reader) as lines:
            word = lines.readline().strip()
        if ready and not word.startswith("ready"):
            raise AssertionError(f"{program} did not start: {word!r}\n{self.log(process)}")
        return process, word

    def log(self, process: subprocess.Popen[bytes]) -> str:
        place = self.processes.index(process)
        return next(self.folder.glob(f"*.{place}.log")).read_text()

    def worker(
        self, generation: int = 1, claim: str = "gpu0", memory_mib: int = 64, pinned_mib: int = 0
    ) -> subprocess.Popen[bytes]:
        options = [*self.worker_options(generation, claim, memory_mib), "--pinned-mib", str(pinned_mib)]
        return self.spawn("kvmpool-worker", *options)[0]

    def worker_options(self, generation: int = 1, claim: str = "gpu0", memory_mib: int = 64) -> list[str]:
        return [
            "--uuid", UUID, "--domain", "vm0", "--claim", claim, "--generation", str(generation),
            "--dir", str(self.folder / "workers"), "--card", CARD, "--memory-mib", str(memory_mib), "--compute", "50",
            "--virtual-uuid", VIRTUAL_UUID, "--virtual-pci", "0000:c0:00.0",
        ]  # fmt: skip

    def worker_socket(self, generation: int = 1, claim: str = "gpu0") -> Path:
        return self.folder / "workers" / UUID / f"{claim}#{generation}.sock"

    def relay(self, *options: str, endpoint: str = "", claims: tuple[str, ...] = ("gpu0",)) -> subprocess.Popen[bytes]:
        where = endpoint or f"unix:{self.folder}/guest.sock"
        named = [word for claim in claims for word in ("--claim", claim)]
        process, word = self.spawn(
            "kvmpool-relay", "--uuid", UUID, "--domain", "vm0", "--dir", str(self.folder / "relays"),
            "--endpoint", where, *named, *options,
        )  # fmt: skip
        self.endpoint = word.split(" ", 1)[1]
        return process

    @property
    def relay_socket(self) -> Path:
        return self.folder / "relays" / UUID / "relay.ctl"

    def point(self, generation: int = 1, claim: str = "gpu0") -> str:
        with Control(self.relay_socket) as control:
            return control.ask(f"POINT {claim} {generation} 64\n{self.worker_socket(generation, claim)}")

    def tell_relay(self, text: str) -> str:
        with Control(self.relay_socket) as control:
            return control.ask(text)

    def guest(self, timeout_s: float = 10.0) -> Guest:
        return Guest(self.endpoint, timeout_s)

    def end(self) -> None:
        """Ends what still runs; fails when a program was ended by a checker (address, undefined) or a crash."""
        for process in self.processes:
            if process.poll() is None:
                if state(process.pid) == "T":  # not to others: the leak checker of one that leaves trips over it
                    process.send_signal(signal.SIGCONT)
                process.terminate()
        for process in self.processes:
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            text = self.log(process)
            assert "AddressSanitizer" not in text, text
            assert "runtime error" not in text, text
            assert process.returncode not in (-signal.SIGABRT, -signal.SIGSEGV), text
