"""The prefix cache behind the endpoints: fewer tokens are read, and no token changes."""

from __future__ import annotations

import httpx
import pytest

import running
from dflash_native import demo

LONG = "\n\n".join(prompt.text for prompt in demo.prompts())
"""Some 2300 tokens."""


def chat(url, messages, **more):
    body = {"messages": messages, "max_tokens": 24, **more}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


def cached(answer):
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def turns(url):
    """Three turns of a chat: their answers."""
    messages, answers = [{"role": "user", "content": LONG}], []
    for question in ("\n\ndef merge(", "\n\nclass Queue:", None):
        answers.append(chat(url, messages))
        text = answers[-1]["choices"][0]["message"]["content"]
        messages.append({"role": "assistant", "content": text})
        messages.append({"role": "user", "content": question or ""})
    return answers


@pytest.fixture(scope="module")
def cold():
    with running.process("--prefix-cache-bytes", 0, "--block-size", 8) as server:
        found = turns(server.url)
        assert httpx.get(f"{server.url}/status").json()["cache"] is None
        assert [cached(answer) for answer in found] == [0, 0, 0]
        yield found


def test_later_turns_read_little_and_say_the_same(cold):
    with running.process("--block-size", 8) as server:
        warm = turns(server.url)
        again = chat(server.url, [{"role": "user", "content": LONG}])
        status = httpx.get(f"{server.url}/status").json()
        metrics = httpx.get(f"{server.url}/metrics").text
    for ours, theirs in zip(warm, cold, strict=True):
        assert ours["choices"] == theirs["choices"]
        for name in ("prompt_tokens", "completion_tokens"):
            assert ours["usage"][name] == theirs["usage"][name]
        speculation = [each["usage"]["speculation"] for each in (ours, theirs)]
        assert speculation[0] == speculation[1]  # the draft's context is that of a cold prompt
    assert cached(warm[0]) == 0
    for answer in warm[1:]:
        assert cached(answer) > answer["usage"]["prompt_tokens"] - 40
    assert cached(again) == again["usage"]["prompt_tokens"] - 1
    assert status["cache"]["hits"] == 3 and status["cache"]["misses"] == 1
    assert status["totals"]["cached_tokens"] == sum(map(cached, [*warm, again]))
    asked = sum(answer["usage"]["prompt_tokens"] for answer in [*warm, again])
    assert status["totals"]["prompt_tokens"] == asked
    assert "dflash_native_cache_hits_total 3.0" in metrics


def test_a_folder_outlives_the_server(cold, tmp_path):
    for expected in (False, True):
        with running.process("--prefix-cache-dir", tmp_path, "--block-size", 8) as server:
            answer = chat(server.url, [{"role": "user", "content": LONG}])
            assert (cached(answer) > 2000) == expected
            assert answer["choices"] == cold[0]["choices"]


def test_a_folder_of_plain_checkpoints_is_not_one_of_drafted_ones(cold, tmp_path):
    """Bug: blocks of one keep no context of the draft, yet their checkpoints had the name of those
    that do. Proof: once a server of --block-size 1 had filled a folder, one with blocks answered
    500 to every request that began like one of then, "[resume] expected this drafter's context".
    """
    for size in (1, 8, 1):
        with running.process("--prefix-cache-dir", tmp_path, "--block-size", size) as server:
            answer = chat(server.url, [{"role": "user", "content": LONG}])
            assert answer["choices"] == cold[0]["choices"]
    assert cached(answer) > 2000


def test_several_choices_read_their_prompt_once(cold):
    with running.process("--block-size", 8) as server:
        answer = chat(server.url, [{"role": "user", "content": LONG}], n=3)
        status = httpx.get(f"{server.url}/status").json()
    assert [choice["message"] for choice in answer["choices"]] == [
        cold[0]["choices"][0]["message"]
    ] * 3
    assert cached(answer) == 0  # of the prompt, which is counted once
    assert status["cache"]["hits"] == 2


def test_a_chat_that_was_left_goes_on_from_there():
    with running.process("--block-size", 8) as server:
        text, body = "", {"prompt": LONG, "max_tokens": 1000, "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body) as response:
            for line in response.iter_lines():
                if line.startswith("data: "):
                    text += running.json.loads(line[6:])["choices"][0]["text"]
                    if len(text) > 100:
                        break
        running.until(lambda: running.idle(server.url))
        body = {"prompt": LONG + text, "max_tokens": 1}
        answer = httpx.post(f"{server.url}/v1/completions", json=body).json()
        # More than the prompt: a part of the answer that nobody read to its end.
        assert cached(answer) >= answer["usage"]["prompt_tokens"] - 60
