"""The translator alone: whatever the text, it answers with C or with a PtxError that names a line."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest

from kvmpool.softgpu import translate
from kvmpool.softgpu.ptx_lexer import tokens
from kvmpool.softgpu.ptx_parse import parse
from kvmpool.softgpu.ptx_tree import PtxError
from tests.softgpu.nvrtc import ptx
from tests.softgpu.test_engine_kernels import MATMUL, REDUCE, WIDE


@pytest.fixture(scope="module", params=["compute_75", "compute_100"])
def text(request: pytest.FixtureRequest) -> str:
    return ptx(MATMUL + REDUCE + WIDE, str(request.param))


def _answers(text: str) -> bool:
    """Whether it is taken; anything but C or a PtxError fails the test."""
    try:
        return "kp_unit" in translate.translate([text])
    except PtxError as error:
        said, line = str(error), error.line
    assert said.startswith(f"line {line}: ")
    assert "\n" not in said
    return False


def test_nvrtcs_text_is_taken(text: str) -> None:
    assert _answers(text)


def test_a_cut_text_is_refused_with_a_line(text: str) -> None:
    rng = random.Random(21)
    taken = [_answers(text[: rng.randrange(300, len(text) - 20)]) for _ in range(40)]
    assert taken.count(True) < 10  # a cut between two functions may leave a whole module


def test_shuffled_words_never_break_the_translator(text: str) -> None:
    """One to four tokens are dropped, doubled or replaced by others of the same text."""
    rng = random.Random(22)
    words = [token.text for token in tokens(text)][:3000]
    last = max(index for index, word in enumerate(words) if word == "}" and words[index - 1] in (";", "}"))
    words = words[: last + 1]
    refused = 0
    for _ in range(120):
        mutated = list(words)
        for _ in range(rng.randrange(1, 5)):
            at = rng.randrange(8, len(mutated))
            mutated[at : at + 1] = rng.choice(
                [[], [mutated[at]] * 2, [rng.choice(words)], [str(rng.randrange(1 << 40))]]
            )
        refused += not _answers(" ".join(mutated))
    assert refused > 60


def test_what_is_not_ptx_is_refused() -> None:
    for text in ("", "hello", "\0\0\0", "{" * 100000, ".version", "int main() { return 0; }"):
        with pytest.raises(PtxError):
            parse(text)


def test_deep_nesting_is_refused_and_not_a_crash() -> None:
    head = ".version 8.0\n.target sm_75\n.address_size 64\n.visible .entry k() "
    assert not _answers(head + "{" * 5000 + "}" * 5000)
    assert not _answers(head + "{ mov.u32 " + "(" * 5000 + ")" * 5000 + "; }")


def test_it_runs_as_a_script_with_the_standard_library_only(tmp_path: Path) -> None:
    """-I -S: no site-packages, so nothing but the standard library can have been imported."""
    source, out = tmp_path / "k.ptx", tmp_path / "k.c"
    source.write_text(ptx(MATMUL))
    command = [sys.executable, "-I", "-S", translate.__file__, str(out), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert "kp_unit" in out.read_text()
    source.write_text(
        ".version 8.0\n.target sm_90\n.address_size 64\n.visible .entry k() {\nwgmma.fence.sync.aligned;\nret; }"
    )
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == translate.REFUSED
    assert done.stderr == "line 5: wgmma.fence.sync.aligned is not supported by the software GPU\n"
