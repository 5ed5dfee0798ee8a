"""The guest's libnvidia-ml.so.1: the claim as one card, as pynvml in a process of the guest sees it."""

from __future__ import annotations

import json
import random
import socket
import struct
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.dataplane.plane import FRAME, HELLO, MAGIC, OP_HELLO, OP_WELCOME, VIRTUAL_UUID, WELCOME, status, wait_until
from tests.dataplane.remote import MEMORY_MIB, Remote, built, remote
from tests.dataplane.shim import DATAPLANE, NATIVE, SOURCES, WARNINGS
from tests.softgpu.nvrtc import ptx

pytestmark = pytest.mark.native

LOST, NOT_LOADED, TIMEOUT, NOT_SUPPORTED, MISMATCH = 15, 9, 10, 3, 18
OP_FIGURES, OBSERVER = 7, 2
FIGURES = struct.Struct("<QQQiiiiII96s32s")
PROCESSES = 64
PRELUDE = """
import json, sys, time
import pynvml as n
def error(call, *args):
    try:
        call(*args)
    except n.NVMLError as failure:
        return failure.value
    return 0
def say(value):
    print(json.dumps(value), flush=True)
"""
HOLD = """
import ctypes, sys
cuda = ctypes.CDLL("libcuda.so.1")
def must(rc): assert rc == 0, rc
context, at = ctypes.c_void_p(), ctypes.c_uint64()
must(cuda.cuInit(0))
must(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0))
must(cuda.cuCtxSetCurrent(context))
must(cuda.cuMemAlloc_v2(ctypes.byref(at), ctypes.c_size_t(64 << 20)))
print("held", flush=True)
"""
WORK = """
module, function = ctypes.c_void_p(), ctypes.c_void_p()
must(cuda.cuModuleLoadData(ctypes.byref(module), open(sys.argv[1], "rb").read() + bytes(1)))
must(cuda.cuModuleGetFunction(ctypes.byref(function), module, b"busy"))
p, rounds = ctypes.c_uint64(at.value), ctypes.c_int(2000)
params = (ctypes.c_void_p * 2)(ctypes.addressof(p), ctypes.addressof(rounds))
print("works", flush=True)
while True:
    must(cuda.cuLaunchKernel(function, 8, 1, 1, 64, 1, 1, 0, None, params, None))
    must(cuda.cuCtxSynchronize())
"""
BUSY = """
extern "C" __global__ void busy(int *p, int rounds)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    unsigned x = i;
    for (int r = 0; r < rounds; r++) x = x * 1664525u + 1013904223u;
    p[i] = x;
}
"""


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Remote]:
    built("shim-nvml")
    with remote(tmp_path) as running:
        yield running


def ask(place: Remote, code: str, *arguments: str, **more: str) -> Any:
    """The one value that `code` says, run as a guest behind PRELUDE."""
    done = place.guest([sys.executable, "-c", PRELUDE + textwrap.dedent(code), *arguments], 60, **more)
    assert done.code == 0, done.errors
    return json.loads(done.lines[-1])


@contextmanager
def running(place: Remote, code: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A Python process of the guest, killed at the end."""
    process = subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        env=place.environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


CARD = """
n.nvmlInit()
c = n.nvmlDeviceGetHandleByIndex(0)
"""


def test_the_claim_is_one_card_with_the_claim_s_identity_and_memory(place: Remote) -> None:
    found = ask(
        place,
        CARD
        + f"""
m = n.nvmlDeviceGetMemoryInfo(c)
m2 = n.nvmlDeviceGetMemoryInfo(c, version=n.nvmlMemory_v2)
by_uuid = n.nvmlDeviceGetHandleByUUID("GPU-{VIRTUAL_UUID}")
by_pci = n.nvmlDeviceGetHandleByPciBusId("0000:c0:00.0")
say([n.nvmlDeviceGetCount(), n.nvmlDeviceGetUUID(c), n.nvmlDeviceGetName(c), n.nvmlDeviceGetPciInfo(c).busId,
     [m.total >> 20, m.used, m.free >> 20], [m2.total >> 20, m2.used, m2.free >> 20], n.nvmlDeviceGetIndex(by_uuid),
     n.nvmlDeviceGetIndex(by_pci), n.nvmlSystemGetDriverVersion(), n.nvmlSystemGetCudaDriverVersion(),
     list(n.nvmlDeviceGetCudaComputeCapability(c)), error(n.nvmlDeviceGetHandleByIndex, 1),
     error(n.nvmlDeviceGetHandleByUUID, "GPU-other"), n.nvmlDeviceGetComputeRunningProcesses(c)])
""",
    )
    whole = [MEMORY_MIB, 0, MEMORY_MIB]
    assert found == [
        1, f"GPU-{VIRTUAL_UUID}", "SoftGPU 0", "00000000:C0:00.0", whole, whole, 0, 0,
        "580.65.06", 13000, [9, 0], 2, 6, [],
    ]  # fmt: skip


def test_memory_and_processes_are_those_of_all_sessions_of_the_claim(place: Remote) -> None:
    """Looking itself costs nothing, and a process that ends is gone."""
    look = (
        CARD
        + """
processes = n.nvmlDeviceGetComputeRunningProcesses(c)
say([n.nvmlDeviceGetMemoryInfo(c).used, [[p.pid, p.usedGpuMemory] for p in processes]])
"""
    )
    with running(place, HOLD + "sys.stdin.read()") as one, running(place, HOLD + "sys.stdin.read()") as two:
        assert [said(one), said(two)] == ["held", "held"]
        used, processes = ask(place, look)
        truth = status(place.plane.worker_socket())["memory_used"]
        assert used == truth >= 128 << 20
        assert sorted(processes) == sorted([one.pid, used // 2] for one in (one, two))
    wait_until(lambda: status(place.plane.worker_socket())["sessions"] == 0, what="the sessions end")
    assert ask(place, look) == [0, []]


def test_utilization_is_the_claim_s(place: Remote, tmp_path: Path) -> None:
    look = CARD + "say(n.nvmlDeviceGetUtilizationRates(c).gpu)"
    kernel = tmp_path / "busy.ptx"
    kernel.write_text(ptx(BUSY))
    assert ask(place, look) == 0
    with running(place, HOLD + WORK, str(kernel)) as worker:
        assert [said(worker), said(worker)] == ["held", "works"]
        wait_until(lambda: ask(place, look) > 10, timeout_s=30, what="the work is seen")


def test_what_a_claim_has_not_is_not_supported(place: Remote) -> None:
    """All that gpustat and nvitop ask answers so, and every other name exists."""
    listed = (DATAPLANE / "../softgpu/src/nvml_names.txt").read_text().splitlines()
    names = [line for line in listed if line.startswith("nvml")]
    found = ask(
        place,
        CARD
        + """
import ctypes
library = ctypes.CDLL("libnvidia-ml.so.1")
say([[error(n.nvmlDeviceGetTemperature, c, 0), error(n.nvmlDeviceGetPowerUsage, c), error(n.nvmlDeviceGetFanSpeed, c),
      error(n.nvmlDeviceGetEncoderUtilization, c), error(n.nvmlDeviceGetEnforcedPowerLimit, c),
      error(n.nvmlDeviceGetClockInfo, c, 1), error(n.nvmlDeviceGetTotalEccErrors, c, 1, 0),
      error(n.nvmlDeviceGetMigMode, c), error(n.nvmlDeviceGetPerformanceState, c),
      error(n.nvmlDeviceSetPersistenceMode, c, 1)],
     [name for name in sys.argv[1:] if not hasattr(library, name)]])
""",
        *names,
    )
    assert len(names) > 400
    assert found == [[NOT_SUPPORTED] * 10, []]


def test_an_event_set_waits_its_time_out(place: Remote) -> None:
    rc, waited, freed = ask(
        place,
        CARD
        + """
s = n.nvmlEventSetCreate()
n.nvmlDeviceRegisterEvents(c, n.nvmlEventTypeXidCriticalError, s)
start = time.monotonic()
rc = error(n.nvmlEventSetWait_v2, s, 300)
waited = time.monotonic() - start
n.nvmlEventSetFree(s)
say([rc, waited, error(n.nvmlEventSetWait_v2, s, 1)])
""",
    )
    assert (rc, freed) == (TIMEOUT, 2)
    assert 0.29 <= waited < 3


def test_users_are_counted_and_nothing_answers_outside(place: Remote) -> None:
    assert ask(
        place,
        """
first = [error(n.nvmlDeviceGetCount), error(n.nvmlShutdown)]
n.nvmlInit(); n.nvmlInit()
c = n.nvmlDeviceGetHandleByIndex(0)
n.nvmlShutdown()
inside = error(n.nvmlDeviceGetMemoryInfo, c)
n.nvmlShutdown()
say([first, inside, error(n.nvmlDeviceGetMemoryInfo, c), error(n.nvmlShutdown)])
""",
    ) == [[1, 1], 0, 1, 1]


def test_without_an_endpoint_the_driver_is_not_loaded(place: Remote, tmp_path: Path) -> None:
    code = "say(error(n.nvmlInit))"
    assert ask(place, code, KVMPOOL_ENDPOINT=f"unix:{tmp_path}/nobody") == NOT_LOADED
    assert ask(place, code, KVMPOOL_ENDPOINT="nonsense") == NOT_LOADED
    assert ask(place, code, KVMPOOL_CLAIM="gpu7") == NOT_LOADED


def test_a_lost_worker_is_a_lost_card_until_the_claim_is_bound_anew(place: Remote) -> None:
    code = (
        PRELUDE
        + CARD
        + """
say(error(n.nvmlDeviceGetMemoryInfo, c))
for line in sys.stdin:
    say([error(n.nvmlDeviceGetMemoryInfo, c), error(n.nvmlDeviceGetName, c)])
"""
    )
    with running(place, code) as watcher:
        assert watcher.stdin is not None

        def again() -> Any:
            print("look", file=watcher.stdin, flush=True)
            return json.loads(said(watcher))

        assert said(watcher) == "0"
        worker = place.plane.processes[0]
        worker.kill()
        worker.wait()
        assert again() == [LOST, LOST]
        assert again() == [LOST, LOST]
        place.plane.worker(generation=2, memory_mib=MEMORY_MIB)
        assert place.plane.point(generation=2) == "OK"
        wait_until(lambda: again() == [0, 0], timeout_s=20, what="the card is back")


def test_a_forked_child_asks_on_a_connection_of_its_own(place: Remote) -> None:
    assert ask(
        place,
        CARD
        + """
import os
r, w = os.pipe()
if os.fork() == 0:
    rcs = [error(n.nvmlDeviceGetMemoryInfo, c) for _ in range(50)]
    os.write(w, json.dumps(rcs).encode())
    os._exit(0)
rcs = [error(n.nvmlDeviceGetMemoryInfo, c) for _ in range(50)]
os.wait()
say([rcs, json.loads(os.read(r, 9999))])
""",
    ) == [[0] * 50, [0] * 50]


# ---- a worker that is not ours ----


def figures(**changed: Any) -> bytes:
    """A whole struct kp_figures."""
    values = {
        "used": 1 << 20, "busy": 0, "now": 1, "cuda": 12090, "major": 9, "minor": 0, "sms": 4,
        "known": 1, "processes": 1, "name": b"A card", "driver": b"1.2.3",
    } | changed  # fmt: skip
    return FIGURES.pack(*values.values()) + struct.pack("<IIQ", 77, 0, 5) + bytes(16 * (PROCESSES - 1))


def figures_frame(body: bytes, seq: int, op: int = OP_FIGURES) -> bytes:
    return FRAME.pack(MAGIC, op, 0, 0, len(body), seq) + body


def welcome(**changed: Any) -> bytes:
    values = {
        "status": 0, "caps": b"", "uuid": bytes(16), "pci": b"0000:01:02.0", "memory": 1 << 30, "ping": 0,
        "device": bytes(16), "window_at": 0, "window_bytes": 0, "text": b"",
    }  # fmt: skip
    body = WELCOME.pack(*(values | changed).values())
    return FRAME.pack(MAGIC, OP_WELCOME, 0, 0, len(body), 0) + body


class Liar(threading.Thread):
    """Listens where a relay would, and answers with what it is told to; `None` hangs up."""

    def __init__(self, path: Path, greeting: bytes, answer: Callable[[int], bytes | None]) -> None:
        super().__init__(daemon=True)
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(path))
        self.listener.listen(16)
        self.greeting, self.answer = greeting, answer
        self.asked = 0
        self.start()

    def run(self) -> None:
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            with connection:
                try:
                    self.serve(connection)
                except OSError:
                    continue

    def serve(self, connection: socket.socket) -> None:
        connection.recv(16 + 204, socket.MSG_WAITALL)
        connection.sendall(self.greeting)
        while len(head := connection.recv(16, socket.MSG_WAITALL)) == 16:
            self.asked += 1
            answer = self.answer(FRAME.unpack(head)[5])
            if answer is None:
                return
            connection.sendall(answer)


@contextmanager
def liar(folder: Path, greeting: bytes, answer: Callable[[int], bytes | None]) -> Iterator[Liar]:
    path = folder / "l"
    thread = Liar(path, greeting, answer)
    try:
        yield thread
    finally:
        thread.listener.shutdown(socket.SHUT_RDWR)
        thread.listener.close()
        path.unlink()


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """tests/native/nvml_cases.c with the library inside, under each checker."""
    folder = tmp_path_factory.mktemp("nvml")
    made = folder / "generated"
    made.mkdir()
    subprocess.run([sys.executable, DATAPLANE / "generate.py", DATAPLANE / "calls.toml", made], check=True)
    stubs = DATAPLANE / "../softgpu/src"
    names = folder / "names.c"
    subprocess.run([sys.executable, stubs / "generate_stubs.py", "nvml", stubs / "nvml_names.txt", names], check=True)
    names_of_shared = ("frame", "ring", "window", "slots", "shim_dial", "shim_log", "shim_slots")
    shared = [SOURCES / f"{name}.c" for name in names_of_shared]
    sources = [NATIVE / "nvml_cases.c", *sorted(SOURCES.glob("gnvml_*.c")), *shared, names]
    programs = {}
    for name, checks in {"memory": "address,undefined", "races": "thread"}.items():
        programs[name] = folder / name
        flags = [*WARNINGS, f"-I{made}", "-O1", f"-fsanitize={checks}", "-fno-sanitize-recover=all"]
        command = ["gcc", *flags, "-o", programs[name], *sources, "-lpthread"]
        subprocess.run([str(word) for word in command], check=True, timeout=120)
    return programs


def cases(program: Path, endpoint: str, *arguments: str) -> list[str]:
    environment = {"KVMPOOL_ENDPOINT": endpoint, "KVMPOOL_NO_VSOCK": "1", "KVMPOOL_SHM": "1"}
    done = subprocess.run([program, *arguments], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


GOOD = figures()
HOSTILE = {
    "nothing": b"",
    "too short": GOOD[:-1],
    "too long": GOOD + b"x",
    "a name without end": figures(name=b"n" * 96),
    "a name that rings": figures(name=b"a\7b"),
    "a version without end": figures(driver=b"5" * 32),
    "too many processes": figures(processes=PROCESSES + 1),
    "a number of the past": figures(cuda=-1),
    "an unknown flag": figures(known=2),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_figures_that_no_worker_sends_are_a_driver_that_is_not_loaded(
    tmp_path: Path, program: dict[str, Path], what: str
) -> None:
    with liar(tmp_path, welcome(), lambda seq: figures_frame(HOSTILE[what], seq)):
        assert cases(program["memory"], f"unix:{tmp_path}/l", "walk", "1") == [f"init={NOT_LOADED}"]
    with liar(tmp_path, welcome(), lambda seq: figures_frame(GOOD if seq == 1 else HOSTILE[what], seq)):
        assert cases(program["memory"], f"unix:{tmp_path}/l", "walk", "1")[0] == "init=0"


def test_good_figures_are_taken(tmp_path: Path, program: dict[str, Path]) -> None:
    """So the test above does not pass for another reason."""
    with liar(tmp_path, welcome(), lambda seq: figures_frame(GOOD, seq)):
        walked = cases(program["memory"], f"unix:{tmp_path}/l", "walk", "1")
    assert walked[:3] == ["init=0", "handle=0", "memory=0"]


@pytest.mark.parametrize(
    ("capability", "architecture"),
    [((7, 0), "VOLTA"), ((7, 5), "TURING"), ((8, 6), "AMPERE"), ((8, 9), "ADA"), ((9, 0), "HOPPER"),
     ((12, 0), "BLACKWELL"), ((99, 0), "UNKNOWN")],
)  # fmt: skip
def test_the_architecture_is_nvml_s_word_for_the_capability(
    tmp_path: Path, place: Remote, capability: tuple[int, int], architecture: str
) -> None:
    told = figures(major=capability[0], minor=capability[1])
    code = CARD + f"say([n.nvmlDeviceGetArchitecture(c), n.NVML_DEVICE_ARCH_{architecture}])"
    with liar(tmp_path, welcome(), lambda seq: figures_frame(told, seq)):
        said_, expected = ask(place, code, KVMPOOL_ENDPOINT=f"unix:{tmp_path}/l")
    assert said_ == expected


@pytest.mark.parametrize(
    ("greeting", "expected"),
    [
        (welcome(status=-71, text=b"another build"), MISMATCH),
        (welcome(status=-2, text=b"no such claim"), NOT_LOADED),
        (welcome(pci=b"\xff" * 16), NOT_LOADED),
        (welcome()[:-1] + b"\1", NOT_LOADED),
        (b"\0" * 300, NOT_LOADED),
    ],
)
def test_a_greeting_that_is_none(tmp_path: Path, program: dict[str, Path], greeting: bytes, expected: int) -> None:
    with liar(tmp_path, greeting, lambda seq: None):
        assert cases(program["memory"], f"unix:{tmp_path}/l", "walk", "1") == [f"init={expected}"]


def test_any_bytes_as_an_answer_never_crash(tmp_path: Path, program: dict[str, Path]) -> None:
    chosen = random.Random(3)

    def answer(seq: int) -> bytes | None:
        sent = bytearray(figures_frame(GOOD, seq))
        for _ in range(chosen.randrange(4)):
            sent[chosen.randrange(len(sent) if chosen.random() < 0.5 else 200)] = chosen.randrange(256)
        return bytes(sent) if chosen.random() < 0.95 else None

    with liar(tmp_path, welcome(), answer) as thread:
        for _ in range(30):
            cases(program["memory"], f"unix:{tmp_path}/l", "walk", "40")
        assert thread.asked > 100


@pytest.mark.parametrize("checker", ["memory", "races"])
def test_many_threads_and_forks_at_once(place: Remote, program: dict[str, Path], checker: str) -> None:
    assert cases(program[checker], place.plane.endpoint, "threads") == ["init=0", "threads=0", "children=0"]


def test_an_observer_of_another_build_is_told_the_figures_and_may_do_nothing_else(place: Remote) -> None:
    body = HELLO.pack(1, b"another build", b"gpu0", b"", 1, OBSERVER, 7, 1 << 40, b"test")
    for op, length, answered in ((OP_FIGURES, 0, True), (OP_FIGURES, 8, False), (16, 0, False), (6, 8, False)):
        with place.plane.guest() as guest:
            guest.socket.sendall(FRAME.pack(MAGIC, OP_HELLO, 0, 0, len(body), 0) + body)
            assert guest.welcome().status == 0
            guest.socket.sendall(FRAME.pack(MAGIC, op, 1 if op == 16 else 0, 0, length, 5) + bytes(length))
            head = guest.read(FRAME.size)
            assert (len(head) == FRAME.size) is answered, (op, length)
            assert not answered or FRAME.unpack(head)[1::4] == (OP_FIGURES, 5)
