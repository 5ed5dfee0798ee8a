"""The house rules as tests: lint, types, import contracts, sizes, and words that must not be in the tree."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MODULES = sorted((ROOT / "kvmpool").rglob("*.py")) + sorted((ROOT / "hooks").glob("*.py"))
SOURCES = sorted(path for pattern in ("*.c", "*.h") for path in (ROOT / "kvmpool").rglob(pattern))
MODULE_LINES = 400  # design 02: a file past this is telling you something
FUNCTION_LINES = 50


def _tool(*command: str) -> None:
    done = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}:\n{done.stdout}{done.stderr}"


def test_ruff_finds_nothing() -> None:
    _tool("ruff", "check", ".")


def test_mypy_strict_finds_nothing() -> None:
    _tool("mypy")


def test_imports_go_down_only() -> None:
    script = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([script, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_module_is_short_and_says_what_it_does(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") <= MODULE_LINES, f"{path}: over {MODULE_LINES} lines: split it by what it decides or does"
    tree = ast.parse(text)
    if tree.body:
        assert ast.get_docstring(tree), f"{path}: its first line must say what it decides or does"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or 0) - node.lineno + 1
            assert length <= FUNCTION_LINES, f"{path}:{node.lineno} {node.name} has {length} lines"


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_c_file_is_short_and_so_are_its_functions(path: Path) -> None:
    lines = path.read_text().splitlines()
    assert len(lines) <= MODULE_LINES, f"{path}: over {MODULE_LINES} lines: split it along a noun"
    begin = 0
    for number, line in enumerate(lines, 1):
        if line == "{":
            begin = number
        elif line == "}" and begin:
            assert number - begin + 1 <= FUNCTION_LINES, f"{path}:{begin}: a function of {number - begin + 1} lines"
            begin = 0


def test_no_module_is_a_drawer() -> None:
    drawers = {"utils", "util", "common", "manager", "helper", "helpers", "misc"}
    assert not [p for p in MODULES if p.stem in drawers]


def test_nothing_in_the_tree_points_at_one_machine() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.split()
    found = []
    for name in listed:
        path = ROOT / name
        if path.suffix in {".png", ".bin"} or not path.is_file() or path == Path(__file__):
            continue
        if re.search(r"(^|[\s\"'=])/(work|farm)/", path.read_text(errors="replace")):
            found.append(name)
    assert not found


def test_continuous_integration_runs_what_a_person_runs() -> None:
    assert (ROOT / ".ci/run").read_text().strip().endswith("make test")
    readme = (ROOT / "README.md").read_text()
    assert "make demo" in readme
    assert "make test" in readme
