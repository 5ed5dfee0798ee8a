"""The engine, built once a session, with a cache of its own."""

from __future__ import annotations

import pytest

from tests.softgpu.engine import Engine, build_engine


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    root = tmp_path_factory.mktemp("softgpu")
    return Engine(build_engine(root), root)
