"""What no backend takes: keys, sizes; and that what it takes it keeps as it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvmpool.errors import Refused
from kvmpool.ports import Must, Put
from kvmpool.store import contract
from tests.store.backends import NAMES, Backend, Client, MovableClock


@pytest.fixture(params=NAMES)
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Backend:
    return Backend(request.param, tmp_path)


@pytest.mark.parametrize("key", ["", "/" + "x" * contract.MAX_KEY_BYTES, "/a\nb", "/\x00", "/\udc80", "/\U0010ffff"])
def test_a_key_that_is_no_key_is_refused(backend: Backend, key: str) -> None:
    async def story(client: Client, _: MovableClock) -> None:
        with pytest.raises(Refused, match="printable"):
            await client.put(key, b"")
        with pytest.raises(Refused, match="printable"):
            await client.commit(guards=[(key, Must.ABSENT)])

    backend.run(story)


def test_sizes_have_limits_and_the_limit_itself_fits(backend: Backend) -> None:
    async def story(client: Client, _: MovableClock) -> None:
        await client.put("/" + "k" * (contract.MAX_KEY_BYTES - 1), b"v" * contract.MAX_VALUE_BYTES)
        with pytest.raises(Refused, match=f"at most {contract.MAX_VALUE_BYTES}"):
            await client.put("/a", b"v" * (contract.MAX_VALUE_BYTES + 1))
        with pytest.raises(Refused, match="more than 512 keys"):
            await client.commit(deletes=[f"/{n}" for n in range(contract.MAX_COMMIT_KEYS + 1)])
        with pytest.raises(Refused, match="twice"):
            await client.commit(puts=[Put("/a", b"1")], deletes=["/a"])
        assert await client.get("/a") is None

    backend.run(story)


def test_any_bytes_are_kept_as_they_are(backend: Backend) -> None:
    async def story(client: Client, _: MovableClock) -> None:
        for value in (b"", bytes(range(256)), b"\xff" * 100):
            await client.put("/a", value)
            item = await client.get("/a")
            assert item is not None
            assert item.value == value

    backend.run(story)
