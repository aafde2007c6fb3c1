"""Other implementations of DFlash, each in a process of its own, behind one line of JSON a text.

They patch classes of mlx-lm, so none may share a process with anything that is compared with it.
An adapter needs the peer, mlx and mlx-lm: the process may be that of another environment.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Text = dict[str, Any]
"""tokens; deliveries: tokens so far and seconds since the call, of each; rounds; drafted and
accepted drafts, None where the peer does not tell."""

PEERS = {"dflash": "0.1.0", "dflash-mlx": "0.1.8"}
"""By their names on PyPI; the versions that the adapters were written for."""


def dflash(model: str, draft: str) -> Callable[[list[int], int], Text]:
    """The authors' package: `pip install --no-deps dflash==0.1.0`."""
    import mlx.core as mx
    from dflash import model_mlx
    from mlx_lm import load

    if Path(draft).is_dir():
        model_mlx.snapshot_download = lambda folder, **_: folder
    target, tokenizer = load(model)
    drafter = model_mlx.load_draft(draft)
    block = int(drafter.config.block_size)

    def run(prompt: list[int], max_tokens: int) -> Text:
        text = started()
        for response in model_mlx.stream_generate(
            target, drafter, tokenizer, mx.array(prompt), max_tokens=max_tokens
        ):
            if response.accepted is not None:
                text["rounds"] += 1
                text["drafted"] += min(block, max_tokens - len(text["tokens"]) + 1) - 1
                text["accepted"] += len(response.tokens) - 1
            deliver(text, response.tokens)
        return text

    return run


def dflash_mlx(model: str, draft: str) -> Callable[[list[int], int], Text]:
    """`pip install --no-deps dflash-mlx==0.1.8`, with its defaults."""
    from dflash_mlx.engine.events import SummaryEvent, TokenEvent
    from dflash_mlx.metal_limits import apply_metal_limits
    from dflash_mlx.runtime import get_stop_token_ids, stream_dflash_generate
    from dflash_mlx.runtime.bundle import load_runtime_bundle
    from dflash_mlx.runtime.context import build_offline_runtime_context

    apply_metal_limits()
    context = build_offline_runtime_context()
    bundle = load_runtime_bundle(model_ref=model, draft_ref=draft, verify_config=context.verify)

    def run(prompt: list[int], max_tokens: int) -> Text:
        text, cycle = started(), None
        for event in stream_dflash_generate(
            target_model=bundle.target_model,
            target_ops=bundle.target_ops,
            tokenizer=bundle.tokenizer,
            draft_model=bundle.draft_model,
            draft_backend=bundle.draft_backend,
            prompt_tokens_override=prompt,
            max_new_tokens=max_tokens,
            stop_token_ids=get_stop_token_ids(bundle.tokenizer),
            runtime_context=context,
        ):
            if isinstance(event, TokenEvent):
                deliver(text, [int(event.token_id)], joined=event.cycles_completed == cycle)
                cycle = event.cycles_completed
            elif isinstance(event, SummaryEvent):
                text["rounds"], text["accepted"] = event.cycles_completed, event.accepted_from_draft
                block = event.block_tokens
                text["drafted"] = None if block is None else event.cycles_completed * (block - 1)
                if event.fallback_ar:
                    text["note"] = f"without its draft: {event.fallback_reason}"
        return text

    return run


ADAPTERS = {"dflash": dflash, "dflash-mlx": dflash_mlx}


def started() -> Text:
    """An empty text, its clock running."""
    return {
        "tokens": [],
        "deliveries": [],
        "rounds": 0,
        "drafted": 0,
        "accepted": 0,
        "start": time.perf_counter(),
    }


def deliver(text: Text, tokens: list[int], joined: bool = False) -> None:
    """Add what came now; `joined` to the last delivery."""
    if tokens:
        text["tokens"] += tokens
        if joined:
            text["deliveries"].pop()
        seconds = time.perf_counter() - text["start"]
        text["deliveries"].append((len(text["tokens"]), seconds))


class Unavailable(RuntimeError):
    """A peer that does not run here; the message says why."""


class Peer:
    """A peer's process. Raises Unavailable where it does not start."""

    def __init__(self, name: str, model: str, draft: str, python: str = sys.executable) -> None:
        root = str(Path(__file__).parents[1])
        paths = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        self.name = name
        self._process = subprocess.Popen(
            [python, str(Path(__file__)), name, "--model", model, "--draft", draft],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": paths},
            text=True,
        )
        try:
            self.versions: dict[str, str] = self._answer()["versions"]
        except Unavailable:
            self.close()
            raise

    def run(self, prompt: list[int], max_tokens: int) -> Text:
        """A text. Raises Unavailable where the peer fails."""
        assert self._process.stdin is not None
        try:
            print(json.dumps([prompt, max_tokens]), file=self._process.stdin, flush=True)
        except OSError as error:
            raise Unavailable(f"its process ended: {error}") from error
        return self._answer()

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise Unavailable(f"its process ended with {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise Unavailable(answer["error"])
        return answer


def serve(name: str, model: str, draft: str) -> Iterator[dict[str, Any]]:
    """The other side: versions once the pair is loaded, then a text for each line of stdin."""
    run = ADAPTERS[name](model, draft)
    yield {"versions": {each: importlib.metadata.version(each) for each in (name, "mlx", "mlx-lm")}}
    for line in sys.stdin:
        yield run(*json.loads(line))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=ADAPTERS)
    parser.add_argument("--model", required=True)
    parser.add_argument("--draft", required=True)
    options = parser.parse_args()
    answers, sys.stdout = sys.stdout, sys.stderr  # what the peer prints is no answer
    try:
        for answer in serve(options.name, options.model, options.draft):
            print(json.dumps(answer), file=answers, flush=True)
    except Exception as error:
        at = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(at.filename).name}:{at.lineno}"
        why = f"{type(error).__name__}: {str(error).partition(chr(10))[0]} ({place})"
        print(json.dumps({"error": why}), file=answers, flush=True)
    answers.flush()
    os._exit(0)  # MLX can abort where streams outlive the interpreter


if __name__ == "__main__":
    main()
