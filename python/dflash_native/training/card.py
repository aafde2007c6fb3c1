"""The model card, written from the figures of a run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_NAMES = {"dflash": "DFlash", "dflash2": "DFlash2"}


def model_card(run: Path, sizes: Mapping[str, int], error: tuple[float, float, float]) -> str:
    """The card of a run as Markdown.

    `sizes`: bytes by shipped file; `error`: the quantised target's largest logit error, the largest
    logit, and the share of equal argmaxes. Reads the run's `corpus.json`, `tokens.json`,
    `target.json`, `dflash.json`, `dflash2.json` and `evaluation.json`; a draft that is missing is
    left out. Raises FileNotFoundError for the others.
    """
    corpus, tokens, target, found = (
        _read(run, name) for name in ("corpus", "tokens", "target", "evaluation")
    )
    drafts = {kind: _read(run, kind) for kind in _NAMES if kind in found["drafts"]}
    parts = [
        _head(sizes),
        _training(target, tokens, drafts, error),
        _losses(found),
        *(_acceptance(kind, found) for kind in drafts),
        _samples(found),
        _data(corpus, tokens),
    ]
    return "\n\n".join(parts) + "\n"


def _read(run: Path, name: str) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((run / f"{name}.json").read_text(encoding="utf-8"))
    return result


def _table(headers: list[str], rows: list[list[Any]]) -> str:
    lines = [headers, ["---"] * len(headers), *([str(cell) for cell in row] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _head(sizes: Mapping[str, int]) -> str:
    rows: list[list[Any]] = [[f"`{name}`", f"{size:,}"] for name, size in sizes.items()]
    rows.append(["all", f"{sum(sizes.values()):,}"])
    return (
        "# The demo pair\n\n"
        "A small hybrid language model (Qwen3.5 architecture), trained from scratch, and drafts "
        "trained on its own text. They exist so that tests, examples and benchmarks run offline "
        "on real weights with real acceptance. The target is no useful assistant: it continues "
        "Python files and technical English, plausibly and without understanding.\n\n"
        + _table(["file", "bytes"], rows)
    )


def _training(
    target: dict[str, Any],
    tokens: dict[str, Any],
    drafts: dict[str, dict[str, Any]],
    error: tuple[float, float, float],
) -> str:
    rows: list[list[Any]] = [
        [
            "target",
            f"{target['parameters']:,}",
            f"{target['steps']:,} of {target['batch']} x {target['length']} tokens",
            f"{target['tokens']:,} tokens, {target['epochs']} epochs",
            f"{target['seconds']:.0f}",
            target["seed"],
        ]
    ]
    for kind, figures in drafts.items():
        rows.append(
            [
                _NAMES[kind],
                f"{figures['parameters']:,}",
                f"{figures['steps']:,} of {figures['batch']} x {figures['blocks_a_text']} blocks",
                f"{figures['blocks']:,} blocks from {figures['texts']:,} texts",
                f"{figures['seconds']:.0f}",
                figures["seed"],
            ]
        )
    headers = ["", "parameters", "steps", "seen", "seconds", "seed"]
    largest, logit, equal = error
    notes = (
        f"The tokenizer is a byte-level BPE of {tokens['vocab_size']} entries with Qwen3.5's "
        f"splitting rule; {tokens['train']['bytes_per_token']} bytes a token on the training text. "
        "Muon for matrices, AdamW for the rest. The drafts learned from the target's own "
        "continuations at temperatures 0, 0.5, 0.8 and 1.0 and from a fifth as many windows of the "
        "corpus, row k of a block weighted by exp(-(k - 1) / gamma)"
    )
    for kind, figures in drafts.items():
        notes += (
            f"; {_NAMES[kind]}: gamma {figures['gamma']:g}, {figures['shorter']:.0%} of the blocks "
            "shorter than the full one"
        )
    return (
        "## Training\n\n" + _table(headers, rows) + f"\n\n{notes}.\n\n"
        f"The target ships in 8 bits, groups of 64. In fp32 on the shipped prompts its logits "
        f"differ from the bf16 original's by at most {largest:.3f} (largest logit {logit:.1f}), "
        f"and {equal:.2%} of the argmaxes agree.\n\n"
        "Commands, in this order: `python -m dflash_native.training` with `corpus`, `tokenizer`, "
        "`target`, `continuations`, `draft`, `draft2`, `evaluate`, `export`; "
        "`python/dflash_native/training/README.md` has them in full."
    )


def _losses(found: dict[str, Any]) -> str:
    rows = [
        [kind, figures["nats_a_token"], figures["bits_a_byte"]]
        for kind, figures in found["held_out"].items()
    ]
    loops = [[name, f"{share:.1%}"] for name, share in found["loops"].items()]
    return (
        "## Held-out loss and loops\n\n"
        + _table(["text", "nats a token", "bits a byte"], rows)
        + "\n\nShare of the target's own tokens that lie in loops of a period of at most 48, where "
        "any drafter does well:\n\n" + _table(["text", "in loops"], loops)
    )


def _acceptance(kind: str, found: dict[str, Any]) -> str:
    runs: dict[str, Any] = found["drafts"][kind]
    rows: list[list[Any]] = [
        [name, f["rounds"], f["tokens_a_round"], f["outside_loops"]] for name, f in runs.items()
    ]
    twenty = found["twenty_prompts"][kind]
    label = "code, T = 0, 20 files' beginnings x 128"
    rows.append([label, twenty["rounds"], twenty["tokens_a_round"], twenty["outside_loops"]])
    slots = max(len(f["survival"]) for f in runs.values())
    survival: list[list[Any]] = [
        [name, *(f"{100 * share:.0f}" for share in f["survival"])] for name, f in runs.items()
    ]
    text = (
        f"## Acceptance: {_NAMES[kind]}\n\nTokens a round (accepted drafts and the bonus token), "
        "before quantisation:\n\n"
        + _table(["text", "rounds", "tokens a round", "outside loops"], rows)
        + "\n\nRounds that accept at least so many drafts, %:\n\n"
        + _table(["text", *(str(j + 1) for j in range(slots))], survival)
    )
    shorter = runs["code, T = 0"].get("shorter_blocks")
    if shorter:
        listed = ", ".join(f"{value} at {block}" for block, value in shorter.items())
        text += f"\n\nAs shorter blocks (code, greedy): {listed} tokens a round."
    return text


def _samples(found: dict[str, Any]) -> str:
    parts = ["## Samples\n\nGreedy, 128 tokens after the first 128 of held-out files."]
    for sample in found["samples"]:
        shown = sample["prompt"] + "\u23ce\u23ce" + sample["continuation"]
        parts.append("````text\n" + shown.replace("````", "'```") + "\n````")
    return "\n\n".join(parts) + "\n\nThe continuation begins after \u23ce\u23ce."


def _data(corpus: dict[str, Any], tokens: dict[str, Any]) -> str:
    files = corpus["files"]
    dropped = "; ".join(
        f"{count:,} {name}" for name, count in files.items() if name not in ("files", "kept")
    )
    characters = ", ".join(
        f"{count / 1e6:.1f} MB {kind}" for kind, count in corpus["train_characters"].items()
    )
    rows: list[list[Any]] = [
        [entry["source"], entry["licence"], f"{entry['characters'] / 1e6:.2f}"]
        for entry in corpus["sources"]
    ]
    return (
        "## Data and licences\n\n"
        f"{files['files']:,} files, {files['kept']:,} kept ({dropped}): {characters}, of which "
        f"{tokens['train']['tokens']:,} tokens were used. One file of code of 50 and one of prose"
        " of 10 are held out, by the hash of the path; the chats are made of documented functions "
        "of the training part.\n\n"
        "Each source's licence was checked by `training/licences.py`: the metadata and every "
        "licence file of a wheel must be permissive, and a file that names a copyleft licence is "
        "left out. That is a check by rules, not a legal review. A model of this size can repeat "
        "fragments of its training text.\n\n" + _table(["source", "licence", "MB"], rows)
    )
