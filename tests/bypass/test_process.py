"""What a guest does to its own processes: their libraries, their memory, their number."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest

from tests.bypass.world import CLAIM_MIB, CONTEXT_MIB, LEFT_MIB, PAGE_MIB, World, said
from tests.dataplane.plane import NATIVE, WARNINGS, wait_until
from tests.dataplane.remote import built

pytestmark = pytest.mark.native

OUT_OF_MEMORY, NO_DEVICE = 2, 100
TERABYTE_MIB = 1 << 20


def test_another_driver_by_ld_library_path_has_no_card_of_the_pool(attack: World) -> None:
    softgpu = str(built("softgpu-cuda").parent)
    before = attack.attacker.sessions()
    assert attack.hog_without_card(LD_LIBRARY_PATH=softgpu) == {"init": NO_DEVICE}
    assert attack.hog_without_card(LD_PRELOAD=f"{softgpu}/libcuda.so.1") == {"init": NO_DEVICE}
    assert attack.attacker.sessions() == before, "nobody dialled"


def test_an_interposer_may_lie_to_its_process_and_gets_nothing(attack: World) -> None:
    told = attack.hog(LD_PRELOAD=str(attack.preload))
    assert told["believes"] == TERABYTE_MIB, "it was in the way"
    assert (told["granted"], told["code"]) == (LEFT_MIB, OUT_OF_MEMORY)


def test_a_statically_linked_program_gets_the_claim(attack: World) -> None:
    with attack.hogs(1, program=attack.static) as (told,):
        assert (told["granted"], told["code"]) == (LEFT_MIB, OUT_OF_MEMORY)


def test_what_a_debugger_writes_over_the_shims_memory_of_its_limits_is_its_own_belief(attack: World) -> None:
    with attack.hogs(1, "patch") as (told,):
        assert (told["patched"], told["believes"]) == (1, TERABYTE_MIB), "the shim believes it"
        assert told["at_once"] == OUT_OF_MEMORY, "so it asked, and the worker refused"
        assert (told["granted"], told["code"]) == (LEFT_MIB, OUT_OF_MEMORY)


def test_many_processes_together_have_one_claim(attack: World) -> None:
    with attack.hogs(12) as all_told:
        assert CLAIM_MIB - PAGE_MIB < attack.attacker.used() >> 20 <= CLAIM_MIB, "with the contexts that fitted"
        assert sum(told["granted"] for told in all_told) <= LEFT_MIB
        assert {told["code"] for told in all_told} == {OUT_OF_MEMORY}


def test_processes_that_are_killed_while_they_take_leave_nothing_taken(attack: World) -> None:
    for _ in range(5):
        guests = [attack.attacker.start(attack.program, "hog") for _ in range(3)]
        said(guests[0])
        for guest in guests:
            guest.kill()
            guest.communicate()
    wait_until(lambda: attack.attacker.used() == 0, 5.0, "what they held is free")


@pytest.mark.alone
def test_many_processes_together_have_one_claims_share_of_the_card(place: World, tmp_path: Path) -> None:
    """As many as the claim has memory for against one, all saturating, at 50 to 50: the card's own count judges."""
    saturate = tmp_path / "saturate"
    shim = [f"-L{built('shim').parent}", "-l:libcuda.so.1", "-o", str(saturate)]
    source = str(NATIVE / "saturate.c")
    subprocess.run(["gcc", *WARNINGS, "-Wno-missing-prototypes", "-O1", source, *shim], check=True)
    seconds = 8.0
    one = [place.neighbour.start(saturate, str(seconds + 1.5), "1000000")]
    room = CLAIM_MIB // (CONTEXT_MIB + PAGE_MIB)
    many = [place.attacker.start(saturate, str(seconds + 1.5), "1000000") for _ in range(room)]
    for guest in one + many:
        assert guest.stdout is not None
        assert guest.stdout.readline() == "ready\n"
    theirs = place.attacker.sessions()
    for guest in one + many:
        assert guest.stdin is not None
        guest.stdin.write("\n")
        guest.stdin.flush()
    time.sleep(0.5)
    before = place.busy_ms()
    time.sleep(seconds)
    busy = {pid: ms - before[pid] for pid, ms in place.busy_ms().items() if pid in before}
    for guest in one + many:
        out, _ = guest.communicate(timeout=60)
        assert (guest.returncode, "wrong=0" in out) == (0, True), out
    share = 100 * sum(ms for pid, ms in busy.items() if pid in theirs) / sum(busy.values())
    print(f"{len(many)} processes of one claim: {share:.1f} % of the card's time, of 50")
    assert share == pytest.approx(50, abs=5)
