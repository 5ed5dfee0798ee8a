"""The data plane's programs, built for tests, in a folder of their own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.dataplane.plane import Plane, build


@pytest.fixture
def plane(tmp_path: Path) -> Iterator[Plane]:
    """Programs built with address and undefined-behaviour checks."""
    made = Plane(tmp_path, build("checked"))
    yield made
    made.end()


@pytest.fixture
def plain_plane(tmp_path: Path) -> Iterator[Plane]:
    """Programs built as for use: for what is measured."""
    made = Plane(tmp_path, build("plain"))
    yield made
    made.end()
