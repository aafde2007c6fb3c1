"""Full forwards of Qwen3.5-shaped targets with random weights: plain steps and verifies of T rows.

    python bench/forward.py [--shape 4b] [--bits 16] [--context 1024] [--repeats 20] [--json]

A forward is `Target.forward(..., commit=False)`, logits, argmax and `cache.commit` of all its T
inputs, whose tape the next forward of that width replays; every call starts at `--context`. `exact`
and `stock` are the target with exact=True and exact=False; `mlx-lm` is mlx-lm's own model with its
own prompt cache. Before anything is timed, the exact verify's logits must be those of single steps,
bit for bit. Variants are interleaved round by round; a figure is the median of the rounds, the
spread their 10th to 90th percentile. A round queues `--queue` forwards, each handed to the device
before the next is built, as plain decoding does.

`x plain` compares with one row of the same way, `tok/s` is T over the time, and `GB/s` counts
weights, keys, values and states once. `of floor` is this line's GB/s over the floor's: on a CPU the
floor is a read on the same threads, on a GPU a copy, of 1 GB at most. The tiny shape and the demo's
fit in a cache: there `of floor` says little.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module
from mlx.nn.layers.quantized import quantize
from mlx.utils import tree_flatten, tree_map_with_path
from mlx_lm.models import qwen3_5
from mlx_lm.models.cache import KVCache, make_prompt_cache
from timing import Call, header, interleave, percentiles, print_header, ratios, read_or_copy

from dflash_native import Cache, Target, demo
from dflash_native.cache import AttentionCache

COMMON = {
    "model_type": "qwen3_5",
    "rms_norm_eps": 1e-6,
    "num_hidden_layers": 32,
    "full_attention_interval": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "vocab_size": 248320,
    "rope_parameters": {"type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
}
TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "vocab_size": 512,
    "tie_word_embeddings": True,
}
SHAPES = {
    "tiny": TINY,
    "demo": json.loads((demo.TARGET / "config.json").read_text())["text_config"],
    "4b": {"hidden_size": 2560, "intermediate_size": 9216, "tie_word_embeddings": True},
    "9b": {"hidden_size": 4096, "intermediate_size": 12288, "tie_word_embeddings": False},
}
"""Over COMMON. 4b and 9b are the text models of Qwen3.5-4B and Qwen3.5-9B."""

MOST_BYTES = 1_000_000_000
"""That the floor moves."""


def make_model(shape: str, bits: int, dtype: mx.Dtype) -> Module:
    """A random model; a weight at a time is in memory in fp32."""
    config = {**COMMON, **SHAPES[shape], "model_type": "qwen3_5"}
    model = qwen3_5.Model(qwen3_5.ModelArgs.from_dict(config))
    stays = model.cast_predicate

    def cast(path: str, value: mx.array) -> mx.array:
        return value.astype(dtype) if stays(path) else value

    model.update(tree_map_with_path(cast, model.parameters()))
    if bits != 16:
        quantize(model, group_size=64, bits=bits)
    model.eval()
    for _, value in tree_flatten(model.parameters()):
        mx.eval(value)
    return model


def filled(target: Target, context: int, capacity: int) -> Cache:
    """A cache as after `context` inputs, of random values."""
    cache = target.make_cache()
    cache.reserve(capacity)
    for layer in cache.layers:
        fields = ("keys", "values") if isinstance(layer, AttentionCache) else ("window", "state")
        for name in fields:
            old = getattr(layer, name)
            setattr(layer, name, (0.1 * mx.random.normal(old.shape)).astype(old.dtype))
    cache.lengths = [context]
    cache.eval()
    return cache


def copied(target: Target, source: Cache) -> Cache:
    """A cache with the keys and values of `source`, shared, and states of its own."""
    cache = target.make_cache()
    for at, layer in enumerate(source.layers):
        if isinstance(layer, AttentionCache):
            cache.layers[at] = layer
        else:
            cache.layers[at].advance(layer.window, layer.state)
    cache.lengths = list(source.lengths)
    return cache


def run(target: Target, tokens: mx.array, cache: Cache) -> mx.array:
    """The logits of one verify, all of whose inputs are committed."""
    logits = target.logits(target.forward(tokens, cache, commit=False)[0])
    cache.commit([tokens.shape[1]])
    return logits


def check(target: Target, tokens: mx.array, source: Cache) -> None:
    """A verify against the single steps of the same tokens."""
    cache = copied(target, source)
    steps = [run(target, tokens[:, t : t + 1], cache) for t in range(tokens.shape[1])]
    alone = mx.concatenate(steps, axis=1)
    mx.eval(alone)
    block = run(target, tokens, copied(target, source))
    assert mx.isfinite(block).all().item()
    assert mx.array_equal(alone, block).item(), "a verify and single steps differ"


def ours(target: Target, tokens: mx.array, source: Cache) -> Call:
    cache, start = copied(target, source), list(source.lengths)

    def call(count: int) -> list[mx.array]:
        chosen = []
        for _ in range(count):
            chosen.append(mx.argmax(run(target, tokens, cache), axis=-1))
            cache.lengths = list(start)
            mx.async_eval(chosen[-1])
        return chosen

    return call


def theirs(model: Module, tokens: mx.array, source: Cache) -> Call:
    caches, start = make_prompt_cache(model), source.lengths[0]
    for cache, layer in zip(caches, source.layers, strict=True):
        if isinstance(layer, AttentionCache):
            cache.keys, cache.values = layer.keys + 0, layer.values + 0
        else:
            cache[0], cache[1] = layer.window, layer.state

    def call(count: int) -> list[mx.array]:
        chosen = []
        for _ in range(count):
            for cache in caches:
                if isinstance(cache, KVCache):
                    cache.offset = start
            chosen.append(mx.argmax(model(tokens, cache=caches), axis=-1))
            mx.async_eval(chosen[-1])
        return chosen

    return call


def bytes_read(model: Module, source: Cache) -> int:
    """Weights, the embedding table only where it is the head, and what the caches hold."""
    total = sum(value.nbytes for _, value in tree_flatten(model.parameters()))
    if not model.language_model.args.tie_word_embeddings:
        table = model.language_model.model.embed_tokens
        total -= sum(value.nbytes for _, value in tree_flatten(table.parameters()))
    for layer in source.layers:
        share = source.lengths[0] / layer.capacity if isinstance(layer, AttentionCache) else 1
        total += int(share * sum(array.nbytes for array in layer.arrays()))
    return total


def slope(times: dict[str, list[float]], way: str, rows: Sequence[int]) -> list[float]:
    """Percentiles of one more row's cost, in % of a plain step: a line through each round."""
    wide = [T for T in rows if T > 1]
    rounds = np.array([times[f"{way} {T}"] for T in wide])
    return list(percentiles(np.polyfit(wide, rounds, 1)[0] / np.array(times[f"{way} 1"]) * 100))


def measure(options: argparse.Namespace) -> dict[str, object]:
    """The lines of the table and what follows from them."""
    model = make_model(options.shape, options.bits, getattr(mx, options.dtype))
    targets = {"exact": Target(model), "stock": Target(model, exact=False)}
    most = max(options.rows)
    source = filled(targets["exact"], options.context, options.context + most)
    vocabulary = targets["exact"].vocab_size
    tokens = {T: mx.random.randint(0, vocabulary, (1, T), dtype=mx.int32) for T in options.rows}
    mx.eval(tokens)
    variants: dict[str, Call] = {}
    if "exact" in options.ways:
        check(targets["exact"], tokens[most], source)
    for way in options.ways:
        for T in options.rows:
            if way != "mlx-lm":
                variants[f"{way} {T}"] = ours(targets[way], tokens[T], source)
            elif T in (1, most):
                variants[f"{way} {T}"] = theirs(model, tokens[T], source)
    size = bytes_read(model, source)
    moved = min(size, MOST_BYTES)
    variants["floor"] = read_or_copy(moved, options.queue)
    times = interleave(variants, options.repeats, options.queue)
    floor = [moved / taken for taken in times.pop("floor")]
    lines = []
    for name, taken in times.items():
        way, T = name.split()
        low, middle, high = percentiles(taken)
        lines.append(
            {
                "way": way,
                "rows": int(T),
                "ms": middle * 1e3,
                "ms_low": low * 1e3,
                "ms_high": high * 1e3,
                "of_plain": ratios(taken, times[f"{way} 1"]),
                "tok_s": int(T) / middle,
                "gb_s": size / middle / 1e9,
                "of_floor": percentiles([size / t / f for t, f in zip(taken, floor, strict=True)]),
            }
        )
    summary: dict[str, object] = {
        "mbytes": size / 1e6,
        "peak_mbytes": mx.get_peak_memory() / 1e6,
        "floor_gb_s": percentiles(floor)[1] / 1e9,
    }
    for way in options.ways:
        if way != "mlx-lm" and sum(T > 1 for T in options.rows) > 1:
            summary[f"one_more_row_percent_{way}"] = slope(times, way, options.rows)
        if way != "exact" and "exact" in options.ways:
            summary[f"exact_over_{way}"] = ratios(times["exact 1"], times[f"{way} 1"])
    return {**summary, "results": lines}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="4b")
    parser.add_argument(
        "--bits", type=int, choices=[16, 8, 4], default=16, help="16: not quantised"
    )
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--context", type=int, default=1024, help="inputs before each call")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 3, 4, 6, 8, 12, 16])
    ways = ["exact", "stock", "mlx-lm"]
    parser.add_argument("--ways", choices=ways, nargs="+", default=ways)
    parser.add_argument("--repeats", type=int, default=20, help="rounds that are timed")
    parser.add_argument("--queue", type=int, default=4, help="forwards of a variant in a round")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    options.rows = sorted({1, *options.rows})
    mx.random.seed(0)
    what = {name: getattr(options, name) for name in ("shape", "bits", "dtype", "context")}
    found = measure(options)
    if options.json:
        json.dump({**header(**what), **found}, sys.stdout, indent=1)
        print()
        return
    print_header(**what)
    print(
        f"{'way':7} {'T':>3} {'ms':>9} {'(10..90 %)':>19} {'x plain':>8} {'(10..90 %)':>14} "
        f"{'tok/s':>8} {'GB/s':>7} {'of floor':>8}"
    )
    for line in found["results"]:
        low, ratio, high = line["of_plain"]
        print(
            f"{line['way']:7} {line['rows']:3d} {line['ms']:9.3f} "
            f"{'({:.3f}..{:.3f})'.format(line['ms_low'], line['ms_high']):>19} "
            f"{ratio:8.3f} {f'({low:.3f}..{high:.3f})':>14} "
            f"{line['tok_s']:8.1f} {line['gb_s']:7.1f} {line['of_floor'][1]:8.2f}"
        )
    print(
        f"{found['mbytes']:.1f} MB a forward, {found['peak_mbytes']:.1f} MB of memory at most; "
        f"the floor runs at {found['floor_gb_s']:.1f} GB/s"
    )
    for name, value in found.items():
        if isinstance(value, tuple | list) and name != "results":
            low, middle, high = value
            print(f"{name.replace('_', ' ')}: {middle:.3f} ({low:.3f}..{high:.3f})")


if __name__ == "__main__":
    main()
