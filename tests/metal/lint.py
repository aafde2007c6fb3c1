"""`check`: clang's errors and warnings on a .metal file, what clang lets through and Metal does
not, and the house rules of README.md. Works on clang's AST dump; a finding is 'file:line: ...'."""

from __future__ import annotations

import collections
import dataclasses
import re
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from . import air, frontend
from .tools import CLANG, NM, SHIM, BenchError, run

VERSIONS = (310, 320, 400, 410)  # __METAL_VERSION__ of macOS 14, 15, 26 and the one after
THREADGROUP_LIMIT = 32768
WARNINGS = [
    *("-ferror-limit=0", "-fno-caret-diagnostics", "-fno-color-diagnostics", "-Wall", "-Wextra"),
    *("-Werror", "-Wno-unknown-pragmas", "-Wno-unused-function", "-Wno-unused-parameter"),
    *("-Wno-gcc-compat", "-Wno-pass-failed", "-Wno-section"),
]
NOT_METAL = {"CXXNewExpr", "CXXDeleteExpr", "CXXThrowExpr", "CXXTryStmt", "CXXDynamicCastExpr"}
NOT_METAL |= {"CXXTypeidExpr", "GotoStmt", "AsmStmt", "GCCAsmStmt"}
FUNCTIONS = {"FunctionDecl", "CXXMethodDecl", "CXXConstructorDecl", "CXXConversionDecl"}
METAL_WORDS = {
    "__global": "device",
    "__local": "threadgroup",
    "__private": "thread",
    "__constant": "constant",
    "__bf16": "bfloat",
}


def _of_the_compiler(functions: list[Node]) -> bool:
    """Whether the innermost function is one that the compiler declares, such as a copy."""
    return bool(functions) and " implicit " in functions[-1].tail


def _in_metal_words(text: str) -> str:
    text = re.sub("|".join(METAL_WORDS), lambda m: METAL_WORDS[m.group(0)], text)
    text = re.sub(r"\b(\w+)__ty\b", r"type of \1", text).replace("__mk_", "")
    return text.replace(" *thread", " *").replace(" &thread", " &")


DIAGNOSTIC = re.compile(
    r"(?P<file>[^\n:]+):(?P<line>\d+):\d+: (?P<kind>fatal error|error|warning|note): (?P<text>.*)"
)


def _diagnostics(stderr: str) -> list[str]:
    """clang's errors; one inside the shim is reported where the user's code led there."""
    out: list[str] = []
    pending = None
    for m in map(DIAGNOSTIC.match, stderr.splitlines()):
        if not m:
            continue
        where, inside = f"{m['file']}:{m['line']}", m["file"].startswith(str(SHIM))
        if m["kind"] == "note":
            if pending is not None and not inside and "here" in m["text"]:
                out[pending] = f"{where}: {out[pending].split(': ', 1)[1]}"
                pending = None
            continue
        text = re.sub(r" \[-Werror,(-W[^\]]+)\]", r" [\1]", m["text"])
        pending = len(out) if inside else None
        out.append(_in_metal_words(f"{where}: {text}"))
    return out


class Node(NamedTuple):
    """One row of the AST dump; `tail` is what follows its source range."""

    depth: int
    kind: str
    id: str
    file: str
    line: int
    tail: str


ROW = re.compile(r"([| `-]*)(\w+) (0x\w+) (?:(?:parent|prev) 0x\w+ )*(<(?:[^<>]|<[^<>]*>)*>)?(.*)")
OWN_LOCATION = re.compile(r"\s*(\S+:\d+:\d+|line:\d+:\d+|col:\d+)\s")
LOCATION = re.compile(
    r"(?<!\w)line:(?P<same>\d+):\d+|(?<!\w)col:\d+|<invalid sloc>|<scratch space>:\d+:\d+"
    r"|(?P<file>[^\s<>,:]+):(?P<line>\d+):\d+"
)


def _nodes(dump: str) -> Iterator[Node]:
    """clang prints a location only where it differs from the one before, so carry it along."""
    file, line = "", 0
    for row in dump.split("\n"):
        m = ROW.match(row)
        if not m:
            continue
        depth, kind, id_, head, tail = m.groups()
        found = list(LOCATION.finditer(head or ""))
        own = OWN_LOCATION.match(tail)
        own_location = own and LOCATION.match(own.group(1))
        if own_location:
            found.append(own_location)
        first = None
        for x in found:
            if x["file"]:
                file, line = x["file"], int(x["line"])
            elif x["same"]:
                line = int(x["same"])
            first = first or (file, line)
        at = first or (file, line)
        yield Node(len(depth), kind, id_, at[0], at[1], tail)


class _Lint:
    """Walks one AST dump; `findings` and `builtins` are the result."""

    def __init__(
        self, dump: str, constants: Iterable[tuple[int, str, str]], allow: Iterable[str]
    ) -> None:
        self.known, self.allow = air.inventory(), set(allow)
        self.constants = {name for _, _, name in constants}
        self.findings: dict[str, None] = {}
        self.builtins: set[str] = set()
        self._shim: dict[str, list[str]] = {}  # id -> name, signature, asm label of the shim's
        self._last: list[str] = []
        self._calls: dict[str, set[str]] = collections.defaultdict(set)
        self._where: dict[str, Node] = {}
        self._scan(dump)
        self._find_recursion()

    def _report(self, node: Node, message: str) -> None:
        self.findings[f"{node.file}:{node.line}: {_in_metal_words(message)}"] = None

    def _scan(self, dump: str) -> None:
        functions: list[Node] = []  # that enclose the node
        cast = None  # to half or float, whose operand comes next
        for node in _nodes(dump):
            while functions and node.depth <= functions[-1].depth:
                functions.pop()
            if cast and node.depth == cast.depth + 2:
                source, target = self._type_of(node), self._type_of(cast)
                for kind in {source, target} & {"half", "__bf16"}:
                    way = "from" if kind == source else "to"
                    self._report(cast, f"implicit conversion {way} {kind}: write the cast out")
            cast = None
            if node.file.startswith(str(SHIM)):
                self._remember(node)
            elif node.file and not node.file.startswith("<"):
                if node.kind == "ImplicitCastExpr":
                    floating = "<FloatingCast>" in node.tail
                    if floating and "part_of_explicit_cast" not in node.tail:
                        cast = node
                    self._visit(node, functions)
                elif " implicit " not in node.tail and not _of_the_compiler(functions):
                    self._visit(node, functions)
            if node.kind in FUNCTIONS:
                functions.append(node)
                self._where[node.id] = node

    @staticmethod
    def _type_of(node: Node) -> str:
        m = re.match(r"\s*'([^']*)'", node.tail)
        words = r"\b(__global|__local|__private|__constant|const|volatile)\b"
        return re.sub(words, "", m.group(1)).strip() if m else ""

    def _remember(self, node: Node) -> None:
        if node.kind in FUNCTIONS:
            m = re.search(r"(\S+) '([^']*)'", node.tail)
            if m:
                self._last = self._shim[node.id] = [m.group(1), m.group(2), ""]
        elif node.kind == "AsmLabelAttr":
            self._last[2] = node.tail.split('"')[1]

    def _visit(self, node: Node, functions: list[Node]) -> None:
        kind, tail = node.kind, node.tail
        if kind in ("ParmVarDecl", "VarDecl", "FieldDecl") and "__generic" in tail:
            self._report(node, "pointer or reference without an address space")
        if kind == "FunctionDecl" and re.search(r"'[^']*__generic[^']*\(", tail):
            self._report(node, "function returns a pointer or reference without an address space")
        if kind == "CXXMethodDecl":
            generic = re.search(r"\)( const)? __generic", tail)
            if generic and " static" not in tail and " operator() " not in tail:
                self._report(
                    node, "method without an address space: write thread, device, ... after it"
                )
            if " virtual" in tail:
                self._report(node, "virtual function")
        if kind == "LambdaExpr":
            self._report(node, "lambda: refused by Metal 3.1, accepted from 3.2")
        if kind == "VarDecl" and "__constant" not in tail:
            m = re.search(r"(\w+) '", tail)
            name = m.group(1) if m else ""
            if functions and " static" in tail and not name.endswith("__st"):
                self._report(node, "static local variable")
            if not functions and name not in self.constants:
                self._report(
                    node, f"program-scope variable {name} is not in the constant address space"
                )
        if kind in NOT_METAL:
            self._report(node, f"{kind} is not Metal")
        if kind == "DeclRefExpr":
            m = re.search(r"(?:Function|CXXMethod) (0x\w+) '([^']*)' '([^']*)'", tail)
            if m and m.group(1) in self._shim:
                self._use(node, *self._shim[m.group(1)])
            if m and functions:
                self._calls[functions[-1].id].add(m.group(1))
        if kind == "MemberExpr" and functions:
            m = re.search(r"(?:->|\.)\S+ (0x\w+)", tail)
            if m:
                self._calls[functions[-1].id].add(m.group(1))
        if kind == "CXXConstructExpr" and re.search(air.DIAGONAL_MATRIX, tail):
            self._use(node, "simdgroup_matrix", "", "air.simdgroup_matrix_8x8_init_diag")

    def _use(self, node: Node, name: str, signature: str, label: str) -> None:
        if name in air.INLINE or (not label and name.startswith(("__", "operator"))):
            return
        symbol = label or air.symbol(name, signature)
        self.builtins.add(symbol)
        if symbol not in self.known and not {symbol, name} & self.allow:
            self._report(
                node,
                f"{name}: {symbol} is not among the built-ins that MLX's kernels were compiled to"
                f" (--allow {name} accepts it)",
            )

    def _find_recursion(self) -> None:
        open_, done = set(), set()

        def walk(f: str) -> None:
            open_.add(f)
            for g in self._calls.get(f, ()):
                if g in open_ and g in self._where:
                    self._report(self._where[g], "recursion")
                elif g not in open_ and g not in done:
                    walk(g)
            open_.remove(f)
            done.add(f)

        for f in list(self._calls):
            if f not in done:
                walk(f)


@dataclasses.dataclass
class Facts:
    """What a file holds: number of kernels, the largest one's threadgroup memory, built-ins."""

    kernels: int = 0
    threadgroup_bytes: int = 0
    builtins: set[str] = dataclasses.field(default_factory=set)


def _threadgroup_bytes(obj: Path) -> dict[str, int]:
    """Kernel -> bytes of its threadgroup variables."""
    total: dict[str, int] = collections.Counter()
    for row in run(NM, "-S", "-C", obj).splitlines():
        m = re.match(r"\w+ (\w+) \w (.*)::\w+__st$", row)
        if m:
            total[m.group(2)] += int(m.group(1), 16)
    return total


def _examine_text(source: str | Path, text: str, allow: Iterable[str]) -> tuple[list[str], Facts]:
    """Findings and facts of one preprocessed text."""
    try:
        src = frontend.Source(text)
    except BenchError as error:
        return [str(error)], Facts()
    entries, described = src.entries()
    found = list(src.findings)
    for name, where in src.uninstantiated().items():
        found.append(f"{where}: kernel template {name} has no instance, so its body is not checked")
    facts = Facts(kernels=len(described))
    with tempfile.TemporaryDirectory() as folder:
        cl, obj = Path(folder, "kernel.cl"), Path(folder, "kernel.o")
        cl.write_text(src.program(entries))
        flags = [CLANG, *frontend.CL_FLAGS]

        def clang(*more: str | Path) -> subprocess.CompletedProcess[str]:
            return subprocess.run([*flags, *map(str, more)], capture_output=True, text=True)

        done = clang(*WARNINGS, "-O0", "-c", cl, "-o", obj)
        found += _diagnostics(done.stderr)
        dump = clang("-fsyntax-only", "-w", "-Xclang", "-ast-dump", cl).stdout
        lint = _Lint(dump, src.constants, allow)
        found += lint.findings
        facts.builtins = lint.builtins
        if done.returncode and not found:
            found.append(f"{source}:1: {done.stderr[-1000:]}")
        if not done.returncode:
            for function, size in _threadgroup_bytes(obj).items():
                facts.threadgroup_bytes = max(facts.threadgroup_bytes, size)
                if size > THREADGROUP_LIMIT:
                    kernel = function.split("(")[0][:90]
                    found.append(
                        f"{source}:1: {kernel} uses {size} bytes of threadgroup memory, the limit"
                        f" is {THREADGROUP_LIMIT}"
                    )
    return found, facts


def _not_ascii(files: Iterable[str]) -> list[str]:
    found = []
    for file in files:
        for n, line in enumerate(Path(file).read_bytes().split(b"\n"), 1):
            if any(c > 126 for c in line):
                found.append(f"{file}:{n}: non-ASCII byte: MLX hands sources to Metal as ASCII")
    return found


def examine(
    source: str | Path,
    include: Iterable[str | Path] = (),
    defines: Iterable[str] = (),
    instantiate: Mapping[str, str] | None = None,
    allow: Iterable[str] = (),
) -> tuple[list[str], Facts]:
    """Findings and facts over all VERSIONS; versions that read the same text are checked once."""
    if not Path(source).is_file():
        raise BenchError(f"{source}: no such file")
    files = {str(source)}
    facts = Facts()
    where: dict[str, list[int]] = {}  # finding -> versions
    texts: dict[str, tuple[list[str], Facts]] = {}
    for version in VERSIONS:
        try:
            text = frontend.preprocess(source, include, defines, version)
        except BenchError as error:
            found = _diagnostics(str(error))
            if not found:
                raise
        else:
            files |= {f for f in re.findall(r'^# \d+ "([^"<]+)"', text, re.M) if Path(f).is_file()}
            text += frontend.instances_text(instantiate or {})
            if text not in texts:
                texts[text] = _examine_text(source, text, allow)
            found, facts = texts[text]
        for finding in found:
            where.setdefault(finding, []).append(version)
    found = [
        f if len(v) == len(VERSIONS) else f"{f} (Metal version {', '.join(map(str, v))})"
        for f, v in where.items()
    ]
    found += _not_ascii(files)

    def place(finding: str) -> tuple[str, int]:
        m = re.match(r"(.*?):(\d+): ", finding)
        return (m.group(1), int(m.group(2))) if m else (finding, 0)

    return sorted(set(found), key=lambda f: (*place(f), f)), facts


def check(
    source: str | Path,
    include: Iterable[str | Path] = (),
    defines: Iterable[str] = (),
    instantiate: Mapping[str, str] | None = None,
    allow: Iterable[str] = (),
) -> list[str]:
    """What is wrong with a .metal file, in any of the language versions 3.1, 3.2, 4.0 and 4.1.

    Returns 'file:line: message' strings, none if all is well. `allow` names built-ins to accept
    that are not in the inventory (builtins.txt); the other arguments are those of `compile`.
    """
    return examine(source, include, defines, instantiate, allow)[0]
