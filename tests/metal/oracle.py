"""Kernels that Apple's compiler built, from AIR (LLVM bitcode) to x86 code for the emulator.

The instructions stay as they are; the built-ins (air.*) are those of emulator/. What is written
here is the target, an entry function that fetches the kernel's arguments from the emulator's
context, the storage of function constants, and the built-ins on <64 x float>, a matrix of which a
lane holds the first two elements.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

from . import macos, metallib
from .frontend import POSITIONS, split_top
from .runner import Library
from .tools import CLANG, DIS, LLVM, X86, cached, emulator_objects, run

LAYOUT = "e-m:e-p270:32:32-p271:32:32-p272:64:64-i64:64-i128:128-f80:128-n8:16:32:64-S128"  # x86's
HEADER = f"""\
target datalayout = "{LAYOUT}"
target triple = "x86_64-unknown-linux-gnu"
declare void @rt_mma_f32(ptr, ptr, ptr, ptr) convergent
declare void @rt_matrix_load(ptr, ptr, i64, i64, i64, i32)
declare void @rt_matrix_store(ptr, ptr, i64, i64, i64, i32)
"""
# the fields of Context in emulator/simt.h, in order; see _offset
POINTERS = ("buf", "tg")
VECTORS = ("tpg", "tgp", "tpt", "tptg", "tgpg", "tpgrid")
SCALARS = ("tit", "sg", "lane", "nsg", "sgsize", "dsg", "qlane", "quad")
SPACES = {0: "thread", 1: "device", 2: "constant", 3: "threadgroup"}
LLVM_TYPES = {"f32": "float", "f16": "half", "bf16": "bfloat"}


class Argument(NamedTuple):
    """A kernel's parameter: 'buf' or 'tg' and its index, or 'id' and a field of the context."""

    kind: str
    value: int | str
    text: str  # as in Metal

    def place(self) -> tuple[str, int]:
        """The context's field, and the index in it."""
        return (str(self.value), 0) if self.kind == "id" else (self.kind, int(self.value))


def _offset(field: str, index: int) -> int:
    """In bytes, in Context."""
    if field in POINTERS:
        return POINTERS.index(field) * 31 * 8 + index * 8
    vectors = 2 * 31 * 8
    if field in VECTORS:
        return vectors + VECTORS.index(field) * 12
    return vectors + len(VECTORS) * 12 + SCALARS.index(field) * 4


def _argument(metadata: str) -> Argument:
    """From a line such as !{i32 0, !"air.buffer", !"air.location_index", i32 0, ...}."""

    def after(key: str) -> str:
        found = re.search(rf'!"air\.{key}", (?:!"([^"]*)"|i32 (\d+))', metadata)
        return (found.group(1) or found.group(2)) if found else ""

    kind, name = after("arg_type_name"), after("arg_name")
    if '!"air.buffer"' in metadata:
        space, index = int(after("address_space")), int(after("location_index"))
        field = "tg" if space == 3 else "buf"
        attribute = "threadgroup" if space == 3 else "buffer"
        const = "" if '!"air.read_write"' in metadata or '!"air.write"' in metadata else "const "
        where = f"[[{attribute}({index})]]"
        return Argument(field, index, f"{const}{SPACES[space]} {kind}* {name} {where}")
    attribute = next(a for a in re.findall(r'"air\.(\w+)"', metadata) if a in POSITIONS)
    return Argument("id", POSITIONS[attribute], f"{kind} {name} [[{attribute}]]")


class Constant(NamedTuple):
    """A function constant."""

    index: int
    kind: str
    name: str
    symbol: str  # of the variable that holds its value


class Module:
    """One kernel's module of LLVM IR, as text."""

    def __init__(self, text: str) -> None:
        self.text = text
        metadata = dict(re.findall(r"^(!\d+) = (.*)$", text, re.M))
        (kernel,) = re.findall(r"^!air\.kernel = !\{(!\d+)\}", text, re.M)
        found = re.match(r"!\{ptr (@[^,]+), !\d+, (!\d+)", metadata[kernel])
        assert found
        self.function = found.group(1)
        lines = (metadata[m] for m in re.findall(r"!\d+", metadata[found.group(2)]))
        self.arguments = [_argument(line) for line in lines]
        self.constants = [
            Constant(int(index), kind, name, symbol)
            for symbol, kind, name, index in re.findall(
                r'!\{ptr addrspace\(2\) (@[^,]+), !"(\w+)", !"(\w+)", i32 (\d+), i1 \w+\}', text
            )
        ]

    def _signature(self) -> list[str]:
        """The LLVM types of the arguments."""
        define = rf"^define [^\n]*{re.escape(self.function)}\((.*)\) [^\n]*\{{$"
        (parameters,) = re.findall(define, self.text, re.M)
        kinds = (
            re.match(r"\s*(ptr(?: addrspace\(\d\))?|<\d+ x \w+>|\w+)", parameter)
            for parameter in split_top(parameters)
        )
        return [kind.group(1) for kind in kinds if kind]

    def _entry(self, symbol: str) -> str:
        """A function that takes a context and calls the kernel."""
        # function constants get their values when the module's initialisers run
        initialisers = re.findall(
            r'^define internal void (@\S+)\(\)[^\n]*section "air.static_init"', self.text, re.M
        )
        lines = [f"call void {initialiser}()" for initialiser in initialisers]
        values = []
        for i, (argument, kind) in enumerate(zip(self.arguments, self._signature(), strict=True)):
            lines.append(f"%at{i} = getelementptr i8, ptr %c, i64 {_offset(*argument.place())}")
            if "i16" in kind:  # the context has 32 bits
                wide = kind.replace("i16", "i32")
                lines.append(f"%wide{i} = load {wide}, ptr %at{i}, align 4")
                lines.append(f"%v{i} = trunc {wide} %wide{i} to {kind}")
            else:
                lines.append(f"%v{i} = load {kind}, ptr %at{i}, align 4")
            values.append(f"{kind} %v{i}")
        lines += [f"call void {self.function}({', '.join(values)})", "ret void"]
        return _define("void", f"@{symbol}", "ptr %c", lines, "convergent")

    def program(self, symbol: str) -> str:
        """The module for the emulator, whose entry is `symbol`."""
        text = re.sub(r"^(target \w+|source_filename) = .*$", "", self.text, flags=re.M)
        text = re.sub(
            r"^(@.* addrspace\(3\) global .*?)(, align \d+)$",
            r'\1, section "msltg"\2',
            text,
            flags=re.M,
        )
        getters = ""
        for constant in self.constants:
            # one variable for all the kernels of a library, which the runner writes to
            shared = f"@function_constant_{constant.index}"
            declared = re.search(
                rf"^{re.escape(constant.symbol)} = .*? (?:constant|global) (\w+) .*$", text, re.M
            )
            assert declared
            weak = f"{shared} = weak addrspace(2) global {declared.group(1)} 0"
            text = text.replace(declared.group(0), weak)
            text = re.sub(rf"{re.escape(constant.symbol)}(?![\w.$])", shared, text)
            getters += _define(
                "weak i64",
                f"@__fc_{constant.index}",
                "",
                [f"ret i64 ptrtoint (ptr addrspace(2) {shared} to i64)"],
            )
        text = text.replace(' section "air.static_init"', "")
        text, matrices = _define_matrices(text)
        return HEADER + text + getters + self._entry(symbol) + matrices


def _define(result: str, name: str, parameters: str, lines: list[str], attributes: str = "") -> str:
    body = "".join(f"  {line}\n" for line in lines)
    return f"define {result} {name}({parameters}) {attributes} {{\n{body}}}\n"


def _spill(kind: str, matrix: str, to: str) -> list[str]:
    """The lane's two elements as floats at a pointer."""
    lines = [f"{to} = alloca [2 x float]"]
    for i in (0, 1):
        element = f"{to}.e{i}"
        lines.append(f"{element} = extractelement <64 x {kind}> {matrix}, i64 {i}")
        if kind != "float":
            lines.append(f"{element}f = fpext {kind} {element} to float")
            element += "f"
        lines.append(f"{to}.p{i} = getelementptr float, ptr {to}, i64 {i}")
        lines.append(f"store float {element}, ptr {to}.p{i}")
    return lines


def _matrix_at(pointer: str) -> list[str]:
    """Return the matrix of float whose two elements are at a pointer."""
    return [
        f"%x0 = load float, ptr {pointer}",
        f"%x1p = getelementptr float, ptr {pointer}, i64 1",
        "%x1 = load float, ptr %x1p",
        "%r0 = insertelement <64 x float> poison, float %x0, i64 0",
        "%r1 = insertelement <64 x float> %r0, float %x1, i64 1",
        "ret <64 x float> %r1",
    ]


def _matrix_function(name: str) -> str:
    """The definition of a built-in on matrices."""
    how = "alwaysinline convergent"
    result = "linkonce_odr hidden <64 x float>"
    if "init_filled" in name:
        lines = [
            "%r0 = insertelement <64 x float> poison, float %x, i64 0",
            "%r1 = insertelement <64 x float> %r0, float %x, i64 1",
            "ret <64 x float> %r1",
        ]
        return _define(result, name, "float %x", lines, how)
    if "multiply_accumulate" in name:
        kinds = [LLVM_TYPES[kind] for kind in re.findall(r"v64(bf16|f16|f32)", name)[1:]]
        parameters = ", ".join(f"<64 x {k}> %{n}" for k, n in zip(kinds, "abc", strict=True))
        lines = ["%d = alloca [2 x float]"]
        for kind, n in zip(kinds, "abc", strict=True):
            lines += _spill(kind, f"%{n}", f"%at.{n}")
        lines.append("call void @rt_mma_f32(ptr %d, ptr %at.a, ptr %at.b, ptr %at.c)")
        return _define(result, name, parameters, lines + _matrix_at("%d"), how)
    place = "ptr addrspace(1) %p, i64 %row, <2 x i64> %origin, i1 %transposed"
    lines = [
        "%ox = extractelement <2 x i64> %origin, i64 0",
        "%oy = extractelement <2 x i64> %origin, i64 1",
        "%t = zext i1 %transposed to i32",
        "%q = addrspacecast ptr addrspace(1) %p to ptr",
    ]
    arguments = "(ptr %d, ptr %q, i64 %row, i64 %ox, i64 %oy, i32 %t)"
    if "_load" in name:
        lines += ["%d = alloca [2 x float]", f"call void @rt_matrix_load{arguments}"]
        return _define(result, name, place, lines + _matrix_at("%d"), how)
    lines += _spill("float", "%x", "%d")
    lines += [f"call void @rt_matrix_store{arguments}", "ret void"]
    return _define("linkonce_odr hidden void", name, f"<64 x float> %x, {place}", lines, how)


def _define_matrices(text: str) -> tuple[str, str]:
    """The text without the declarations of built-ins on matrices, and their definitions."""
    declaration = r"^declare .*(@air\.simdgroup_matrix\w*[\w.]*)\(.*$"
    names = re.findall(declaration, text, re.M)
    return re.sub(declaration, "", text, flags=re.M), "".join(map(_matrix_function, names))


def disassemble(name: str) -> Module:
    """A kernel of the metallib as LLVM IR."""
    return Module(run(DIS, "-", "-o", "-", input=metallib.bitcode(name)))


def build(names: tuple[str, ...]) -> Path:
    """Compile kernels of the metallib for the emulator: the path of the .so."""
    metallib.kernels()

    def make(folder: Path) -> None:
        objects, described = [], []
        constants: dict[int, Constant] = {}
        for i, name in enumerate(names):
            module, entry = disassemble(name), f"__msl_entry_{i}"
            ir, obj = folder / f"{i}.ll", folder / f"{i}.o"
            ir.write_text(module.program(entry))
            run(CLANG, "-x", "ir", *X86, "-O2", "-fPIC", "-w", "-c", ir, "-o", obj)
            objects.append(obj)
            parameters = [(argument.kind, argument.value) for argument in module.arguments]
            described.append({"name": name, "entry": entry, "args": parameters})
            constants |= {constant.index: constant for constant in module.constants}
        libraries = [f"--ld-path=ld.lld-{LLVM}", "-lm", "-lstdc++", "-Wl,-z,nostart-stop-gc"]
        so = folder / "kernel.so"
        run(CLANG, "-shared", "-o", so, *objects, *emulator_objects(), *libraries)
        listed = [(c.index, c.kind, c.name) for c in constants.values()]
        described_all: dict[str, Any] = {"kernels": described, "constants": listed}
        (folder / "kernel.so.json").write_text(json.dumps(described_all))

    return cached("oracle", (macos.MLX_VERSION, names), make) / "kernel.so"


def oracle(*names: str) -> Library:
    """Kernels of the mlx-metal wheel, as Apple's compiler built them, as a `Library`."""
    return Library(build(names))
