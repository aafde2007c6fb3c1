"""`python -m bench e2e`: texts by mlx-lm, ours plain, ours with DFlash, and by others."""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import mlx.core as mx
import mlx_lm
from mlx.utils import tree_flatten

from dflash_native import Target, demo, hub, stream_generate
from dflash_native.drafters import DFlashDrafter

from .peers import PEERS, Peer, Text, Unavailable, deliver, started
from .prompts import KINDS, Prompt, prompts
from .timing import Progress, bootstrap, percentiles

FULL = {"each": 2, "max_tokens": 128, "repeats": 3, "kinds": list(KINDS)}
QUICK = {"each": 1, "max_tokens": 12, "repeats": 2, "kinds": ["code", "json"]}
BASE, PLAIN, OURS = "mlx-lm", "ours, plain", "ours, DFlash"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="a folder or hub id; the demo pair without")
    parser.add_argument("--draft", help="its DFlash draft")
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16", "float16", "stored"], default="float32"
    )
    parser.add_argument("--kinds", nargs="+", choices=KINDS)
    parser.add_argument("--each", type=int, help="prompts of each kind")
    parser.add_argument("--max-tokens", type=int)
    parser.add_argument("--repeats", type=int)
    parser.add_argument("--block-size", type=int, help="fixed; chosen round by round without")
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=list(PEERS))
    parser.add_argument(
        "--peer-python",
        metavar="PYTHON",
        help="the interpreter of an environment that has the peers (and mlx and mlx-lm)",
    )


class Pair:
    """Target, tokenizer and draft, and folders of the same weights for other implementations."""

    def __init__(self, options: argparse.Namespace) -> None:
        if (options.model is None) != (options.draft is None):
            raise SystemExit("[e2e] expected --model and --draft together, or neither.")
        dtype = None if options.dtype == "stored" else getattr(mx, options.dtype)
        self.folder: str | None = None
        paths = options.model or demo.TARGET, options.draft or demo.DRAFT
        self.model, self.tokenizer = hub.load(paths[0], dtype)
        # The draft runs in fp32 beside an fp16 target: fp16 would overflow.
        drafts = mx.float32 if dtype == mx.float16 else dtype
        self.drafter = hub.load_drafter(paths[1], drafts)
        self.paths = str(paths[0]), str(paths[1])
        if dtype is not None:
            self.folder = tempfile.mkdtemp(prefix="bench-")
            self.paths = self._saved(Path(paths[0]), Path(paths[1]), Path(self.folder))

    def _saved(self, target: Path, draft: Path, folder: Path) -> tuple[str, str]:
        if not (target.is_dir() and draft.is_dir()):
            raise SystemExit(
                "[e2e] expected folders with a dtype: take --dtype stored for hub ids."
            )
        for source, module in ((target, self.model), (draft, self.drafter.model)):
            copy = folder / ("target" if source is target else "draft")
            weights = ("*.safetensors", "*.safetensors.index.json")
            shutil.copytree(source, copy, ignore=shutil.ignore_patterns(*weights))
            config = json.loads((copy / "config.json").read_text("utf-8"))
            config = {k: v for k, v in config.items() if not k.startswith("quantization")}
            (copy / "config.json").write_text(json.dumps(config), "utf-8")
            arrays = dict(tree_flatten(module.parameters()))
            mx.save_safetensors(str(copy / "model.safetensors"), arrays, {"format": "mlx"})
        return str(folder / "target"), str(folder / "draft")

    def close(self) -> None:
        """Delete the folders."""
        if self.folder is not None:
            shutil.rmtree(self.folder)


Run = Callable[[list[int], int], Text]


def own_runs(pair: Pair, block_size: int | None) -> dict[str, Run]:
    """Stock mlx-lm and ours, in this process."""
    target = Target(pair.model)

    def stock(prompt: list[int], max_tokens: int) -> Text:
        text = started()
        for response in mlx_lm.stream_generate(
            pair.model, pair.tokenizer, prompt, max_tokens=max_tokens
        ):
            deliver(text, [response.token])
        return text

    def ours(prompt: list[int], max_tokens: int, drafter: DFlashDrafter | None = None) -> Text:
        text, round_ = started(), 0
        size = block_size if drafter is not None else None
        for response in stream_generate(
            target, pair.tokenizer, prompt, max_tokens, drafter, block_size=size
        ):
            deliver(text, [response.token], joined=response.round == round_)
            round_ = response.round
        stats = response.stats
        return text | {
            "rounds": stats.rounds,
            "drafted": stats.drafted,
            "accepted": stats.accepted,
            "drafted_at": stats.drafted_at,
            "accepted_at": stats.accepted_at,
            "choices": stats.choices,
        }

    return {BASE: stock, PLAIN: ours, OURS: lambda ids, most: ours(ids, most, pair.drafter)}


def rate(text: Text) -> float | None:
    """Tokens a second after the first delivery, None where there was only one."""
    (first, start), (last, end) = text["deliveries"][0], text["deliveries"][-1]
    return (last - first) / (end - start) if last > first else None


def run(options: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """Every prompt by every contender in turn, in an order that turns with each repeat."""
    pair = Pair(options)
    given = prompts(pair.tokenizer, options.kinds, options.each)
    runs, rows, started_peers = own_runs(pair, options.block_size), {}, []
    for name in options.peers:
        progress(f"starting {name}")
        try:
            peer = Peer(name, *pair.paths, *filter(None, [options.peer_python]))
            started_peers.append(peer)
            peer.run(given[0].ids[:16], 8)
            runs[name] = peer.run
            rows[name] = {"versions": peer.versions}
        except Unavailable as error:
            rows[name] = {"why": str(error)}
    try:
        texts = collect(runs, rows, given, options, progress)
    finally:
        for peer in started_peers:
            peer.close()
        pair.close()
    results = [summary(name, texts, rows.get(name, {}), given) for name in [*texts, *rows]]
    results = list({row["contender"]: row for row in results}.values())
    kinds = [
        {"kind": kind, **summary(name, texts, {}, given, kind)}
        for kind in options.kinds
        for name in texts
    ]
    failures = [
        f"{row['contender']}: {row['equal_to_plain']} of {len(given)} texts equal plain decoding"
        for row in results
        if row["contender"] == OURS and row["equal_to_plain"] < len(given)
    ]
    return {
        "prompts": [{"kind": p.kind, "name": p.name, "tokens": len(p.ids)} for p in given],
        "results": results,
        "kinds": kinds,
        "failures": failures,
    }


def collect(
    runs: dict[str, Run],
    rows: dict[str, dict[str, Any]],
    given: list[Prompt],
    options: argparse.Namespace,
    progress: Progress,
) -> dict[str, list[list[Text]]]:
    """Texts by contender, prompt and repeat; a contender that fails leaves and its row says why."""
    texts: dict[str, list[list[Text]]] = {name: [[] for _ in given] for name in runs}
    for run_ in list(runs.values())[:3]:  # warm: weights packed, costs of a round measured
        run_(given[0].ids, min(80, 4 * options.max_tokens))
    for repeat in range(options.repeats):
        for at, prompt in enumerate(given):
            progress(f"repeat {repeat + 1} of {options.repeats}, {prompt.name}")
            names = list(runs)
            turn = (repeat + at) % len(names)
            for name in names[turn:] + names[:turn]:
                try:
                    texts[name][at].append(runs[name](prompt.ids, options.max_tokens))
                except Unavailable as error:
                    rows[name] = {"why": f"{prompt.name}: {error}"}
                    del runs[name], texts[name]
                mx.clear_cache()
    return texts


def summary(
    name: str,
    texts: dict[str, list[list[Text]]],
    row: dict[str, Any],
    given: list[Prompt],
    kind: str | None = None,
) -> dict[str, Any]:
    """What a contender did on all prompts, or on those of one kind."""
    if name not in texts:
        return {"contender": name, **row}
    chosen = [at for at, prompt in enumerate(given) if kind in (None, prompt.kind)]
    own = [texts[name][at] for at in chosen]
    rates = [r for group in own for text in group if (r := rate(text)) is not None]
    first = [group[0] for group in own]
    tokens = [text["tokens"] for text in first]
    rounds = sum(text["rounds"] for text in first)
    drafted = None if any(t["drafted"] is None for t in first) else sum(t["drafted"] for t in first)
    accepted = None if drafted is None else sum(text["accepted"] for text in first)
    emitted = sum(len(each) for each in tokens)
    return {
        "contender": name,
        "tok_s": percentiles(rates)[1] if rates else None,
        "tok_s_low": percentiles(rates)[0] if rates else None,
        "tok_s_high": percentiles(rates)[2] if rates else None,
        "over_mlx_lm": ratio(texts, name, BASE, chosen),
        "over_plain": ratio(texts, name, PLAIN, chosen),
        "seconds": median(text["deliveries"][-1][1] for group in own for text in group),
        "tokens": emitted,
        "rounds": rounds,
        "tokens_per_round": emitted / rounds if rounds else 1.0,
        "drafted": drafted,
        "accepted": accepted,
        "acceptance": accepted / drafted if drafted else None,
        "drafted_at": added(first, "drafted_at"),
        "accepted_at": added(first, "accepted_at"),
        "equal_to_plain": sum(
            texts[PLAIN][at][0]["tokens"] == texts[name][at][0]["tokens"] for at in chosen
        ),
        "equal_to_mlx_lm": sum(
            texts[BASE][at][0]["tokens"] == texts[name][at][0]["tokens"] for at in chosen
        ),
        "texts": len(chosen),
        "same_each_time": all(
            text["tokens"] == group[0]["tokens"] for group in own for text in group
        ),
        "sha256": hashlib.sha256(json.dumps(tokens).encode()).hexdigest(),
        "notes": sorted({text["note"] for text in first if "note" in text}),
        **row,
    }


def ratio(
    texts: dict[str, list[list[Text]]], name: str, other: str, chosen: list[int]
) -> tuple[float, float, float] | None:
    """95 % interval and geometric mean of rates over another's, prompt by prompt."""
    groups = []
    for at in chosen:
        pairs = [(rate(a), rate(b)) for a, b in zip(texts[name][at], texts[other][at], strict=True)]
        found = [a / b for a, b in pairs if a and b]
        if found:
            groups.append(found)
    return bootstrap(groups) if groups else None


def added(texts: list[Text], field: str) -> list[int]:
    """Sums by position of a block."""
    longest = max((len(text.get(field, [])) for text in texts), default=0)
    return [
        sum(text[field][i] for text in texts if i < len(text.get(field, [])))
        for i in range(longest)
    ]


def text(document: dict[str, Any]) -> Iterator[str]:
    """The table, over all prompts and by kind."""
    settings = document["settings"]
    pair = settings["model"] or "the demo pair"
    yield (
        f"{pair} in {settings['dtype']}, {len(document['prompts'])} prompts, up to "
        f"{settings['max_tokens']} tokens, {settings['repeats']} repeats; tok/s after the first "
        "delivery, ratios with their 95 % intervals"
    )
    yield (
        f"{'':13} {'tok/s':>7} {'(10..90 %)':>15} {'x mlx-lm':>19} {'x plain':>19} "
        f"{'tok/round':>9} {'accepted':>8} {'= plain':>7} {'= lm':>6}  sha256"
    )
    for row in document["results"]:
        if "why" in row:
            yield f"{row['contender']:13} does not run here: {row['why']}"
            continue
        versions = row.get("versions", {})
        said = "; ".join([*(f"{k} {v}" for k, v in versions.items()), *row["notes"]])
        yield f"{row['contender']:13} {_figures(row)}  {row['sha256'][:16]} {said}"
    yield "By kind"
    for row in document["kinds"]:
        yield f"{row['kind']:6} {row['contender']:13} {_figures(row)}"


def _figures(row: dict[str, Any]) -> str:
    if row["tok_s"] is None:
        return "every text came at once"
    accepted = "" if row["acceptance"] is None else f"{row['acceptance']:.3f}"
    spread = f"({row['tok_s_low']:.1f}..{row['tok_s_high']:.1f})"
    equal, lm = (f"{row[f'equal_to_{x}']}/{row['texts']}" for x in ("plain", "mlx_lm"))
    return (
        f"{row['tok_s']:7.1f} {spread:>15} {_interval(row['over_mlx_lm']):>19} "
        f"{_interval(row['over_plain']):>19} {row['tokens_per_round']:9.2f} {accepted:>8} "
        f"{equal:>7} {lm:>6}"
    )


def _interval(found: tuple[float, float, float] | None) -> str:
    return "" if found is None else f"{found[1]:.2f} ({found[0]:.2f}..{found[2]:.2f})"
