"""Reads a PTX text into a `Module` (PTX ISA 4 and 5); it checks the grammar, not what the ops mean."""

from __future__ import annotations

import math

from kvmpool.softgpu.ptx_lexer import Token, number, tokens
from kvmpool.softgpu.ptx_operands import OperandReader
from kvmpool.softgpu.ptx_tree import (
    Block,
    Function,
    Imm,
    Init,
    Instr,
    Item,
    Label,
    Module,
    Name,
    Prototype,
    PtxError,
    RegDecl,
    Targets,
    Variable,
)
from kvmpool.softgpu.ptx_types import SIZES

_LINKAGE = {".visible", ".extern", ".weak", ".common"}
_SPACES = {".global", ".const", ".shared", ".local", ".param", ".reg", ".shared::cta", ".tex"}
_MAX_DEPTH = 64


def parse(text: str) -> Module:
    """Raises PtxError, with the line, where the text is not PTX."""
    reader = _Reader(tokens(text))
    module = Module()
    while reader.peek().kind != "end":
        reader.toplevel(module)
    if not module.version:
        raise PtxError(1, "no .version directive: this is not PTX")
    return module


class _Reader(OperandReader):
    """Recursive descent over the tokens. A cursor and nothing else is kept."""

    # -- the module -------------------------------------------------------------------------------

    def toplevel(self, module: Module) -> None:
        token = self.peek()
        if token.text == ".version":
            self.next()
            module.version = self.next().text
        elif token.text == ".target":
            module.target = self._target()
        elif token.text == ".address_size":
            self.next()
            if self.next().text != "64":
                raise PtxError(token.line, ".address_size other than 64 is not supported")
        elif token.text in (".file", ".loc", ".section", ".pragma"):
            self._skip_debug()
        elif token.text == ".alias":
            self.next()
            alias = self.name()
            self.expect(",")
            module.aliases[alias] = self.name()
            self.expect(";")
        elif token.text == ";":
            self.next()
        else:
            self._definition(module)

    def _definition(self, module: Module) -> None:
        linkage = ""
        while self.peek().text in _LINKAGE:
            linkage = self.next().text[1:]
        token = self.peek()
        if token.text in (".entry", ".func"):
            module.functions.append(self._function(linkage))
        elif token.text in _SPACES:
            module.variables.extend(self._variables(linkage))
            self.expect(";")
        else:
            raise PtxError(token.line, f"{token.text!r} is not supported here")

    def _target(self) -> int:
        self.next()
        target = 0
        while True:
            word = self.next().text
            digits = word.removeprefix("sm_").rstrip("af")
            if digits.isdigit():
                target = int(digits)
            if not self.accept(","):
                return target

    def _skip_debug(self) -> None:
        """`.file 1 "x"`, `.loc 1 2 3`, `.pragma "x";` end with their line or semicolon; `.section` with its brace."""
        first = self.next()
        if first.text == ".section":
            while self.peek().text != "{":
                self.next()
            depth = 0
            while True:
                word = self.next()
                depth += {"{": 1, "}": -1}.get(word.text, 0)
                if depth == 0 or word.kind == "end":
                    return
        while self.peek().line == first.line and self.peek().kind != "end":
            if self.next().text == ";":
                return

    def _function(self, linkage: str) -> Function:
        entry = self.next().text == ".entry"
        self._attributes()
        returns = self._parameters() if self.peek().text == "(" else []
        token = self.peek()
        function = Function(token.line, self.name(), entry, returns, [], None, linkage)
        if self.peek().text == "(":
            function.params = self._parameters()
        self._performance(function)
        if self.accept(";"):
            return function
        self.expect("{")
        function.body = self._block(0)
        return function

    def _attributes(self) -> None:
        if self.accept(".attribute"):
            self.expect("(")
            while not self.accept(")"):
                self.next()

    def _performance(self, function: Function) -> None:
        """.maxntid and .reqntid limit the block; the other hints mean nothing to a CPU."""
        while self.peek().kind == "dot":
            word = self.next()
            numbers: list[int] = []
            while self.peek().kind == "int":
                numbers.append(number(self.next()).value)
                self.accept(",")
            if word.text in (".maxntid", ".reqntid"):
                function.max_threads = math.prod(numbers)
            elif word.text in (".reqnctapercluster", ".explicitcluster"):
                raise PtxError(word.line, f"{word.text} is not supported (thread block clusters)")
            elif word.text == ".pragma":
                self.next()
                self.expect(";")

    def _parameters(self) -> list[Variable]:
        self.expect("(")
        out: list[Variable] = []
        while not self.accept(")"):
            out.extend(self._variables("", single=True))
            self.accept(",")
        return out

    # -- variables --------------------------------------------------------------------------------

    def _variables(self, linkage: str, single: bool = False) -> list[Variable]:
        """`.global .align 4 .v4 .f32 name[3] = {...}, other`."""
        first = self.next()
        space = first.text[1:].split("::")[0]
        type_, vector, align = self._type_words(first)
        out: list[Variable] = []
        while True:
            token = self.peek()
            name = self.name()
            elements, unsized = self._dimensions()
            size = SIZES[type_] * vector
            init = self._initialiser() if self.accept("=") else ()
            total = size * (len(init) if unsized else elements)
            out.append(Variable(token.line, space, type_, name, total, align or size, init, linkage))
            if single or not self.accept(","):
                return out

    def _type_words(self, first: Token) -> tuple[str, int, int]:
        type_, vector, align = "", 1, 0
        while not type_:
            word = self.next()
            if word.text == ".align":
                align = number(self.next()).value
                if align not in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512):
                    raise PtxError(word.line, f".align {align} is not a power of two up to 512")
            elif word.text in (".v2", ".v4", ".v8"):
                vector = int(word.text[2])
            elif word.text == ".attribute":
                self.expect("(")
                while not self.accept(")"):
                    self.next()
            elif word.text[1:] in SIZES and word.kind == "dot":
                type_ = word.text[1:]
            else:
                raise PtxError(word.line, f"{first.text} variables of {word.text!r} are not supported")
        if self.accept(".ptr"):
            while self.peek().kind in ("dot", "int"):
                self.next()
        return type_, vector, align

    def _dimensions(self) -> tuple[int, bool]:
        elements, unsized = 1, False
        while self.accept("["):
            if self.accept("]"):
                unsized = True
                continue
            elements *= number(self.next()).value
            self.expect("]")
        return elements, unsized

    def _initialiser(self, depth: int = 0) -> tuple[Init, ...]:
        if not self.accept("{"):
            return (self._init_value(),)
        if depth > _MAX_DEPTH:
            raise PtxError(self.peek().line, f"an initialiser nested deeper than {_MAX_DEPTH}")
        out: list[Init] = []
        while not self.accept("}"):
            if self.peek().text == "{":
                out.extend(self._initialiser(depth + 1))
            else:
                out.append(self._init_value())
            self.accept(",")
        return tuple(out)

    def _init_value(self) -> Init:
        operand = self.operand()
        if not isinstance(operand, Imm | Name):
            raise PtxError(self.peek().line, "this initialiser is not supported")
        return Init(operand)

    # -- bodies -----------------------------------------------------------------------------------

    def _block(self, depth: int) -> Block:
        if depth > _MAX_DEPTH:
            raise PtxError(self.peek().line, f"blocks nested deeper than {_MAX_DEPTH}")
        block = Block()
        while not self.accept("}"):
            if self.peek().kind == "end":
                raise PtxError(self.peek().line, "the text ends inside a function")
            self._statement(block, depth)
        return block

    def _statement(self, block: Block, depth: int) -> None:
        token = self.peek()
        if token.text == "{":
            self.next()
            block.items.append(self._block(depth + 1))
        elif token.text == ";":
            self.next()
        elif token.text == ".reg":
            block.items.extend(self._registers())
        elif token.text in _SPACES:
            block.items.extend(self._variables(""))
            self.expect(";")
        elif token.text in (".loc", ".file", ".pragma", ".section"):
            self._skip_debug()
        elif token.kind == "name" and self.peek(1).text == ":":
            self.next()
            self.next()
            block.items.append(self._labelled(token))
        else:
            block.items.append(self._instruction())

    def _registers(self) -> list[Item]:
        first = self.next()
        vector = 1
        while self.peek().text in (".v2", ".v4"):
            vector = int(self.next().text[2])
        word = self.next()
        if word.text[1:] not in SIZES and word.text != ".pred":
            raise PtxError(word.line, f"registers of {word.text!r} are not supported")
        out: list[Item] = []
        while True:
            name = self.name()
            count: int | None = None
            if self.accept("<"):
                count = number(self.next()).value
                self.expect(">")
            out.append(RegDecl(first.line, word.text[1:], name, count, vector))
            if not self.accept(","):
                break
        self.expect(";")
        return out

    def _labelled(self, token: Token) -> Item:
        if self.accept(".branchtargets"):
            labels = [self.name()]
            while self.accept(","):
                labels.append(self.name())
            self.expect(";")
            return Targets(token.line, token.text, tuple(labels))
        if self.accept(".callprototype"):
            returns = len(self._parameters()) if self.peek().text == "(" else 0
            self.next()
            params = len(self._parameters()) if self.peek().text == "(" else 0
            while not self.accept(";"):
                self.next()
            return Prototype(token.line, token.text, params, returns)
        return Label(token.line, token.text)

    def _instruction(self) -> Instr:
        guard: Name | None = None
        if self.accept("@"):
            negated = self.accept("!")
            guard = Name(self.name(), negated=negated)
        token = self.peek()
        op = self.name()
        mods: list[str] = []
        while self.peek().kind == "dot":
            mods.append(self.next().text[1:])
        args = []
        while not self.accept(";"):
            args.append(self.operand())
            if not self.accept(",") and self.peek().text != ";":
                raise PtxError(token.line, f"unexpected {self.peek().text!r} in the operands of {op}")
        return Instr(token.line, op, tuple(mods), tuple(args), guard)
