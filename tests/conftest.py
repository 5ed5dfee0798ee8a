"""What every test may use, and what CI insists on: there, nothing may be skipped for a missing part."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

CI = os.environ.get("CI") == "true"


@pytest.fixture
def short_dir() -> Iterator[Path]:
    """A folder with a short path: unix socket addresses end at 107 bytes."""
    path = Path(tempfile.mkdtemp(prefix="kp-"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """A skip in continuous integration is a failure, unless the test is marked as one CI cannot run."""
    outcome = yield
    report = outcome.get_result()  # type: ignore[attr-defined]
    if CI and report.skipped and not hasattr(report, "wasxfail") and item.get_closest_marker("not_in_ci") is None:
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid}: skipped, but CI must run it: {report.longrepr}"


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--regenerate`: golden logs are written instead of compared."""
    parser.addoption("--regenerate", action="store_true", help="write the scenarios' golden logs anew")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Quick tests first, those that start a lab or want the machine alone last."""
    items.sort(key=lambda item: any(item.get_closest_marker(name) for name in ("e2e", "alone")))
