"""Decoding speed on the demo pair: mlx-lm, ours plain, ours with DFlash, the authors' dflash 0.1.0.

    pip install --no-deps dflash==0.1.0        # leave it out and its row says that it is missing
    python bench/end_to_end.py [--prompts 5] [--max-tokens 64] [--dtype float32] [--repeats 2]

Every prompt is run by every contender in turn, in an order that turns with each repeat, so that the
machine's moods hit all alike. Figures are tokens a second after the prompt was read (mlx-lm's
`generation_tps`); ratios are those of each prompt's own pair, their median with the 10th and 90th
percentile. The tokens are compared with those of mlx-lm, the sha256 of all of them is printed, and
end tokens are respected.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx_lm
from timing import header, print_header, ratios

from dflash_native import Target, demo, load_demo, stream_generate

Run = tuple[list[int], float, float]
"""Tokens, tokens a second, tokens a round."""


def contenders(dtype: mx.Dtype, max_tokens: int) -> tuple[dict[str, Callable[[Any], Run]], Any]:
    """What is compared, by name, and the tokenizer."""
    model, tokenizer, drafter = load_demo(dtype)
    target = Target(model)

    def stock(prompt: Any) -> Run:
        responses = list(mlx_lm.stream_generate(model, tokenizer, prompt, max_tokens=max_tokens))
        return [r.token for r in responses], responses[-1].generation_tps, 1.0

    def ours(prompt: Any, **options: Any) -> Run:
        responses = list(stream_generate(target, tokenizer, prompt, max_tokens, **options))
        last = responses[-1]
        return [r.token for r in responses], last.generation_tps, last.stats.tokens_per_round

    runs: dict[str, Callable[[Any], Run]] = {
        "mlx-lm": stock,
        "ours, plain": ours,
        "ours, DFlash": lambda prompt: ours(prompt, drafter=drafter),
    }
    try:
        from dflash import model_mlx
    except ImportError as error:
        print(f"the authors' dflash does not run here: {error}", file=sys.stderr)
        return runs, tokenizer
    model_mlx.snapshot_download = lambda folder, **_: folder  # the draft is here already
    own_model = load_demo(dtype)[0]  # theirs replaces layers of the model that it is given
    draft = model_mlx.load_draft(str(demo.DRAFT))
    draft.set_dtype(mx.float32 if dtype == mx.float16 else dtype)

    def authors(prompt: Any) -> Run:
        tokens: list[int] = []
        rounds, start = 0, None
        for response in model_mlx.stream_generate(
            own_model, draft, tokenizer, mx.array(prompt), max_tokens=max_tokens
        ):
            if start is None:
                start = time.perf_counter()  # the prompt is read, the first token is there
            elif response.tokens:
                rounds += 1
            tokens += response.tokens
        took = time.perf_counter() - (start or 0.0)
        return tokens, (len(tokens) - 1) / took, (len(tokens) - 1) / max(rounds, 1)

    runs["authors' dflash"] = authors
    return runs, tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=5)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    runs, tokenizer = contenders(getattr(mx, options.dtype), options.max_tokens)
    prompts = [tokenizer.encode(p.text) for p in demo.prompts()[: options.prompts]]
    names = list(runs)
    for name in names:  # warm up
        runs[name](prompts[0][:16])
    rates: dict[str, list[float]] = {name: [] for name in names}
    rounds: dict[str, list[float]] = {name: [] for name in names}
    tokens: dict[str, list[list[int]]] = {name: [] for name in names}
    for repeat in range(options.repeats):
        for prompt in prompts:
            for name in names[repeat % len(names) :] + names[: repeat % len(names)]:
                emitted, rate, per_round = runs[name](prompt)
                rates[name].append(rate)
                rounds[name].append(per_round)
                if repeat == 0:
                    tokens[name].append(emitted)
    lines = []
    for name in names:
        low, middle, high = ratios(rates[name], rates["mlx-lm"])
        same = sum(a == b for a, b in zip(tokens[name], tokens["mlx-lm"], strict=True))
        lines.append(
            {
                "contender": name,
                "tok_s": statistics.median(rates[name]),
                "ratio": middle,
                "ratio_low": low,
                "ratio_high": high,
                "tokens_per_round": statistics.mean(rounds[name]),
                "equal_to_mlx_lm": same,
                "sha256": hashlib.sha256(json.dumps(tokens[name]).encode()).hexdigest()[:16],
            }
        )
    what = {"dtype": options.dtype, "prompts": len(prompts)}
    if options.json:
        json.dump({**header(**what), "results": lines}, sys.stdout, indent=1)
        print()
        return
    print_header(**what)
    print(
        f"{'':17} {'tok/s':>7} {'x mlx-lm':>9} {'(10..90 %)':>13} "
        f"{'tok/round':>9} {'equal':>6}  sha256"
    )
    for line in lines:
        spread = f"({line['ratio_low']:.2f}..{line['ratio_high']:.2f})"
        equal = f"{line['equal_to_mlx_lm']}/{len(prompts)}"
        print(
            f"{line['contender']:17} {line['tok_s']:7.1f} {line['ratio']:9.2f} {spread:>13} "
            f"{line['tokens_per_round']:9.2f} {equal:>6}  {line['sha256']}"
        )


if __name__ == "__main__":
    main()
