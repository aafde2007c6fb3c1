"""A .metal file -> C++ for OpenCL -> x86 code for the emulator, with stock clang.

- preprocess: `clang -E` with `__METAL_VERSION__` set and shim/metal_stdlib for Apple's headers;
- rewrite: the few things that clang has no words for (attributes, explicit kernel instances,
  threadgroup variables, function constants);
- entries: one extern "C" function a kernel, which takes the emulator's context;
- compile: `clang -x cl -cl-std=clc++2021` with shim/msl_shim.h in front.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from .runner import Library
from .tools import CLANG, LLVM, SHIM, X86, BenchError, cached, emulator_objects, run

# Without the generic address space clang refuses to return structs, so it stays on, and a pointer
# that names no space is left to the lint.
CL_FLAGS = [
    *("-x", "cl", "-cl-std=clc++2021", "-cl-no-stdinc", "-cl-single-precision-constant"),
    *("-Xclang", "-cl-ext=+cl_khr_fp16,-cl_khr_fp64,-__opencl_c_fp64"),
    # bfloat and half round after every operation, as in the code that Apple's compiler writes
    *("-Xclang", "-fbfloat16-excess-precision=none", "-Xclang", "-ffloat16-excess-precision=none"),
    *("-target", "x86_64-linux-gnu", *X86),
]
FORWARDED = (
    "array atomic common compute geometric integer limits math matrix numeric pack relational"
)
FORWARDED += " simdgroup simdgroup_matrix type_traits types uniform"
# kernel parameter attribute -> field of the emulator's context
POSITIONS = {
    "thread_position_in_grid": "tpg",
    "thread_position_in_threadgroup": "tpt",
    "threadgroup_position_in_grid": "tgp",
    "threads_per_threadgroup": "tptg",
    "dispatch_threads_per_threadgroup": "tptg",
    "threadgroups_per_grid": "tgpg",
    "threads_per_grid": "tpgrid",
    "thread_index_in_threadgroup": "tit",
    "thread_index_in_simdgroup": "lane",
    "simdgroup_index_in_threadgroup": "sg",
    "simdgroups_per_threadgroup": "nsg",
    "threads_per_simdgroup": "sgsize",
    "dispatch_simdgroups_per_threadgroup": "dsg",
    "thread_index_in_quadgroup": "qlane",
    "quadgroup_index_in_threadgroup": "quad",
}
VECTOR_FIELDS = {"tpg", "tpt", "tgp", "tptg", "tgpg", "tpgrid"}

ATTRIBUTE = re.compile(r"\[\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\]")
POSITION = re.compile(r"\b(" + "|".join(POSITIONS) + r")\b")
KERNEL_WORD = r"(?:\[\[\s*kernel\s*\]\]|\bkernel\b)"
FUNCTION_CONSTANT = re.compile(
    r"\bconstant\s+((?:const\s+)?[\w:]+)\s+(\w+)\s*\[\[\s*function_constant\(\s*(\d+)\s*\)\s*\]\]\s*;"
)
# template [[host_name("x")]] [[kernel]] decltype(f<T>) f<T>;
INSTANCE_DECLTYPE = re.compile(
    r"template\s*\[\[\s*host_name\(([^)]*)\)\s*\]\]\s*"
    + KERNEL_WORD
    + r"\s*(decltype\(.*?\))\s*([^;()]*?)\s*;",
    re.S,
)
# template [[host_name("x")]] [[kernel]] void f<T>(parameters);
INSTANCE_VOID = re.compile(
    r"template\s*\[\[\s*host_name\(([^)]*)\)\s*\]\]\s*" + KERNEL_WORD + r"\s*void\s+([^(;]*?)\s*\(",
    re.S,
)
KERNEL = re.compile(
    r"(?:\[\[\s*(?:kernel|[^\]]*?kernel)\s*(?:,[^\]]*?)?\]\]|(?<![\w.])kernel)\s*"
    r"(?:\[\[.*?\]\]\s*)?void\s+(\w+)\s*\("
)
THREADGROUP_VARIABLE = re.compile(
    r"(^|[;{}]\s*(?:#[^\n]*\n)?|\n)\s*threadgroup\s+"
    r"((?:alignas\([^)]*\)\s*)?(?:typename\s+)?[\w:]+(?:<[^;{}]*?>)?(?:::\w+)*)"
    r"\s+(\w+\s*(?:\[[^;{}]*\])?(?:\s*,\s*\w+\s*\[[^;{}]*\])*)\s*;"
)


def _headers() -> Path:
    """The folder with the stand-ins for Apple's headers; <metal_math> and so on include one."""

    def make(folder: Path) -> None:
        (folder / "metal_stdlib").write_text((SHIM / "metal_stdlib").read_text())
        for name in FORWARDED.split():
            (folder / f"metal_{name}").write_text("#include <metal_stdlib>\n")

    return cached("headers", (), make)


def preprocess(
    source: str | Path,
    include: Iterable[str | Path] = (),
    defines: Iterable[str] = (),
    version: int = 310,
) -> str:
    """The .metal file with macros expanded and line markers."""
    flags = ["-x", "c++", "-std=c++17", "-nostdinc", "-undef", "-fno-caret-diagnostics"]
    flags += ["-D__METAL__=1", f"-D__METAL_VERSION__={version}", "-D__METAL_MACOS__=1"]
    flags += ["-D__HAVE_BFLOAT__=1", f"-I{_headers()}"]
    flags += [f"-I{folder}" for folder in include] + [f"-D{d}" for d in defines]
    return run(CLANG, "-E", *flags, source)


def matching(text: str, i: int, opening: str = "(", closing: str = ")") -> int:
    """`text[i]` is `opening`: the index just after its `closing`."""
    depth, start = 0, i
    while i < len(text):
        c = text[i]
        if c == '"':
            quoted = re.compile(r'"(?:[^"\\]|\\.)*', re.S).match(text, i)
            assert quoted
            i = quoted.end()
        elif c == opening:
            depth += 1
        elif c == closing:
            depth -= 1
            if depth == 0:
                return i + 1
        i += 1
    raise BenchError(f"{locate(text, start)}: {opening} without {closing}")


def split_top(text: str) -> list[str]:
    """Split at the commas that are in no brackets."""
    parts, depth, part = [], 0, ""
    for c in text:
        if c in "(<[{":
            depth += 1
        elif c in ")>]}":
            depth -= 1
        if c == "," and depth == 0:
            parts.append(part)
            part = ""
        else:
            part += c
    return [*parts, part] if part.strip() else parts


def _newlines(text: str) -> str:
    """As many line ends as in `text`, so that line numbers stay right."""
    return "\n" * text.count("\n")


def locate(text: str, at: int) -> str:
    """'file:line' of an offset in preprocessed text."""
    file, line = "?", 1
    for row in text[:at].split("\n"):
        marker = re.match(r'# (\d+) "([^"]*)"', row)
        if marker:
            line, file = int(marker.group(1)) - 1, marker.group(2)
        line += 1
    return f"{file}:{line - 1}"


class Source:
    """A preprocessed .metal file on its way to C++ for OpenCL.

    With `relax`, a `const thread T&` may also be of a temporary, which clang puts in no space.
    """

    def __init__(self, text: str, relax: bool = False) -> None:
        self.text = text
        self.kernels: dict[str, list[tuple[str, int | str]]] = {}  # function -> its parameters
        self.templates: dict[str, str] = {}  # kernel template -> file:line
        self.instances: list[tuple[str, str]] = []  # host name, C++ expression of the kernel
        self.constants: list[tuple[int, str, str]] = []  # index, type, name of function constants
        self.findings: list[str] = []  # file:line: message
        self._take_function_constants()
        self._take_instances()
        self._take_kernels()
        self._drop_attributes()
        self._drop_constructor_spaces()
        if relax:
            self.text = re.sub(r"\bconst thread (\w+)\s*&(?!&)", r"const \1&", self.text)
        self._place_threadgroup_variables()
        spaces = {"device": "__global", "threadgroup": "__local", "thread": "__private"}
        for word, space in spaces.items():
            self.text = re.sub(r'(?<![\w"/.])' + word + r'(?![\w"/.(])', space, self.text)

    def _take_function_constants(self) -> None:
        def replace(m: re.Match[str]) -> str:
            kind, name, index = m.group(1).strip(), m.group(2), int(m.group(3))
            self.constants.append((index, kind, name))
            getter = f'extern "C" ulong __fc_{index}() {{ return (ulong)&{name}; }}'
            return f"static device {kind} {name}; {getter}{_newlines(m.group(0))}"

        self.text = FUNCTION_CONSTANT.sub(replace, self.text)

    def _take_instances(self) -> None:
        def name_of(m: re.Match[str]) -> str:
            return "".join(re.findall(r'"([^"]*)"', m.group(1)))

        def replace(m: re.Match[str]) -> str:
            self.instances.append((name_of(m), " ".join(m.group(3).split())))
            return _newlines(m.group(0))

        text = INSTANCE_DECLTYPE.sub(replace, self.text)
        out, pos = "", 0
        for m in INSTANCE_VOID.finditer(text):
            if m.start() < pos:
                continue
            end = text.index(";", matching(text, m.end() - 1)) + 1
            self.instances.append((name_of(m), " ".join(m.group(2).split())))
            out += text[pos : m.start()] + _newlines(text[m.start() : end])
            pos = end
        self.text = out + text[pos:]

    def _take_kernels(self) -> None:
        text, out, pos = self.text, "", 0
        for m in KERNEL.finditer(text):
            name, end = m.group(1), matching(text, m.end() - 1)
            arguments: list[tuple[str, int | str]] = []
            parameters = []
            next_buffer = 0
            for parameter in split_top(text[m.end() : end - 1]):
                attributes = " , ".join(a.group(1) for a in ATTRIBUTE.finditer(parameter))
                bare = ATTRIBUTE.sub("", parameter)
                parameters.append(bare + "\n" * (parameter.count("\n") - bare.count("\n")))
                position = POSITION.search(attributes)
                buffer = re.search(r"\bbuffer\(\s*(\d+)\s*\)", attributes)
                shared = re.search(r"\bthreadgroup\(\s*(\d+)\s*\)", attributes)
                if position:
                    arguments.append(("id", POSITIONS[position.group(1)]))
                elif shared or re.match(r"\s*(const\s+)?threadgroup\b", parameter):
                    arguments.append(("tg", int(shared.group(1)) if shared else 0))
                else:
                    index = int(buffer.group(1)) if buffer else next_buffer
                    arguments.append(("buf", index))
                    next_buffer = max(next_buffer, index + 1)
            self.kernels[name] = arguments
            before = text[pos : m.start()]
            if re.search(r"template\s*<[^;{}]*>\s*$", before):
                self.templates[name] = locate(text, m.start())
            else:
                self.instances.append((name, name))
            out += before + _newlines(m.group(0)) + f"void {name}({','.join(parameters)})"
            pos = end
        self.text = out + text[pos:]

    def _drop_attributes(self) -> None:
        keep = re.compile(r"\s*(maybe_unused|fallthrough|nodiscard|clang::|gnu::)")
        self.text = ATTRIBUTE.sub(
            lambda m: m.group(0) if keep.match(m.group(1)) else _newlines(m.group(0)), self.text
        )

    def _drop_constructor_spaces(self) -> None:
        """clang builds a result in no particular space, so a constructor must name none."""
        text = self.text
        types = set(re.findall(r"\b(?:struct|class)\s+(\w+)", text))
        suffix = re.compile(r"(\s*(?:const\s+)?)thread\b(?=\s*(?:noexcept\s*)?[:{;=])")
        drop = []
        for m in re.finditer(r"(?<![\w.>~])(\w+)\s*\(", text):
            found = m.group(1) in types and suffix.match(text, matching(text, m.end() - 1))
            if found:
                drop.append(found.span())
        for a, b in reversed(drop):
            text = text[:a] + _newlines(text[a:b]) + " " + text[b:]
        self.text = text

    def _place_threadgroup_variables(self) -> None:
        """clang refuses __local variables in templates: make each a reference to static storage."""
        text = self.text
        bodies = []
        for kernel in self.kernels:
            for m in re.finditer(r"\bvoid\s+" + kernel + r"\(", text):
                brace = re.compile(r"\s*\{").match(text, matching(text, m.end() - 1))
                if brace:
                    bodies.append((brace.end(), matching(text, brace.end() - 1, "{", "}")))

        def replace(m: re.Match[str]) -> str:
            kind = m.group(2).strip()
            if re.search(r"\b(return|using|typedef|template|operator)\b", kind) or "(" in kind:
                return m.group(0)
            where = locate(text, m.start(2))
            before = [text[a : m.start(2)] for a, b in bodies if a <= m.start(2) < b]
            if not before:
                self.findings.append(f"{where}: threadgroup variable outside a kernel")
            elif before[0].count("{") != before[0].count("}"):
                self.findings.append(
                    f"{where}: threadgroup variable in an inner block: declare it at the top"
                )
            out = ""
            for declarator in split_top(m.group(3)):
                named = re.match(r"\s*(\w+)\s*((?:\[[^\]]*\]\s*)*)$", declarator)
                if not named:
                    return m.group(0)
                name, dims = named.groups()
                out += (
                    f" using {name}__ty = {kind}{dims};"
                    f" static device char {name}__st[sizeof({name}__ty)]"
                    ' __attribute__((aligned(16), section("msltg")));'
                    f" threadgroup {name}__ty& {name} ="
                    f" *(threadgroup {name}__ty*)(ulong)&{name}__st;"
                )
            return m.group(1) + out + _newlines(m.group(0)[len(m.group(1)) :])

        self.text = THREADGROUP_VARIABLE.sub(replace, text)

    def entries(self, only: Iterable[str] = ()) -> tuple[str, list[dict[str, object]]]:
        """C++ text of the entry functions, and their descriptions."""
        text, seen = "\n", set()
        described: list[dict[str, object]] = []
        for name, callee in self.instances:
            function = re.match(r"(?:\w+::)*(\w+)", callee)
            assert function
            wanted = not only or any(re.search(pattern, name) for pattern in only)
            if function.group(1) not in self.kernels or name in seen or not wanted:
                continue
            seen.add(name)
            parameters, values = self.kernels[function.group(1)], []
            for kind, value in parameters:
                if kind in ("buf", "tg"):
                    values.append(f"__msl_P{{c->{kind}[{value}]}}")
                elif value in VECTOR_FIELDS:
                    values.append(f"__msl_I{{c->{value}[0],c->{value}[1],c->{value}[2]}}")
                else:
                    values.append(f"__msl_I{{c->{value},0,0}}")
            entry = f"__msl_entry_{len(described)}"
            call = f"{callee}({', '.join(values)})"
            text += f'extern "C" void {entry}(const thread __msl_ctx* c) {{ {call}; }}\n'
            described.append(dict(name=name, entry=entry, args=parameters))
        return text, described

    def uninstantiated(self) -> dict[str, str]:
        """Kernel templates without an instance, whose bodies are therefore never compiled."""
        used = {
            re.sub(r"<.*", "", callee, flags=re.S).split("::")[-1] for _, callee in self.instances
        }
        return {name: where for name, where in self.templates.items() if name not in used}

    def program(self, entries: str) -> str:
        """The whole translation unit."""
        shim = f'# 1 "<msl_shim>"\n#include "{SHIM}/msl_shim.h"\n'
        return f'{shim}{self.text}\n# 1 "<entries>"\n{entries}'


def instances_text(instantiate: Mapping[str, str]) -> str:
    """Explicit instances of kernel templates, in Metal: host name -> 'function<arguments>'."""
    return "".join(
        f'\ntemplate [[host_name("{name}")]] [[kernel]] decltype({kernel}) {kernel};'
        for name, kernel in instantiate.items()
    )


def build(
    source: str | Path,
    include: Iterable[str | Path] = (),
    defines: Iterable[str] = (),
    instantiate: Mapping[str, str] | None = None,
    only: Iterable[str] = (),
    contract: str = "on",
    version: int = 310,
    relax: bool = False,
) -> Path:
    """Compile a .metal file for the emulator: the path of the .so; see `compile`."""
    text = preprocess(source, include, defines, version) + instances_text(instantiate or {})
    src = Source(text, relax)
    entries, described = src.entries(only)
    if not described:
        raise BenchError(f"{source}: no kernel to compile")

    def make(folder: Path) -> None:
        cl, obj, so = folder / "kernel.cl", folder / "kernel.o", folder / "kernel.so"
        cl.write_text(src.program(entries))
        flags = [*CL_FLAGS, "-w", "-O2", "-fPIC", f"-ffp-contract={contract}"]
        run(CLANG, *flags, "-c", cl, "-o", obj)
        libraries = [f"--ld-path=ld.lld-{LLVM}", "-lm", "-lstdc++", "-Wl,-z,nostart-stop-gc"]
        run(CLANG, "-shared", "-o", so, obj, *emulator_objects(), *libraries)
        text = json.dumps(dict(kernels=described, constants=src.constants))
        (folder / "kernel.so.json").write_text(text)

    # the code does not depend on where its files lie
    text = re.sub(r'^(# \d+ ")[^"]*/', r"\1", src.text, flags=re.M)
    return cached(Path(source).stem, (text, entries, contract), make) / "kernel.so"


def compile(
    source: str | Path,
    include: Iterable[str | Path] = (),
    defines: Iterable[str] = (),
    instantiate: Mapping[str, str] | None = None,
    only: Iterable[str] = (),
    contract: str = "on",
    version: int = 310,
    relax: bool = False,
) -> Library:
    """A .metal file as a `Library` for the emulator.

    `include` and `defines` are a compiler's, `version` is `__METAL_VERSION__`. `instantiate` adds
    kernel instances, host name -> 'function<arguments>'; `only` keeps the kernels whose host name
    one of these regular expressions finds. `contract` is clang's -ffp-contract: 'off', 'on'
    (within an expression) or 'fast' (across expressions too). `relax` lets temporaries bind to
    `const thread T&`, as MLX's headers need.
    Raises BenchError with the compiler's messages.
    """
    return Library(build(source, include, defines, instantiate, only, contract, version, relax))
