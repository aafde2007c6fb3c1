"""Session.checkpoint and restore: warm equals cold, for every drafter, in every bit."""

from __future__ import annotations

import random

import mlx.core as mx
import pytest

from chats import contents, demo_drafters, rounds_of
from dflash_native.checkpoint import Checkpoint
from dflash_native.drafters import AutoregressiveDrafter, Resumable
from dflash_native.sampling import Sampling
from dflash_native.session import Session
from dflash_native.targets import Target
from drafter_oracle import MIXED, SLIDES, drafter_of, raw_config
from inputs import same
from recorder import compare_model
from scripted import ScriptedDrafter
from test_autoregressive import stock_model
from test_exact import same_caches
from test_session import COSTS, DFLASH2, plain, prompt_of
from test_targets import make_model

SAMPLED = Sampling(temperature=0.8, top_p=0.95, repetition_penalty=1.1, seed=6)


@pytest.fixture(scope="module")
def demo():
    return demo_drafters()


def second_turn(make, prompt, new, rounds=12, rewind=False):
    """A chat's second turn by three sessions: cold, warm from a checkpoint, and the one that goes
    on, with the checkpoint.
    """
    session = make()
    session.prefill(prompt)
    for _ in range(8):
        result = session.round()
    if rewind:
        while len(result.tokens) < 3:
            result = session.round()
        session.rewind(2)
    tokens = list(session.tokens)
    checkpoint = session.checkpoint()
    assert checkpoint.tokens == tuple(tokens[:-1])
    cold, warm = make(), make()
    cold.prefill(tokens + new)
    warm.restore(checkpoint)
    assert warm.tokens == tokens[:-1] and warm.pending is None
    warm.prefill(tokens[-1:] + new)
    session.prefill(new)
    for each in (cold, warm, session):
        assert each.tokens == tokens + new and each.pending == new[-1]
        each.flush()
    assert same_caches(cold, warm)
    return [rounds_of(each, rounds) for each in (cold, warm, session)], checkpoint


@pytest.mark.parametrize("sampling", [None, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    "name",
    [
        "plain",
        "dflash",
        "dflash2",
        "lookup",
        "autoregressive",
        "lookup+dflash",
        "lookup+autoregressive",
    ],
)
def test_warm_equals_cold_with_every_drafter(demo, name, sampling):
    """Tokens, logits in every bit, and what is drafted and accepted in each round."""
    target, drafters, prompt, new = demo
    drafter = drafters[name]

    def make():
        return Session(target, drafter, sampling=sampling)

    (cold, warm, on), checkpoint = second_turn(make, prompt, new, rewind=name == "dflash")
    assert warm == cold
    tokens = [[token for each in run for token in each[0]] for run in (cold, on)]
    least = min(map(len, tokens))
    assert tokens[0][:least] == tokens[1][:least]
    if drafter is not None:
        assert sum(each[2] for each in cold) > 0
    has_context = any(name.startswith("draft.") for name in checkpoint.arrays)
    assert has_context == (name not in ("plain", "lookup"))
    other = make()  # the control: one token of the prefix is another
    other.prefill([prompt[0] ^ 1, *checkpoint.tokens[1:]])
    arrays = other.checkpoint().arrays
    wrong = make()
    wrong.restore(Checkpoint(checkpoint.tokens[: len(other.tokens) - 1], arrays))
    right = make()
    right.prefill(wrong.tokens)
    for each in (wrong, right):
        each.prefill(new)
    assert rounds_of(wrong, 6) != rounds_of(right, 6)


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_wide_keys", "qwen3_next", "qwen3", "llama"])
@pytest.mark.parametrize("kind", ["plain", "scripted", "auto"])
def test_warm_equals_cold_on_every_family(name, kind):
    """With a drafter that has no `resume`, too, and in rounds of a chosen width."""
    mx.set_default_device(mx.cpu)
    target = Target(make_model(name), prefill="exact")
    prompt, new = prompt_of(13), prompt_of(9, seed=4)
    answer = plain(target, prompt, 60)
    drafter = None if kind == "plain" else ScriptedDrafter(answer, spoil=0.2, max_drafts=3)
    size = "auto" if kind == "auto" else None
    assert drafter is None or not isinstance(drafter.begin(target), Resumable)

    def make():
        return Session(target, drafter, block_size=size, costs=COSTS, prefill_step_size=5)

    (cold, warm, _), checkpoint = second_turn(make, prompt, new, rewind=kind == "scripted")
    assert warm == cold
    recurrent = any(name.endswith(".state") for name in checkpoint.arrays)
    assert recurrent == (name in ("qwen3_5", "qwen3_5_wide_keys", "qwen3_next"))


@pytest.mark.parametrize(
    "raw",
    [raw_config(), DFLASH2, raw_config(**MIXED), raw_config(**SLIDES)],
    ids=["full", "dflash2", "mixed", "sliding"],
)
@pytest.mark.parametrize("rest", [1, 4, 30])
def test_the_context_of_every_kind_of_draft(raw, rest):
    """Windows shorter than the prefix, than the rest of the prompt, and none."""
    mx.set_default_device(mx.cpu)
    sizes = {"hidden_size": raw["hidden_size"], "vocab_size": raw["vocab_size"]}
    target, drafter = Target(make_model("qwen3_5", **sizes), prefill="exact"), drafter_of(raw)

    def make():
        return Session(target, drafter, prefill_step_size=8)

    prompt = [token % raw["vocab_size"] for token in prompt_of(41)]
    (cold, warm, on), _ = second_turn(make, prompt, prompt[:rest], rounds=4)
    assert warm == cold == on
    assert len({tuple(each[1]) for each in cold}) > 1  # the drafts depend on something


def test_a_stock_model_as_the_draft_and_two_restores_of_one_checkpoint():
    mx.set_default_device(mx.cpu)
    target = Target(make_model("qwen3_5", tie_word_embeddings=False), prefill="exact")
    drafter = AutoregressiveDrafter(stock_model(), 4)
    session = Session(target, drafter)
    session.prefill(prompt_of(90))
    checkpoint = session.checkpoint()
    assert any(name.startswith("draft.") for name in checkpoint.arrays)
    before = contents(checkpoint)
    runs = []
    for _ in range(3):
        warm = Session(target, drafter)
        warm.restore(checkpoint)
        warm.prefill(prompt_of(90)[-1:])
        reads = noted(warm._draft._reader)
        runs.append(rounds_of(warm, 10))
        assert 0 < max(reads) < 10  # the prompt is not read again
    assert runs[0] == runs[1] == runs[2] == rounds_of(session, 10)
    assert contents(checkpoint) == before


def noted(reader):
    """The lengths of what it reads from now on."""
    lengths, read = [], reader.read
    reader.read = lambda tokens: lengths.append(tokens.shape[1]) or read(tokens)
    return lengths


@pytest.mark.parametrize("name", ["plain", "dflash", "lookup+autoregressive"])
@pytest.mark.parametrize("length", [5, 255, 256, 257])
def test_nothing_that_follows_changes_a_checkpoint(demo, name, length):
    """Its arrays are its own: buffers that rounds write in place, and those of a restored session.

    Lengths at which a slice of a buffer is all of it, or nearly.
    """
    target, drafters, prompt, _ = demo
    session = Session(target, drafters[name])
    session.prefill((prompt * 4)[: length + 1])
    checkpoint = session.checkpoint()
    before = contents(checkpoint)
    warm = Session(target, drafters[name])
    warm.restore(checkpoint)
    warm.prefill(prompt[:3])
    for each in (session, warm):
        for _ in range(8):
            each.round()
        each.flush()
    assert contents(checkpoint) == before
    assert contents(session.checkpoint()) != before  # the control


@pytest.mark.parametrize("length", [5, 250, 255, 256, 257])
def test_a_single_head_whose_rows_are_contiguous_in_the_buffer(length):
    """MLX then shares the buffer, into which rounds go on to write in place."""
    mx.set_default_device(mx.cpu)
    target = Target(make_model("qwen3", num_key_value_heads=1, max_position_embeddings=1024))
    answer = plain(target, prompt_of(length + 1), 60)
    session = Session(target, ScriptedDrafter(answer, spoil=0.3, max_drafts=5))
    session.prefill(prompt_of(length + 1))
    held = []
    for _ in range(6):
        checkpoint = session.checkpoint()
        held.append((checkpoint, contents(checkpoint)))
        for _ in range(2):
            result = session.round()
        session.rewind(max(1, len(result.tokens) - 1))
    warm = Session(target)
    warm.restore(held[2][0])
    warm.prefill([3])
    for _ in range(9):
        warm.round()
    assert all(contents(checkpoint) == before for checkpoint, before in held)
    assert len({len(checkpoint.tokens) for checkpoint, _ in held}) == 6  # the control: it went on


def test_a_checkpoint_holds_its_rows_and_not_the_buffers(demo):
    target, drafters, prompt, _ = demo
    session = Session(target, drafters["dflash"])
    session.prefill(prompt * 2)
    session.round()  # which packs weights
    session.cache.reserve(20_000)
    mx.eval(session.cache.arrays())
    buffers, before, held = session.cache.nbytes, mx.get_active_memory(), []
    for _ in range(8):
        session.round()
        held.append(session.checkpoint())
    grown = mx.get_active_memory() - before
    kept = sum(checkpoint.nbytes for checkpoint in held)
    spare = 16384 * sum(len(checkpoint.arrays) for checkpoint in held)
    assert grown < kept + spare  # MLX shares a buffer that is at most 16 KB larger than its array
    assert kept + spare < buffers  # the control: one slice alone would keep more alive
    assert all(
        array.shape[2] == len(checkpoint.tokens)
        for checkpoint in held
        for name, array in checkpoint.arrays.items()
        if name.startswith("cache.") and name.endswith((".keys", ".values"))
    )


def test_a_session_goes_on_as_if_no_checkpoint_had_been_taken(demo):
    target, drafters, prompt, _ = demo
    for name in ("plain", "dflash", "autoregressive", "lookup+dflash"):
        one, other = (Session(target, drafters[name]) for _ in range(2))
        for each in (one, other):
            each.prefill(prompt)
        for _ in range(10):
            one.checkpoint()
            assert rounds_of(one, 1) == rounds_of(other, 1), name
        assert one.stats.tokens == other.stats.tokens


def test_a_checkpoint_of_a_restored_session_is_the_same_one(demo):
    target, drafters, prompt, _ = demo
    for name in ("plain", "dflash", "lookup+autoregressive"):
        session = Session(target, drafters[name])
        session.prefill(prompt)
        checkpoint = session.checkpoint()
        warm = Session(target, drafters[name])
        warm.restore(checkpoint)
        again = warm.checkpoint()
        assert again.tokens == checkpoint.tokens and contents(again) == contents(checkpoint)


def test_the_checkpoint_after_a_rewind_ends_where_the_tokens_do(demo):
    target, drafters, prompt, _ = demo
    session = Session(target, drafters["dflash"])
    session.prefill(prompt)
    while len(session.round().tokens) < 4:
        pass
    before = session.tokens
    session.rewind(2)
    checkpoint = session.checkpoint()
    assert list(checkpoint.tokens) == session.tokens[:-1] != before[:-1]
    with pytest.raises(ValueError, match="rewind"):
        session.rewind(1)
    compare_model(session)


def test_random_chats(demo):
    """Turns of random lengths, rounds and rewinds, each from the last one's checkpoint."""
    target, drafters, prompt, _ = demo
    source = random.Random(2)
    for name in ("dflash", "autoregressive", "lookup+dflash"):
        drafter, checkpoint, tokens = drafters[name], None, []
        for _ in range(6):
            start = source.randrange(len(prompt) - 1)
            new = prompt[start : source.randint(start + 1, len(prompt))]
            warm, cold = Session(target, drafter), Session(target, drafter)
            if checkpoint is not None:
                warm.restore(checkpoint)
            tokens = tokens + new
            warm.prefill(tokens[len(warm.tokens) :])
            cold.prefill(tokens)
            for _ in range(source.randint(1, 6)):
                limit = source.choice([None, None, 1, 3])
                one, other = warm.round(limit), cold.round(limit)
                assert (one.tokens, one.drafts) == (other.tokens, other.drafts)
                assert same(one.logits, other.logits)
            if source.random() < 0.5:
                warm.rewind(source.randint(1, len(one.tokens)))
            tokens, checkpoint = list(warm.tokens), warm.checkpoint()
