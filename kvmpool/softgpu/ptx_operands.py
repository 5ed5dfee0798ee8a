"""Reads the operands of an instruction: registers, numbers, addresses, vectors, call lists (PTX ISA 6)."""

from __future__ import annotations

from kvmpool.softgpu.ptx_lexer import Token, number
from kvmpool.softgpu.ptx_tree import Addr, Group, Imm, Name, Operand, Pair, PtxError, Vec


class OperandReader:
    """A cursor over tokens, and what can stand where an operand stands."""

    def __init__(self, items: list[Token]) -> None:
        self._items = items
        self._at = 0

    def peek(self, ahead: int = 0) -> Token:
        return self._items[min(self._at + ahead, len(self._items) - 1)]

    def next(self) -> Token:
        token = self.peek()
        self._at += 1
        if token.kind == "end" and self._at > len(self._items) + 1:
            raise PtxError(token.line, "the text ends too early")
        return token

    def accept(self, text: str) -> bool:
        if self.peek().text != text or self.peek().kind == "string":
            return False
        self._at += 1
        return True

    def expect(self, text: str) -> None:
        if not self.accept(text):
            raise PtxError(self.peek().line, f"expected {text!r}, found {self.peek().text!r}")

    def name(self) -> str:
        token = self.next()
        if token.kind != "name":
            raise PtxError(token.line, f"expected a name, found {token.text!r}")
        return token.text

    def operand(self) -> Operand:
        token = self.peek()
        if token.text == "{":
            return Vec(self._list("{", "}"))
        if token.text == "(":
            return Group(self._list("(", ")"))
        if token.text == "[":
            return self._address()
        first = self._scalar()
        if self.accept("|"):
            return Pair(first, self._scalar())
        return first

    def _list(self, opening: str, closing: str) -> tuple[Operand, ...]:
        self.expect(opening)
        out: list[Operand] = []
        while not self.accept(closing):
            out.append(self._scalar())
            if not self.accept(",") and self.peek().text != closing:
                raise PtxError(self.peek().line, f"expected ',' or {closing!r}, found {self.peek().text!r}")
        return tuple(out)

    def _scalar(self) -> Imm | Name:
        if self.peek().kind in ("int", "float") or self.peek().text in ("-", "~", "+"):
            return self._number()
        negated = self.accept("!")
        name = self.name()
        if name == "generic" and self.accept("("):
            name = self.name()
            self.expect(")")
        part = ""
        if self.peek().kind == "dot" and self.peek().glued:
            part = self.next().text[1:]
        return Name(name, part, negated, self._offset())

    def _number(self) -> Imm:
        signs = []
        while self.peek().text in ("-", "+", "~"):
            signs.append(self.next().text)
        value = number(self.next())
        for sign in reversed(signs):
            value = _with_sign(sign, value)
        return value

    def _offset(self) -> int:
        total = 0
        while self.peek().text in ("+", "-"):
            sign = 1 if self.next().text == "+" else -1
            total += sign * self._number().value
        return total

    def _address(self) -> Operand:
        self.expect("[")
        if self.peek().kind == "name":
            name = self._scalar()
            assert isinstance(name, Name)
            base, offset = Name(name.name, name.part), name.offset
        else:
            base, offset = None, self._number().value
        if not self.accept("]"):
            return self._beyond_address()
        return Addr(base, offset)

    def _beyond_address(self) -> Operand:
        """Textures and tensors: `[t, {x, y}]`. No op takes the empty vector, so each is refused by its name."""
        while not self.accept("]"):
            if self.peek().text in (";", "[") or self.peek().kind == "end":
                raise PtxError(self.peek().line, f"expected ']', found {self.peek().text!r}")
            self.next()
        return Vec(())


def _with_sign(sign: str, imm: Imm) -> Imm:
    if sign == "+":
        return imm
    if imm.kind == "i":
        return Imm(-imm.value if sign == "-" else ~imm.value)
    return Imm(imm.value ^ (1 << (31 if imm.kind == "f" else 63)), imm.kind)
