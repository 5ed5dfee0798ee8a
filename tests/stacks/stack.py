"""The Python of the environment that real CUDA stacks are installed in: scripts/install-stacks .venv-stacks."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-stacks" / "bin" / "python"


def python(*modules: str) -> Path:
    """Skips where it, or one of these packages, is not installed."""
    if not PYTHON.exists():
        pytest.skip("the stacks are not installed. Next: scripts/install-stacks .venv-stacks")
    for module in modules:
        if not any(PYTHON.parents[1].glob(f"lib/python*/site-packages/{module}")):
            pytest.skip(f"{module} is not installed in .venv-stacks")
    return PYTHON
