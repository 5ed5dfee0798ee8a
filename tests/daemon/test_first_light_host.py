"""The whole way on one host without a guest: claim, worker and relay, a CUDA program, a dead card, the next one."""

from __future__ import annotations

import shutil
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest

from kvmpool.lab import images
from tests.daemon.host import UUID, RealHost, xml

pytestmark = pytest.mark.native


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sample programs and their kernels in one folder, as a guest has them."""
    folder = tmp_path_factory.mktemp("programs")
    for path in images.programs():
        shutil.copy(path, folder)
    return folder


def run(host: RealHost, programs: Path, name: str) -> str:
    done = subprocess.run([programs / name], env=host.guest(), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, f"{name}: {done.stdout}{done.stderr}\n{host.log.read_text()}"
    return done.stdout


def test_a_program_finds_the_same_gpu_again_after_its_card_has_died(tmp_path: Path, programs: Path) -> None:
    with RealHost(tmp_path) as host:
        host.until(host.healthy, "the cards are not healthy")
        host.prepare(xml())
        first = host.get("/bindings/vm0/gpu0")
        device, endpoint = run(host, programs, "deviceQuery"), host.guest()
        assert "PASS" in run(host, programs, "vectorAdd")
        assert "PASS" in run(host, programs, "matrixMul")
        assert host.get("/bindings/vm0/gpu0")["sessions"] == 0

        host.inject(first["card"].partition("/")[2], "xid 79")
        moved_s = host.until(lambda: _moved(host, first["generation"]), "the binding does not move")
        second = host.get("/bindings/vm0/gpu0")
        assert second["card"] != first["card"]
        assert moved_s <= 2.0, "design 05 §5.4"

        assert host.guest() == endpoint
        assert run(host, programs, "deviceQuery") == device, "the guest must not see another GPU"
        assert "PASS" in run(host, programs, "vectorAdd")
        host.until(lambda: len(host.get("/bindings")) == 1, "the dead card's binding is not freed")
        assert host.get(f"/cards/{first['card_id']}")["verdict"] in ("failed", "quarantined")
        kinds = [event["kind"] for event in host.get("/events") if event["subject"] == first["label"]]
        assert kinds[:3] == ["bound", "ready", "served"]
        assert kinds[-1] == "freed"


def _moved(host: RealHost, generation: int) -> bool:
    bindings = [body for body in host.get("/bindings") if body["generation"] > generation]
    return bool(bindings) and bindings[0]["phase"] == "ready" and bindings[0]["pointed"]


class Looping:
    """A program that adds vectors round after round and says how each went."""

    def __init__(self, host: RealHost, programs: Path) -> None:
        self.lines: list[str] = []
        command = [str(programs / "loop"), "0", "20"]
        self._process = subprocess.Popen(command, env=host.guest(), stdout=subprocess.PIPE, text=True)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        host.until(lambda: self.rounds() > 2, "the program does not loop")

    def _read(self) -> None:
        assert self._process.stdout is not None
        self.lines.extend(iter(self._process.stdout.readline, ""))

    def rounds(self) -> int:
        return sum(" ok " in line for line in self.lines)

    def errors(self) -> list[str]:
        return [line for line in self.lines if " ok " not in line]

    def __enter__(self) -> Looping:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait(10)
        self._reader.join(10)


def test_a_program_that_runs_while_its_card_dies_gets_an_error_and_computes_on_with_a_new_context(
    tmp_path: Path, programs: Path
) -> None:
    with RealHost(tmp_path) as host:
        host.until(host.healthy, "the cards are not healthy")
        host.prepare(xml())
        first = host.get("/bindings/vm0/gpu0")
        with Looping(host, programs) as loop:
            host.until(lambda: host.get("/bindings/vm0/gpu0")["sessions"] == 1, "its session is not seen")
            host.inject(first["card"].partition("/")[2], "lost")
            host.until(lambda: _moved(host, first["generation"]), "the binding does not move")
            seen = loop.rounds()
            host.until(lambda: loop.rounds() > seen + 3, "the program does not compute on")
            assert loop.errors(), "a program on a dead card must be told"
            assert not [line for line in loop.errors() if "wrong" in line]


def test_a_running_program_never_notices_that_kvmpoold_is_killed(tmp_path: Path, programs: Path) -> None:
    with RealHost(tmp_path) as host:
        host.until(host.healthy, "the cards are not healthy")
        host.prepare(xml())
        with Looping(host, programs) as loop:
            host.end(signal.SIGKILL)
            seen = loop.rounds()
            time.sleep(2)
            assert loop.rounds() > seen + 5
            host.start()
            host.until(lambda: host.get("/bindings/vm0/gpu0")["sessions"] == 1, "the session is not seen again")
            seen = loop.rounds()
            host.until(lambda: loop.rounds() > seen + 5, "the program stands still")
            assert loop.errors() == []


def test_two_domains_share_a_card_and_one_does_not_reach_the_others_claim(tmp_path: Path, programs: Path) -> None:
    other = UUID[:-1] + "2"
    with RealHost(tmp_path) as host:
        host.until(host.healthy, "the cards are not healthy")
        host.prepare(xml("512"))
        host.prepare(xml("64", name="vm1", uuid=other), "vm1")
        one, two = host.get("/bindings/vm0/gpu0"), host.get("/bindings/vm1/gpu0")
        assert one["card"] == two["card"]
        assert "memory MiB: 512\n" in run(host, programs, "deviceQuery")
        stolen = host.guest() | {"KVMPOOL_TOKEN": host.guest(other)["KVMPOOL_TOKEN"]}
        done = subprocess.run([programs / "vectorAdd"], env=stolen, capture_output=True, timeout=60, check=False)
        assert done.returncode != 0
        assert "PASS" in run(host, programs, "vectorAdd")
