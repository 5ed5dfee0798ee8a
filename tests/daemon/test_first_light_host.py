"""The whole way on one host without a guest: a claim, its worker and relay, a CUDA program, a dead card, the next one."""

from __future__ import annotations

import shutil
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


def test_a_program_that_runs_while_its_card_dies_gets_an_error_and_the_next_one_works(
    tmp_path: Path, programs: Path
) -> None:
    with RealHost(tmp_path) as host:
        host.until(host.healthy, "the cards are not healthy")
        host.prepare(xml())
        first = host.get("/bindings/vm0/gpu0")
        loop = subprocess.Popen([programs / "loop"], env=host.guest(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        try:
            host.until(lambda: host.get("/bindings/vm0/gpu0")["sessions"] == 1, "the program opens no session")
            host.inject(first["card"].partition("/")[2], "lost")
            host.until(lambda: _moved(host, first["generation"]), "the binding does not move")
            assert loop.wait(10) != 0, "a program on a dead card must not go on as if nothing were"
        finally:
            loop.kill()
            loop.communicate()
        assert "PASS" in run(host, programs, "vectorAdd")


def test_a_running_program_never_notices_that_kvmpoold_is_killed(tmp_path: Path, programs: Path) -> None:
    import signal

    with RealHost(tmp_path) as host:
        host.until(host.healthy, "the cards are not healthy")
        host.prepare(xml())
        rounds: list[bytes] = []
        with subprocess.Popen([programs / "loop"], env=host.guest(), stdout=subprocess.PIPE) as loop:
            assert loop.stdout is not None
            output = loop.stdout
            reader = threading.Thread(target=lambda: rounds.extend(iter(output.readline, b"")), daemon=True)
            reader.start()
            host.until(lambda: len(rounds) > 2, "the program does not loop")
            host.end(signal.SIGKILL)
            seen = len(rounds)
            time.sleep(2)
            assert len(rounds) > seen + 1
            host.start()
            host.until(lambda: host.get("/bindings/vm0/gpu0")["sessions"] == 1, "the session is not seen again")
            seen = len(rounds)
            host.until(lambda: len(rounds) > seen + 2, "the program stands still")
            assert loop.poll() is None
            loop.terminate()
        assert "PASS" in run(host, programs, "vectorAdd")


def test_the_end_of_the_domain_ends_worker_and_relay_and_takes_the_files_away(tmp_path: Path, programs: Path) -> None:
    with RealHost(tmp_path) as host:
        host.until(host.healthy, "the cards are not healthy")
        host.prepare(xml())
        assert (host.run / "guests" / UUID / "endpoint").exists()
        assert host.hook("prepare", xml("64", name="vm1", uuid=UUID[:-1] + "2"), "vm1").returncode == 0
        assert len(host.get("/bindings")) == 2
