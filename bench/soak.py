"""`python -m bench soak`: a server under requests for a long time.

Answers stay right, streams end once, memory is flat. `-- --prefix-cache-bytes 0` gives the server
other options. A server of the demo pair is started, with a prefix cache that is full, and evicts,
before the warm-up is over, unless options say otherwise. Requests differ in endpoint, prompt,
budget, sampling and stop strings; each kind's answer is asked for once beforehand, and every later
one must be the same text with the same usage. Mixed requests come from eight clients at once, and a
third of them leave at a random moment: before the first event, or after any. Resident memory is the
process's own, the median of 24 requests one after the other: after a warm-up of a fifth of the
requests, and once all are over. Prints one JSON object; ends with 1 where anything was wrong.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from statistics import median

import httpx

from dflash_native.demo import prompts

CLIENTS = 8
SAMPLES = 24
CACHE = 16_000_000


def kinds() -> list[tuple[str, dict]]:
    """Requests whose answers do not change: greedy ones, and drawn ones with a seed."""
    texts = [prompt.text for prompt in prompts()[:12]]
    found = []
    for i, text in enumerate(texts):
        body: dict = {"max_tokens": 8 + 5 * i}
        if i % 3 == 0:
            body |= {"temperature": 0.9, "top_p": 0.9, "seed": i}
        if i % 4 == 1:
            body |= {"stop": ["\n\n", "return"]}
        if i % 4 == 2:
            body |= {"presence_penalty": 0.5, "max_tokens": 12}
        if i % 2:
            found.append(("/v1/completions", body | {"prompt": text * (1 + i % 3)}))
        else:
            messages = [{"role": "user", "content": text}]
            found.append(("/v1/chat/completions", body | {"messages": messages}))
    return found


class Leaves(Exception):
    """The client goes away."""


def ask(client: httpx.Client, path: str, body: dict, leave_after: int | None = None) -> dict:
    """A streamed answer: its text, usage and terminal chunks; `leave_after` so many events."""
    body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    found: dict = {"text": "", "reasons": [], "done": 0, "usage": None, "events": 0}
    with client.stream("POST", path, json=body) as response:
        assert response.status_code == 200, response.read()
        if leave_after == 0:
            raise Leaves
        for line in response.iter_lines():
            if not line.startswith("data: "):
                continue
            found["events"] += 1
            if found["events"] == leave_after:
                raise Leaves
            if line == "data: [DONE]":
                found["done"] += 1
                continue
            event = json.loads(line.removeprefix("data: "))
            assert "error" not in event, event
            for choice in event["choices"]:
                delta = choice.get("delta", {})
                found["text"] += choice.get("text") or delta.get("content") or ""
                found["reasons"] += [choice["finish_reason"]] * bool(choice["finish_reason"])
            found["usage"] = event["usage"] or found["usage"]
    return found


def same(found: dict, expected: dict) -> bool:
    """Whether an answer is the one that was expected, and ended once."""
    ended = found["done"] == 1 and len(found["reasons"]) == 1
    usages = [
        {k: v for k, v in each["usage"].items() if k.endswith("tokens")}
        for each in (found, expected)
    ]
    return ended and found["text"] == expected["text"] and usages[0] == usages[1]


def resident(client: httpx.Client) -> int:
    """Bytes of the server's process."""
    text = client.get("/metrics").text
    found = re.search(r"^process_resident_memory_bytes (\S+)$", text, re.MULTILINE)
    assert found, "the server runs on Linux"
    return int(float(found[1]))


def settle(client: httpx.Client) -> None:
    """Wait until the worker has nothing to do."""
    end = time.monotonic() + 30
    while time.monotonic() < end:
        worker = client.get("/health").json()["worker"]
        if worker["active"] == worker["waiting"] == 0:
            return
        time.sleep(0.02)
    raise AssertionError("the worker is busy although every client is gone")


def soak(url: str, sequential: int, mixed: int, seed: int) -> dict:
    """Run the requests; what was wrong, and the memory."""
    chance, wrong, left = random.Random(seed), [], 0
    work = kinds()
    with httpx.Client(base_url=url, timeout=120) as client:
        expected = [ask(client, *each) for each in work]
        memory = []

        def in_a_row(name: str, count: int) -> None:
            for i in range(count):
                which = chance.randrange(len(work))
                if not same(ask(client, *work[which]), expected[which]):
                    wrong.append((name, i))
                memory.append(resident(client))

        start = time.monotonic()
        in_a_row("sequential", sequential)
        settle(client)
        between = time.monotonic()
        lock = threading.Lock()

        def one(i: int, which: int, leave_after: int | None) -> None:
            nonlocal left
            with httpx.Client(base_url=url, timeout=120) as own:
                try:
                    if not same(ask(own, *work[which], leave_after), expected[which]):
                        wrong.append(("mixed", i))
                except Leaves:
                    with lock:
                        left += 1

        plan = [
            (i, chance.randrange(len(work)), chance.randrange(6) if i % 3 == 0 else None)
            for i in range(mixed)
        ]
        with ThreadPoolExecutor(CLIENTS) as pool:
            list(pool.map(lambda each: one(*each), plan))
        settle(client)
        end = time.monotonic()
        in_a_row("after", SAMPLES)
        status = client.get("/status").json()
    warm_up = sequential // 5
    warm, last = (median(part) for part in (memory[warm_up : warm_up + SAMPLES], memory[-SAMPLES:]))
    return {
        "sequential": sequential,
        "sequential_seconds": round(between - start, 1),
        "mixed": mixed,
        "mixed_seconds": round(end - between, 1),
        "left": left,
        "wrong": wrong,
        "ended": status["totals"]["requests"],
        "mlx_mb": {kind: round(count / 1e6, 1) for kind, count in status["memory"].items()},
        "cache_mb": round((status["cache"] or {"nbytes": 0})["nbytes"] / 1e6, 1),
        "resident_mb": [round(each / 1e6, 1) for each in (warm, last)],
        "deciles_mb": [round(memory[i * len(memory) // 10] / 1e6, 1) for i in range(10)],
        "growth": round(last / warm - 1, 4),
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sequential", type=int, default=500)
    parser.add_argument("--mixed", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--growth", type=float, default=0.03, help="of memory that is no leak")
    parser.add_argument("serve", nargs="*", help="options of dflash-native serve, after --")


def run(chosen: argparse.Namespace) -> int:
    """Prints one JSON object; 1 where anything was wrong."""
    options = chosen.serve or ["--prefix-cache-bytes", str(CACHE)]
    command = [sys.executable, "-m", "dflash_native", "serve", "--port", "0", *options]
    pipe = subprocess.PIPE
    server = subprocess.Popen(command, stderr=pipe, stdout=subprocess.DEVNULL, text=True)
    try:
        assert server.stderr is not None
        line = next(line for line in server.stderr if "/v1" in line)
        found = soak(
            line.split(" at ")[1].split("/v1")[0], chosen.sequential, chosen.mixed, chosen.seed
        )
    finally:
        server.terminate()
        code = server.wait(60)
    print(json.dumps(found | {"exit_code": code}))
    answered = found["ended"].get("failed", 0) == 0
    return (
        0
        if not found["wrong"] and found["growth"] <= chosen.growth and answered and not code
        else 1
    )
