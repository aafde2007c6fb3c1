"""`python -m bench report`: one page of figures and tables from the documents of the others."""

from __future__ import annotations

import argparse
import html
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from . import machine

Document = dict[str, Any]
Rows = Sequence[Sequence[str]]

ORDER = ("e2e", "cycle", "kernels", "memory")
RESULTS = Path(__file__).parent / "results"
STYLE = Path(__file__).parent / "report.css"
MOST_ROWS = 60
"""Of a table; the documents have all of them."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("documents", nargs="*", type=Path, help="JSON; without, all of the results")
    parser.add_argument("--output", type=Path, default=Path("bench-report.html"))
    parser.add_argument("--png", action=argparse.BooleanOptionalAction, default=True)


def run(options: argparse.Namespace) -> int:
    """Writes the page, and the figures of each machine as a PNG beside it."""
    try:
        from . import figures
    except ImportError as error:
        raise SystemExit(f"[report] {error}: pip install matplotlib (the extra `bench`).") from None
    found = read(options.documents or sorted(RESULTS.glob("*.json")))
    machines: dict[str, list[Document]] = {}
    for document in found:
        machines.setdefault(machine.name(document["machine"]), []).append(document)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(page(machines), "utf-8")
    print(options.output)
    for name, documents in machines.items():
        if options.png:
            title = f"{documents[0]['machine']['device']}, {documents[0]['machine']['date'][:10]}"
            path = options.output.with_name(f"{options.output.stem}-{name}.png")
            figures.sheet(documents, title).savefig(path, dpi=150)
            print(path)
    return 0


def read(paths: Sequence[Path]) -> list[Document]:
    """The documents, in the page's order. Raises SystemExit where a file is none."""
    found = []
    for path in paths:
        try:
            document = json.loads(path.read_text("utf-8"))
            if document["benchmark"] not in ORDER or document["schema"] != 1:
                raise KeyError(f"a benchmark among {', '.join(ORDER)}, schema 1")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise SystemExit(
                f"[report] expected a result of these benchmarks in {path}: {error}."
            ) from None
        found.append(document)
    if not found:
        raise SystemExit("[report] expected documents but got none: make some with --save first.")
    return sorted(found, key=lambda each: (ORDER.index(each["benchmark"]), machine.subject(each)))


def page(machines: dict[str, list[Document]]) -> str:
    """The whole page; it asks for nothing from elsewhere."""
    body = "\n".join(part for documents in machines.values() for part in section(documents))
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>dflash-native: benchmarks</title>\n<style>\n{STYLE.read_text('utf-8')}</style>\n"
        "</head>\n<body>\n<h1>dflash-native: benchmarks</h1>\n"
        "<p>What each number means stands in <code>bench/README.md</code>. Ratios are of one "
        "interleaved run; medians with the 10th and 90th percentile unless said otherwise.</p>\n"
        f"{body}\n</body>\n</html>\n"
    )


def section(documents: list[Document]) -> Iterator[str]:
    """One machine: what it is, figures, tables."""
    from . import figures

    about = documents[0]["machine"]
    yield f"<h2>{html.escape(about['device'])}</h2>"
    versions = {k: v for k, v in about["versions"].items() if k != "system"}
    facts = {
        "Backend": f"{about['backend']}, {about['cores']} cores, {about['memory_gb']} GB, "
        f"CPU kernels for {about['cpu_isa']} on {about['cpu_threads']} threads",
        "System": about["system"],
        "Versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
        "libmlx": about["libmlx"],
    }
    items = "".join(f"<dt>{k}</dt><dd>{html.escape(v)}</dd>" for k, v in facts.items())
    yield f"<dl>{items}</dl>"
    yield '<div class="figures">'
    for document in documents:
        for title, caption, draw in figures.FIGURES[document["benchmark"]]:
            drawn, subject = figures.svg(draw, document), machine.subject(document)
            yield (
                f"<figure><h3>{html.escape(title)}</h3>{drawn}<figcaption>"
                f"{html.escape(subject[0].upper() + subject[1:])}. {html.escape(caption)}"
                "</figcaption></figure>"
            )
    yield "</div>"
    for document in documents:
        yield from tables(document)


def tables(document: Document) -> Iterator[str]:
    """One document: its command and its tables."""
    kind, about = document["benchmark"], document["machine"]
    yield f"<h3>{html.escape(TITLES[kind])}: {html.escape(machine.subject(document))}</h3>"
    busy, after = about["load"]["average"][0], document["load_after"]["average"][0]
    yield (
        f"<p><code>{html.escape(document['command'])}</code><br><small>{about['date']}, commit "
        f"{about['commit']}, {document['seconds']} s, load {busy} before and {after} after"
        "</small></p>"
    )
    for failure in document.get("failures", []):
        yield f'<p class="failed">{html.escape(failure)}</p>'
    for caption, head, rows in TABLES[kind](document):
        yield f"<p><small>{html.escape(caption)}</small></p>"
        yield table(head, rows)


def table(head: Sequence[str], rows: Rows) -> str:
    """A table; a row of two cells is a name and a sentence."""
    lines = ["".join(f"<th>{html.escape(cell)}</th>" for cell in head)]
    for row in rows[:MOST_ROWS]:
        name, *cells = (html.escape(cell) for cell in row)
        if len(row) == 2 < len(head):
            rest = f'<td class="text" colspan="{len(head) - 1}">{cells[0]}</td>'
        else:
            rest = "".join(f"<td>{cell}</td>" for cell in cells)
        lines.append(f"<td>{name}</td>{rest}")
    body = "".join(f"<tr>{line}</tr>\n" for line in lines)
    more = len(rows) - MOST_ROWS
    note = f"<p><small>{more} more rows are in the document.</small></p>" if more > 0 else ""
    return f'<div class="table"><table>\n{body}</table></div>{note}'


Tables = Iterator[tuple[str, Sequence[str], Rows]]


def e2e_tables(document: Document) -> Tables:
    """Contenders over all prompts."""
    settings = document["settings"]
    head = ("", "tok/s", "× mlx-lm (95 %)", "× plain", "tok/round", "accepted", "= plain", "sha256")
    rows = []
    for row in document["results"]:
        if "why" in row:
            rows.append([row["contender"], f"Does not run here: {row['why']}"])
            continue
        low, mean, high = row["over_mlx_lm"] or (float("nan"),) * 3
        accepted = "" if row["acceptance"] is None else f"{row['acceptance']:.3f}"
        plain = row["over_plain"][1] if row["over_plain"] else float("nan")
        rows.append(
            [
                " ".join([row["contender"], row.get("versions", {}).get(row["contender"], "")]),
                f"{row['tok_s']:.1f}" if row["tok_s"] else "",
                f"{mean:.2f} ({low:.2f}–{high:.2f})",
                f"{plain:.2f}",
                f"{row['tokens_per_round']:.2f}",
                accepted,
                f"{row['equal_to_plain']}/{row['texts']}",
                row["sha256"][:12],
            ]
        )
    pair = settings["model"] or "The demo pair"
    yield (
        f"{pair} in {settings['dtype']}: {len(document['prompts'])} prompts, up to "
        f"{settings['max_tokens']} tokens, {settings['repeats']} repeats.",
        head,
        rows,
    )


def cycle_tables(document: Document) -> Tables:
    """Rounds by context and width."""
    settings = document["settings"]
    head = (
        "context",
        "width",
        "plain ms",
        "round ms",
        "plain steps",
        "draft",
        "verify",
        "host",
        "rollback",
    )
    rows = [
        [
            str(row["context"]),
            str(row["width"]),
            f"{row['plain_ms']:.3f}",
            f"{row['round_ms']:.3f}",
            f"{row['plain_steps']:.2f}",
            *(f"{row[f'{part}_ms']:.3f}" for part in ("draft", "verify", "host", "rollback")),
        ]
        for row in document["rounds"]
    ]
    yield (
        f"{settings['shape']} ({document['source']}), {document['layers']} of "
        f"{document['layers_published']} layers, {settings['bits']} bits, {settings['dtype']}.",
        head,
        rows,
    )


def kernel_tables(document: Document) -> Tables:
    """Our operations with their shares of the limits and what the others take."""
    best = document["limits"]
    peaks = ", ".join(f"{v:.0f} GFLOP/s in {k}" for k, v in best["matmul_gflop_s"].items())
    head = (
        "operation",
        "shape",
        "T",
        "context",
        "us",
        "GB/s",
        "of limit",
        "bound by",
        "others ÷ ours",
    )
    rows, others = [], {}
    for row in document["results"]:
        at = tuple(
            row[k] for k in ("operation", "shape", "rows", "batch", "context", "dtype", "bits")
        )
        if row["variant"] == "ours" and "us" in row:
            others[at] = []
            rows.append(
                [
                    row["operation"] + (f", {row['bits']} bits" if row["bits"] in (4, 8) else ""),
                    row["shape"],
                    str(row["rows"]),
                    str(row["context"] or ""),
                    f"{row['us']:.1f}",
                    f"{row['gb_s']:.1f}",
                    f"{row['of_limit']:.1%}",
                    row["bound"],
                    others[at],
                ]
            )
        elif "us" in row:
            others[at].append(f"{row['variant']} {row['times_ours'][1]:.2f}")
        elif row["variant"] == "ours":
            rows.append([row["operation"], row["why"]])
    rows = [[", ".join(cell) if isinstance(cell, list) else cell for cell in row] for row in rows]
    yield (f"Copy {best['copy_gb_s']:.0f} GB/s; matmul {peaks}.", head, rows)


def memory_tables(document: Document) -> Tables:
    """Peaks by phase."""
    rows = [
        [row["phase"], *(f"{row[k] / 1e6:.1f}" for k in ("peak", "active", "cached", "resident"))]
        for row in document["phases"]
    ]
    head = ("phase", "peak MB", "active", "kept for reuse", "process, most")
    yield (f"Weights {document['weights'] / 1e6:.1f} MB.", head, rows)
    last = document["long_text"][-1]
    turn = document["chat"][-1]
    yield (
        "The end of the long text and of the chat.",
        ("", "tokens", "active MB", "keys and values", "arrays"),
        [
            [
                name,
                str(row["tokens"]),
                *(f"{row[key] / 1e6:.1f}" for key in ("active", "keys_values")),
                str(row["arrays"]),
            ]
            for name, row in (("one text", last), (f"{turn['turn']} turns", turn))
        ],
    )


TABLES = {
    "e2e": e2e_tables,
    "cycle": cycle_tables,
    "kernels": kernel_tables,
    "memory": memory_tables,
}
TITLES = {
    "e2e": "End to end",
    "cycle": "Rounds",
    "kernels": "Operations",
    "memory": "Memory",
}
