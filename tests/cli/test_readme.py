"""What README and ARCHITECTURE tell a person to type exists, with these options."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest

from kvmpool.cli.main import cli

ROOT = Path(__file__).parents[2]
DOCUMENTS = ("README.md", "docs/ARCHITECTURE.md")


def told() -> list[tuple[str, bool]]:
    """Each `kvmpool ...`; true: of a code block, to be typed as it is, and not named between backquotes."""
    found: set[tuple[str, bool]] = set()
    for name in DOCUMENTS:
        for number, part in enumerate(re.split(r"^```.*$", (ROOT / name).read_text(), flags=re.MULTILINE)):
            lines = part.splitlines() if number % 2 else re.findall(r"`([^`\n]+)`", part)
            whole = (line.partition(" #")[0].partition(" > ")[0].strip() for line in lines)
            found |= {(line, bool(number % 2)) for line in whole if line.startswith("kvmpool ")}
    return sorted(found)


def parse(words: list[str]) -> None:
    """Raises click's errors: no such command, option or value; something missing."""
    context = click.Context(cli, info_name="kvmpool")
    command: click.Command = cli
    while isinstance(command, click.Group) and words:
        _, found, words = command.resolve_command(context, words)
        assert found is not None
        command = found
    command.make_context(command.name, words, parent=context)


@pytest.mark.parametrize(("line", "typed"), told())
def test_a_command_of_the_documents_exists(line: str, typed: bool) -> None:
    try:
        parse(shlex.split(line)[1:])
    except click.MissingParameter:
        assert not typed


def test_a_command_that_does_not_exist_is_found() -> None:
    with pytest.raises(click.UsageError):
        parse(["lab", "guest", "vm0", "--no-such-option"])
    with pytest.raises(click.UsageError):
        parse(["no-such-command"])


def test_the_documents_tell_of_the_main_commands() -> None:
    words = {line.split()[1] for line, _ in told()}
    assert {"run", "compat", "support", "card", "completion", "lab", "host", "claim", "doctor", "explain"} <= words


def test_each_target_of_make_that_the_readme_names_is_there() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"\bmake ([a-z]+)", (ROOT / "README.md").read_text()))
    assert named
    assert named <= targets
