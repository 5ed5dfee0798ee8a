"""What a guest's program sees of the driver API through shim and session."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.dataplane import shim
from tests.dataplane.waiting import wait_until

pytestmark = pytest.mark.native

PAGE = 2 << 20
WINDOW = range(0x300000000000, 0x300000000000 + (1 << 40))


@pytest.fixture(params=shim.WAYS)
def host(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[shim.Host]:
    with shim.host(tmp_path, request.param) as running:
        yield running


def test_memory_has_addresses_of_the_window_and_copies_arrive(host: shim.Host) -> None:
    run = host.run("memory")
    assert run.code == 0, run.lines
    assert all(run[name] in WINDOW for name in ("small_0", "small_1", "large"))
    assert run["small_0"] // PAGE == run["small_1"] // PAGE, "small allocations share a page"
    assert run["large"] % PAGE == 0
    assert run["range_base_right"] == 1
    assert run["range_bytes"] == 1000
    assert run["copies_right"] == 1


def test_memory_shows_the_claim_and_is_counted_in_pages(host: shim.Host) -> None:
    run = host.run("memory")
    assert run["total"] == shim.MEMORY
    assert run["free_at_start"] == shim.MEMORY
    assert run["free_with_three"] == shim.MEMORY - 3 * PAGE
    assert run["free_at_end"] == shim.MEMORY


def test_an_address_that_is_no_allocation_is_refused_at_once(host: shim.Host) -> None:
    run = host.run("memory")
    assert [run[name] for name in ("beyond_end", "free_inside", "free_twice", "use_after_free")] == [1, 1, 1, 1]


@pytest.mark.parametrize("size", [1, 8192, 8193, (1 << 20), (1 << 20) + 1, 20_000_001])
def test_bulk_of_any_size_comes_back_equal(host: shim.Host, size: int) -> None:
    run = host.run("bulk", str(size))
    assert (run.code, run["equal"]) == (0, 1)


def test_kernel_parameters_arrive_in_both_forms(host: shim.Host) -> None:
    run = host.run("fill")
    assert run.code == 0, run.lines
    assert (run["params"], run["params_right"], run["extra"], run["extra_right"]) == (0, 1, 0, 1)
    assert run["both"] == 1
    assert (run["function_threads"], run["second_offset"], run["behind_last"]) == (512, 8, 1)


def test_a_launch_that_cannot_be_is_refused_at_once_with_its_own_code(host: shim.Host) -> None:
    run = host.run("checks")
    expected = {
        "grid_0": 1,
        "grid_y": 1,
        "block": 1,
        "function_limit": 701,
        "shared": 1,
        "function": 400,
        "stream": 400,
        "no_such_kernel": 400,
        "unknown_name": 500,
        "after_unload": 400,
        "still_fine": 0,
    }
    assert {name: run[name] for name in expected} == expected


def test_a_kernels_fault_is_told_by_the_next_waiting_call_and_stays_while_the_context_does(
    host: shim.Host,
) -> None:
    run = host.run("fault")
    told = [run[name] for name in ("launch", "synchronise", "launch_again", "alloc")]
    assert told == [0, 700, 700, 700]
    assert [run[name] for name in ("destroy", "create", "alloc_in_new")] == [0, 0, 0]


def test_an_asynchronous_error_is_told_once(host: shim.Host) -> None:
    run = host.run("deferred")
    assert [run[name] for name in ("memset", "alloc", "alloc_again")] == [0, 801, 0]


def test_with_kvmpool_sync_each_call_has_its_own_answer(host: shim.Host) -> None:
    run = host.run("deferred", KVMPOOL_SYNC="1")
    assert [run[name] for name in ("memset", "alloc", "alloc_again")] == [801, 0, 0]


def test_beyond_the_claim_is_out_of_memory_and_what_is_freed_is_there_again(host: shim.Host) -> None:
    run = host.run("quota")
    assert run["granted"] == shim.MEMORY // (4 << 20)
    assert run["refused"] == 2
    assert run["granted_again"] == run["granted"]
    assert run["more_than_all"] == 2


def test_two_processes_share_the_claim(host: shim.Host) -> None:
    first = host.start("lost")
    assert first.stdout is not None
    assert first.stdout.readline() == "ready=1\n"
    assert host.run("quota")["granted"] == shim.MEMORY // (4 << 20) - 1, "one page is the other's"
    host.finish(first, "\n")


def test_contexts_are_a_stack_of_each_thread(host: shim.Host) -> None:
    run = host.run("contexts")
    assert run.code == 0, run.lines
    assert (run["none_current"], run["push_destroyed"], run["flags"]) == (201, 201, 4)
    for name in ("second_current", "first_current", "none_left", "primary_inactive", "one_primary", "primary_gone"):
        assert run[name] == 1, name


def test_each_thread_has_its_own_per_thread_stream(host: shim.Host) -> None:
    assert host.run("per_thread").code == 0
    assert host.driver_calls().count("cuStreamCreate") == 2
    wait_until(lambda: host.driver_calls().count("cuStreamDestroy") == 2, what="a stream ends with its thread")


def test_the_compilers_words_come_home(host: shim.Host) -> None:
    run = host.run("modules")
    assert run["bad_image"] == 218
    assert "log=line 1: bad" in run.lines
    assert (run["global_bytes"], run["global_copy"], run["no_global"]) == (4, 0, 500)


def test_events_measure_and_end(host: shim.Host) -> None:
    run = host.run("events")
    assert (run["microseconds"], run["destroyed_twice"]) == (1500, 400)


def test_function_lookup_honours_version_and_stream_flag(host: shim.Host) -> None:
    lines = host.run("lookup").lines
    assert lines[:12] == [
        "@0/0=0 status 1 null",
        "cuNoSuchThing@13000/0=0 status 1 null",
        "cuMemAlloc@12000/0=0 status 0 cuMemAlloc_v2",
        "cuMemAlloc@2000/0=0 status 0 cuMemAlloc",
        "cuCtxCreate@12000/0=0 status 0 cuCtxCreate_v3",
        "cuCtxCreate@13000/0=0 status 0 cuCtxCreate_v4",
        "cuStreamSynchronize@12000/1=0 status 0 cuStreamSynchronize",
        "cuStreamSynchronize@12000/2=0 status 0 cuStreamSynchronize_ptsz",
        "cuMemcpyHtoD@12000/2=0 status 0 cuMemcpyHtoD_v2_ptds",
        "cuMemAlloc@12000/2=0 status 0 cuMemAlloc_v2",
        "cuTexObjectCreate@12000/0=0 status 0 cuTexObjectCreate",
        "cuFuncGetParamInfo@12000/0=0 status 2 null",
    ]


def test_an_unsupported_function_says_so_and_is_logged_once(host: shim.Host) -> None:
    run = host.run("lookup")
    assert (run["texture"], run["texture_again"], run["before_init"]) == (801, 801, 3)
    assert run.log.count("cuTexObjectCreate is not supported") == 1
