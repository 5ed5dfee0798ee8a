"""One pool for all tests that only read: a served claim, one that fits nowhere, one of a domain that is off."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.api.pool import UUID, Pool, xml
from tests.cli.served import Served

WAITS = xml(
    'name="gpu0" mode="vgpu" memory="99999" required="no"', name="vm1", uuid="9f1c2d3e-0000-4000-8000-000000000002"
)
OFF = xml('name="gpu0" mode="passthrough"', name="vm2", uuid="9f1c2d3e-0000-4000-8000-000000000003")
BARE = xml(name="vm3", uuid="9f1c2d3e-0000-4000-8000-000000000004")


async def _furnish(pool: Pool) -> None:
    pool.define(running=True)
    pool.define(WAITS, running=True)
    pool.define(OFF, running=False)
    pool.define(BARE, running=False)
    await pool.call("prepare")
    await pool.call("prepare", WAITS, "vm1")
    await pool.until(lambda rows: rows.attempts[UUID].started and len(pool.domains()) == 4)


@pytest.fixture(scope="module")
def _furnished() -> Iterator[Served]:
    with tempfile.TemporaryDirectory(prefix="kp-") as folder, Served(Path(folder)) as served:
        served.story(_furnish)
        yield served


@pytest.fixture
def served(_furnished: Served, monkeypatch: pytest.MonkeyPatch) -> Served:
    """The furnished pool, found as a person's commands find it."""
    monkeypatch.setenv("KVMPOOL_SOCKET", str(_furnished.socket))
    return _furnished


@pytest.fixture
def alone(short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    """A pool of its own, for a test that changes it; furnished too."""
    with Served(short_dir) as pool:
        pool.story(_furnish)
        monkeypatch.setenv("KVMPOOL_SOCKET", str(pool.socket))
        yield pool
