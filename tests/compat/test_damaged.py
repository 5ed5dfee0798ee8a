"""ELF files and fatbins that are cut off or made to be wrong: one clear line each, and never anything else."""

from __future__ import annotations

import os
import random
import struct
from pathlib import Path

import pytest

from kvmpool.compat import elf, fatbin
from kvmpool.compat.elf import Unreadable
from kvmpool.compat.fatbin import FatbinDamaged
from tests.compat import programs as made
from tests.compat.programs import ELF, PTX, compiled, entry, library, section, wrapper

_SHNUM, _SHENTSIZE, _SHOFF, _PHNUM, _PHOFF = 60, 58, 40, 56, 32


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A small library with everything that is read: imports, a search path, a fatbin."""
    folder = tmp_path_factory.mktemp("sound")
    libcuda = library(folder, "libcuda.so.1", ["cuInit"])
    code = section(".nv_fatbin", made.fatbin(entry(PTX, 75), entry(ELF, 90))) + section(".nvFatBinSegment", wrapper())
    source = code + "int cuInit(unsigned); int go(void) { return cuInit(0); }"
    flags = ("-shared", "-fPIC", "-nostdlib", str(libcuda), "-Wl,-rpath,/opt/libs", "-s")
    return compiled(folder, "libsound.so", source, *flags).read_bytes()


def read(folder: Path, data: bytes) -> elf.ElfFacts:
    path = folder / "wrong"
    path.write_bytes(data)
    return elf.read(path)


def refused(folder: Path, data: bytes) -> str:
    line = complaint(folder, data)
    assert str(folder / "wrong") in line
    return line


def complaint(folder: Path, data: bytes) -> str:
    """The line; "" where it is read."""
    path = folder / "wrong"
    path.write_bytes(data)
    try:
        elf.read(path)
    except Unreadable as error:
        line = str(error)
        assert line.isprintable(), line  # noqa: PT017
        return line
    return ""


def with_field(data: bytes, at: int, form: str, value: int) -> bytes:
    wrong = bytearray(data)
    struct.pack_into(form, wrong, at, value)
    return bytes(wrong)


def test_the_sound_one_is_read(tmp_path: Path, sound: bytes) -> None:
    facts = read(tmp_path, sound)
    assert (facts.needed, facts.search, facts.imports, facts.fatbins) == (
        ("libcuda.so.1",),
        ("/opt/libs",),
        ("cuInit",),
        1,
    )
    assert [code.label for code in facts.code] == ["ELF sm_90", "PTX compute_75"]


def test_a_file_cut_off_anywhere_is_read_or_refused_with_a_line(tmp_path: Path, sound: bytes) -> None:
    for length in range(0, len(sound), 97):
        complaint(tmp_path, sound[:length])
    assert "not an ELF file" in refused(tmp_path, b"")
    assert "cut off in its header" in refused(tmp_path, sound[:32])
    assert "do not fit" in refused(tmp_path, sound[:-64])


@pytest.mark.parametrize(
    ("at", "form", "value"),
    [
        (_SHNUM, "<H", 0xFFFF),
        (_SHENTSIZE, "<H", 0),
        (_SHENTSIZE, "<H", 1),
        (_SHOFF, "<Q", 1 << 63),
        (_SHOFF, "<Q", (1 << 64) - 1),
        (_PHNUM, "<H", 0xFFFF),
        (_PHOFF, "<Q", (1 << 64) - 1),
    ],
)
def test_a_header_that_lies_is_refused(tmp_path: Path, sound: bytes, at: int, form: str, value: int) -> None:
    assert "damaged ELF file" in refused(tmp_path, with_field(sound, at, form, value))


def test_a_count_of_sections_in_the_first_section_is_not_believed(tmp_path: Path, sound: bytes) -> None:
    (offset,) = struct.unpack_from("<Q", sound, _SHOFF)
    wrong = with_field(with_field(sound, _SHNUM, "<H", 0), offset + 32, "<Q", 1 << 60)
    assert "more sections than bytes" in refused(tmp_path, wrong)


def test_flipped_bytes_never_raise_anything_else(tmp_path: Path, sound: bytes) -> None:
    dice = random.Random(3)
    refusals = 0
    for _ in range(400):
        wrong = bytearray(sound)
        for _ in range(dice.randint(1, 8)):
            wrong[
                dice.choice((dice.randrange(len(wrong)), dice.randrange(64), len(wrong) - 1 - dice.randrange(1024)))
            ] = dice.choice((0, 1, 0x7F, 0xFF, dice.randrange(256)))
        refusals += bool(complaint(tmp_path, bytes(wrong)))
    assert refusals > 50


def test_what_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero"), tmp_path):
        with pytest.raises(Unreadable, match="not a file"):
            elf.read(path)


def test_a_32_bit_program_is_told_so(tmp_path: Path, sound: bytes) -> None:
    assert "64-bit" in refused(tmp_path, with_field(sound, 4, "<B", 1))


# --- fatbins ----------------------------------------------------------------------------------------------------------

GOOD = made.fatbin(entry(PTX, 75), entry(ELF, 90))


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"text" + GOOD, "should begin at byte 0"),
        (GOOD + b"\1", "should begin at byte"),
        (GOOD[:12], "is cut off"),
        (GOOD[:-1], "are left"),
        (made.fatbin(entry(PTX, 75), size=1 << 63), "are left"),
        (with_field(GOOD, 6, "<H", 15), "says it has 15"),
        (with_field(GOOD, 6, "<H", 0xFFFF), "says it has 65535"),
        (made.fatbin(entry(PTX, 75, size=(1 << 64) - 1)), "the entry at byte 16"),
        (with_field(GOOD, 16 + 4, "<I", 0), "the entry at byte 16 says it has 0"),
        (with_field(GOOD, 16 + 4, "<I", 0xFFFFFFFF), "the entry at byte 16"),
        (made.fatbin(entry(PTX, 75) + b"rest"), "is cut off"),
    ],
)
def test_every_length_of_a_fatbin_is_checked(data: bytes, words: str) -> None:
    with pytest.raises(FatbinDamaged, match=words):
        fatbin.read(data)


def test_an_unknown_kind_is_named_by_its_number() -> None:
    assert [code.label for code in fatbin.read(made.fatbin(entry(77, 90)))] == ["KIND 77 90"]


def test_padding_and_emptiness_are_no_damage() -> None:
    assert fatbin.read(b"") == ()
    assert fatbin.read(bytes(24)) == ()
    assert len(fatbin.read(bytes(8) + GOOD + bytes(40) + GOOD + bytes(3))) == 2


@pytest.mark.parametrize("data", [wrapper()[:-1], bytes(24), wrapper() + bytes(24)])
def test_a_list_of_fatbins_that_is_none_is_damage(data: bytes) -> None:
    with pytest.raises(FatbinDamaged):
        fatbin.wrappers(data)


def test_damaged_gpu_code_is_told_and_the_rest_of_the_program_is_answered(tmp_path: Path) -> None:
    source = section(".nv_fatbin", GOOD[:-1]) + "int main(void) { return 0; }"
    facts = elf.read(compiled(tmp_path, "half", source))
    assert "are left" in facts.damage
    assert facts.needed
