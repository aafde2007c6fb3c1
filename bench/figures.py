"""The figures of the report, drawn by matplotlib from the documents of the other commands."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import matplotlib

matplotlib.use("svg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from . import machine

Document = dict[str, Any]

SIZE = (4.2, 3.1)
"""Inches: as wide as a phone, so that the text in a figure is not scaled down there."""
COLOURS = ("#0b5fa5", "#c2571a", "#2d7d46", "#7a4fa3", "#a3324a", "#5c5c5c")
MARKS = ("o", "s", "^", "D", "v", "P")
"""Beside colours, so that a black and white print can be read."""
STYLE = {
    "font.size": 8.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "svg.fonttype": "path",
    "svg.hashsalt": "bench",
    "legend.frameon": False,
    "legend.fontsize": 7.5,
}


def speedup_by_context(ax: Axes, document: Document) -> None:
    """Expected speed-ups at a chance of 0.8 to be accepted, by context, a line for each width."""
    chance = 0.8
    rows = [row for row in document["chances"] if row["chance"] == chance]
    widths = sorted({row["width"] for row in rows})
    chosen = [width for width in widths if width in (2, 4, 8, 16, 32)] or widths
    for at, width in enumerate(chosen):
        line = [(row["context"], row["speedup"]) for row in rows if row["width"] == width]
        ax.plot(
            *zip(*line, strict=True), marker=MARKS[at], color=COLOURS[at], label=f"{width} inputs"
        )
    ax.axhline(1, color="black", linewidth=0.8)
    ax.set_xscale("log", base=2)
    contexts = sorted({row["context"] for row in rows})
    ax.set_xticks(contexts, [_short(context) for context in contexts])
    ax.minorticks_off()
    ax.set(xlabel="context, tokens", ylabel="× plain decoding")
    ax.set_ylim(0, 1.3 * max(row["speedup"] for row in rows))
    ax.legend(ncols=2)


def cost_by_width(ax: Axes, document: Document) -> None:
    """A round, and a forward of the target alone, in plain steps, at the smallest context."""
    context = min(row["context"] for row in document["rounds"])
    rows = [row for row in document["rounds"] if row["context"] == context]
    line = [(1, 1.0)] + [(row["width"], row["plain_steps"]) for row in rows]
    ax.plot(*zip(*line, strict=True), marker="o", color=COLOURS[0], label="round with its draft")
    for at, (way, label) in enumerate(
        [("exact", "verify, exact"), ("stock", "verify, MLX's"), ("mlx-lm", "mlx-lm forward")], 1
    ):
        found = [r for r in document["forwards"] if (r["way"], r["context"]) == (way, context)]
        if found:
            points = [(row["rows"], row["of_plain"][1]) for row in found]
            ax.plot(*zip(*points, strict=True), marker=MARKS[at], color=COLOURS[at], label=label)
    ax.set(xlabel="inputs of a verify", ylabel="plain steps", ylim=(0, None))
    ax.xaxis.get_major_locator().set_params(integer=True)
    ax.legend()


def parts_of_a_round(ax: Axes, document: Document) -> None:
    """Draft and verify of a round, stacked, and what of both is the host's."""
    context = min(row["context"] for row in document["rounds"])
    rows = [row for row in document["rounds"] if row["context"] == context]
    names = [str(row["width"]) for row in rows]
    draft, verify, host = (
        [row[f"{part}_ms"] for row in rows] for part in ("draft", "verify", "host")
    )
    ax.bar(names, draft, color=COLOURS[1], label="draft")
    ax.bar(names, verify, bottom=draft, color=COLOURS[0], label="verify")
    ax.plot(names, host, marker="D", color="black", linewidth=0, label="of these the host's")
    ax.set(xlabel="inputs of a verify", ylabel="ms")
    ax.margins(y=0.25)
    ax.legend(loc="upper left")


def acceptance_by_position(ax: Axes, document: Document) -> None:
    """Accepted of drafted at each position of a block, by kind of text."""
    rows = [row for row in document["kinds"] if row.get("drafted_at")]
    for at, row in enumerate(rows):
        pairs = list(zip(row["accepted_at"], row["drafted_at"], strict=False))
        shares = [accepted / drafted for accepted, drafted in pairs if drafted]
        places = range(1, len(shares) + 1)
        mark, colour = MARKS[at % len(MARKS)], COLOURS[at % len(COLOURS)]
        ax.plot(places, shares, marker=mark, markersize=4, color=colour, label=row["kind"])
    ax.set(xlabel="position in the block", ylabel="accepted ÷ drafted", ylim=(0, 1.3))
    ax.set_yticks([0, 0.25, 0.5, 0.75, 1])
    ax.xaxis.get_major_locator().set_params(integer=True)
    ax.legend(ncols=3, loc="upper center")


def roofline(ax: Axes, document: Document) -> None:
    """Our operations against the measured copy and the measured matmul."""
    best = document["limits"]
    rows = [r for r in document["results"] if r["variant"] == "ours" and r.get("flops")]
    dtype = document["settings"]["dtypes"][0]
    peak, copy = best["matmul_gflop_s"][dtype], best["copy_gb_s"]
    intensity = [row["flops"] / row["bytes"] for row in rows]
    low, high = min([*intensity, 0.1]) / 2, max([*intensity, 2 * peak / copy]) * 2
    ends = [low, peak / copy, high]
    ax.plot(ends, [min(x * copy, peak) for x in ends], color="black", linewidth=1)
    for at, name in enumerate(sorted({row["operation"] for row in rows})):
        points = [(r["flops"] / r["bytes"], r["gflop_s"]) for r in rows if r["operation"] == name]
        mark, colour = MARKS[at % len(MARKS)], COLOURS[at % len(COLOURS)]
        ax.scatter(*zip(*points, strict=True), s=18, marker=mark, color=colour, label=name)
    ax.set(xscale="log", yscale="log", xlabel="FLOP a byte", ylabel="GFLOP/s")
    ax.set_ylim(top=peak * 30)  # room for the legend
    ax.legend(fontsize=6.5, ncols=2, loc="upper left")


def peers(ax: Axes, document: Document) -> None:
    """Tokens a second over mlx-lm's, with 95 % intervals; those that do not run are named."""
    rows = list(reversed(document["results"]))
    for at, row in enumerate(rows):
        found = row.get("over_mlx_lm")
        if found is None:
            ax.text(0.02, at, "does not run here", va="center", fontsize=7.5, style="italic")
            continue
        low, mean, high = found
        colour = COLOURS[0] if row["contender"].startswith("ours") else "#9a9a9a"
        ax.barh(at, mean, color=colour, xerr=[[mean - low], [high - mean]], capsize=3, height=0.6)
        ax.text(high, at, f"  {mean:.2f}", va="center")
    ax.axvline(1, color="black", linewidth=0.8)
    ax.set_yticks(range(len(rows)), [row["contender"] for row in rows])
    ax.set(xlabel="× mlx-lm, tokens a second")
    ax.margins(x=0.18)
    ax.set_ylim(-0.6, len(rows) - 0.4)
    ax.grid(axis="y", visible=False)


def memory_of_a_text(ax: Axes, document: Document) -> None:
    """Memory along one long text, and the part of it that is keys and values."""
    rows = document["long_text"]
    tokens = [row["tokens"] for row in rows]
    fixed = (document["weights"] + document["packed"]) / 1e6
    active = [row["active"] / 1e6 - fixed for row in rows]
    ax.plot(tokens, active, marker="o", markersize=4, color=COLOURS[0], label="beside weights")
    keys = [row["keys_values"] / 1e6 for row in rows]
    ax.plot(tokens, keys, marker="s", markersize=4, color=COLOURS[1], label="keys and values")
    ax.set(xlabel="tokens of one text", ylabel="MB", ylim=(0, None))
    ax.legend()


FIGURES: dict[str, list[tuple[str, str, Callable[[Axes, Document], None]]]] = {
    "e2e": [
        (
            "Against other implementations",
            "Tokens a second after the first delivery over mlx-lm's, in the same run: geometric "
            "mean over prompts with its 95 % bootstrap interval.",
            peers,
        ),
        (
            "Acceptance by position",
            "Accepted ÷ drafted at each position of a block, by kind of text.",
            acceptance_by_position,
        ),
    ],
    "cycle": [
        (
            "Expected speed-up by context",
            "Expected, not measured on text: random weights, and each draft taken to be accepted "
            "with a chance of 0.8 if those before it are. The rounds' times are measured.",
            speedup_by_context,
        ),
        (
            "Cost by width",
            "A whole round, and a verify alone, in plain steps of the same kind, at the smallest "
            "context that was measured.",
            cost_by_width,
        ),
        (
            "A round in parts",
            "With the device idle between the parts, at the smallest context.",
            parts_of_a_round,
        ),
    ],
    "kernels": [
        (
            "Roofline",
            "Our operations; the line is this machine's measured copy and measured matmul.",
            roofline,
        )
    ],
    "memory": [
        (
            "Memory along one text",
            "What the process holds beside weights.",
            memory_of_a_text,
        )
    ],
}
"""By benchmark: title, caption, function."""


def svg(draw: Callable[[Axes, Document], None], document: Document) -> str:
    """A figure as an SVG element that scales with its place."""
    with plt.rc_context(STYLE):
        figure, ax = plt.subplots(figsize=SIZE, layout="constrained")
        draw(ax, document)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
        plt.close(figure)
    content = text.getvalue()
    return content[content.index("<svg") :]


def sheet(documents: list[Document], title: str) -> Figure:
    """All figures of one machine on one page."""
    drawn = [
        (f"{name}: {machine.subject(document)}", draw, document)
        for document in documents
        for name, _, draw in FIGURES[document["benchmark"]]
    ]
    with plt.rc_context(STYLE):
        rows = -(-len(drawn) // 2)
        size = (2 * SIZE[0], rows * (SIZE[1] + 0.25) + 0.4)
        figure, grid = plt.subplots(rows, 2, figsize=size, layout="constrained", squeeze=False)
        for ax in grid.flat[len(drawn) :]:
            ax.set_axis_off()
        for ax, (name, draw, document) in zip(grid.flat, drawn, strict=False):
            draw(ax, document)
            ax.set_title(name, loc="left", fontsize=8.5, fontweight="bold")
        figure.suptitle(title, fontsize=9.5)
    return figure


def _short(tokens: int) -> str:
    return f"{tokens / 1024:g}k" if tokens >= 1024 else str(tokens)
