"""Cuts a PTX text into tokens (PTX ISA 4.3 to 4.5), each with its line."""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass

from kvmpool.softgpu.ptx_tree import Imm, PtxError

_TOKEN = re.compile(
    r"""
    (?P<skip>[ \t\r\f\0]+|//[^\n]*|\#[^\n]*)
  | (?P<newline>\n)
  | (?P<comment>/\*.*?\*/)
  | (?P<string>"(?:[^"\\\n]|\\.)*")
  | (?P<float>0[fF][0-9a-fA-F]{8}|0[dD][0-9a-fA-F]{16}|\d+\.\d*(?:[eE][-+]?\d+)?|\d+[eE][-+]?\d+)
  | (?P<int>0[xX][0-9a-fA-F]+U?|0[bB][01]+U?|\d+U?)
  | (?P<dot>\.[A-Za-z0-9_]+(?:::[A-Za-z0-9_]+)*)
  | (?P<name>[A-Za-z_$%][A-Za-z0-9_$]*)
  | (?P<punct>[{}()\[\]<>,;:=@!|+\-*/&~])
    """,
    re.VERBOSE | re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class Token:
    """`kind` is one of string, float, int, dot, name, punct, end."""

    kind: str
    text: str
    line: int
    glued: bool  # no white space before it


def tokens(text: str) -> list[Token]:
    """Raises PtxError at the first character that starts no token."""
    out: list[Token] = []
    line, position, last_end = 1, 0, -1
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise PtxError(line, f"unexpected character {text[position]!r}")
        kind = match.lastgroup or ""
        if kind == "newline":
            line += 1
        elif kind == "comment":
            line += match.group().count("\n")
        elif kind != "skip":
            out.append(Token(kind, match.group(), line, position == last_end))
            last_end = match.end()
        position = match.end()
    out.append(Token("end", "", line, False))
    return out


def number(token: Token) -> Imm:
    """The value of an int or float token. Raises PtxError for any other."""
    if token.kind not in ("int", "float"):
        raise PtxError(token.line, f"expected a number, found {token.text!r}")
    text = token.text.rstrip("U")
    if token.kind == "int":
        if text[:2] in ("0x", "0X"):
            return Imm(int(text, 16))
        if text[:2] in ("0b", "0B"):
            return Imm(int(text, 2))
        return Imm(int(text, 8) if len(text) > 1 and text[0] == "0" else int(text))
    if text[:2] in ("0f", "0F"):
        return Imm(int(text[2:], 16), "f")
    if text[:2] in ("0d", "0D"):
        return Imm(int(text[2:], 16), "d")
    return Imm(int.from_bytes(struct.pack("<d", float(text)), "little"), "d")
