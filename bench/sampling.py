"""`python -m bench sampling`: what is accepted where tokens are drawn, by how a draft proposes.

`--draft model` takes the demo's target itself, in four bits, as a draft of four tokens.
"""

from __future__ import annotations

import argparse

import mlx.core as mx
import mlx.nn as nn

from dflash_native import AutoregressiveDrafter, Sampling, Session, Target, load_demo
from dflash_native.demo import prompts

SETTINGS = ({"temperature": 0.6}, {"temperature": 0.8, "top_p": 0.95}, {"temperature": 1.0})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--draft", choices=("dflash", "model"), default="dflash")


def run(options: argparse.Namespace) -> None:
    """Prints the table."""
    model, tokenizer, drafter = load_demo(mx.float32)
    if options.draft == "model":
        small, _, _ = load_demo(mx.float32)
        nn.quantize(small, group_size=64, bits=4)
        drafter = AutoregressiveDrafter(small)
    target = Target(model)
    print(
        f"blocks of {drafter.max_drafts + 1}, {options.prompts} prompts x {options.tokens} tokens"
    )
    print("temperature  top_p  proposes  tokens a round  accepted / drafted")
    for setting in SETTINGS:
        for proposes in ("argmax", "coupled", "drawn"):
            drafter.proposes = proposes
            rounds = tokens = drafted = accepted = 0
            for prompt in prompts()[: options.prompts]:
                session = Session(target, drafter, sampling=Sampling(seed=options.seed, **setting))
                session.prefill(list(tokenizer.encode(prompt.text)))
                end = len(session.tokens) + options.tokens
                while len(session.tokens) < end:
                    session.round(end - len(session.tokens))
                rounds += session.stats.rounds
                tokens += session.stats.tokens
                drafted += session.stats.drafted
                accepted += session.stats.accepted
            print(
                f"{setting['temperature']:>11} {setting.get('top_p', 1.0):>6}  {proposes:<8} "
                f"{tokens / rounds:>15.2f} {accepted / drafted:>19.3f}",
                flush=True,
            )
