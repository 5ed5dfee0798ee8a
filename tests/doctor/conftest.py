"""A sound machine for every test."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.doctor.place import Machine


@pytest.fixture
def machine(short_dir: Path) -> Machine:
    return Machine(short_dir)
