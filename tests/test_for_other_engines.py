"""The examples of docs/embedding.md for other engines do what it says, run as they stand there."""

from __future__ import annotations

import queue
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

from dflash_native import Session, Target, load_demo
from readme import block

PROMPT = "def read_lines(path):\n    with open("


@pytest.fixture(scope="module")
def demo_pair():
    return load_demo()


@pytest.fixture(scope="module")
def plain(demo_pair):
    """64 tokens of plain decoding after the prompt; none ends the text."""
    model, tokenizer, _ = demo_pair
    ids = tokenizer.encode(PROMPT)
    session = Session(Target(model))
    session.prefill(ids)
    while len(session.tokens) < len(ids) + 64:
        session.round()
    assert not set(session.tokens[len(ids) :]) & set(tokenizer.eos_token_ids)
    return session.tokens[len(ids) :]


@pytest.fixture(scope="module")
def guide():
    """The names of "Embed it" after it has run, and what it has printed."""
    printed = []
    names = {"print": lambda text, **options: printed.append(text)}
    before = set(threading.enumerate())
    exec(block("Embed it"), names)
    for thread in set(threading.enumerate()) - before:
        thread.join()
    return SimpleNamespace(**names), "".join(printed)


def test_the_guide_ends_in_peace(demo_pair, plain):
    """Without `mx.clear_streams` MLX 0.32.4 aborted in 10 of 10 runs when the process ended."""
    program = [sys.executable, "-c", block("Embed it")]
    done = subprocess.run(program, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == demo_pair[1].decode(plain)


class Reply(queue.Queue):
    """Asks for the end of its turn after so many pieces."""

    def __init__(self, pieces=10**9):
        super().__init__()
        self.cancelled, self.left = threading.Event(), pieces

    def put(self, piece):
        super().put(piece)
        self.left -= 1
        if self.left <= 0:
            self.cancelled.set()

    def text(self):
        return "".join(self.queue)


def test_the_guide_is_short_and_prints_what_plain_decoding_gives(guide, demo_pair, plain):
    assert len([line for line in block("Embed it").splitlines() if line.strip()]) <= 40
    assert guide[1] == demo_pair[1].decode(plain)


@pytest.mark.parametrize("pieces", [1, 2, 11, 30])
def test_a_cancelled_turn_ends_after_its_round_at_what_was_delivered(
    guide, demo_pair, plain, pieces
):
    model, tokenizer, drafter = demo_pair
    reply, ids = Reply(pieces), tokenizer.encode(PROMPT)
    session = Session(Target(model), drafter)
    guide[0].answer(session, tokenizer, PROMPT, reply.cancelled, reply)
    new = session.tokens[len(ids) :]
    assert new == plain[: len(new)] and pieces <= len(new) < pieces + session.block_size
    assert reply.text() == tokenizer.decode(new)
    assert session.cache.lengths == [len(session.tokens) - 1]


def test_an_end_token_inside_a_block_and_the_next_turn(guide, demo_pair, plain):
    """The second turn is that of a session that has read the same tokens at once."""
    model, tokenizer, drafter = demo_pair
    target = Target(model, prefill="exact")
    at = next(i for i in range(20, 64) if plain[i] not in plain[:i])
    ending = SimpleNamespace(
        encode=tokenizer.encode, detokenizer=tokenizer.detokenizer, eos_token_ids={plain[at]}
    )
    session, reply = Session(target, drafter), Reply()
    guide[0].answer(session, ending, PROMPT, reply.cancelled, reply)
    seen = tokenizer.encode(PROMPT) + plain[: at + 1]
    assert session.tokens == seen and reply.text() == tokenizer.decode(plain[:at])

    again = Reply()
    guide[0].answer(session, tokenizer, "\n\ndef merge(", again.cancelled, again)
    other = Session(target)
    other.prefill(seen + tokenizer.encode("\n\ndef merge("))
    while len(other.tokens) < len(session.tokens):
        other.round()
    assert session.tokens == other.tokens


def test_a_failing_chat_ends_alone(guide):
    requests, replies = queue.Queue(), [Reply() for _ in range(3)]
    for (chat, prompt), reply in zip([("a", PROMPT), ("b", ""), ("a", "x")], replies, strict=True):
        requests.put((chat, prompt, reply.cancelled, reply))
    requests.put(None)
    worker = threading.Thread(target=guide[0].serve, args=[requests])
    worker.start()
    worker.join()
    first, failed, second = (list(reply.queue) for reply in replies)
    assert first[-1] is failed[-1] is second[-1] is None
    assert "".join(first[:-1]) == guide[1] and len(second) > 2
    assert failed == ["[[prefill] expected at least one token but got an empty prompt.]", None]


def test_the_example_for_mlx_lm(capsys, demo_pair, plain):
    names = {}
    exec(block("In mlx-lm"), names)
    assert capsys.readouterr().out == demo_pair[1].decode(plain)
    assert names["response"].generation_tokens == 64
