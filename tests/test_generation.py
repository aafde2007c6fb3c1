"""`generate` and `stream_generate`: mlx-lm's shape, and the end of a text at any place
in a block.
"""

from __future__ import annotations

import inspect

import mlx.core as mx
import mlx_lm
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.tokenizer_utils import TokenizerWrapper, load

import dflash_native
from dflash_native import Sampling, demo, load_demo, ops
from dflash_native.generation import REFUSED, generate, stream_generate
from dflash_native.session import Session
from dflash_native.targets import Target, common
from recorder import Recorder, compare_model
from scripted import ScriptedDrafter
from test_targets import make_model

PROMPT = [5, 1200, 77, 3010, 42]


@pytest.fixture(scope="module")
def model():
    mx.set_default_device(mx.cpu)
    return make_model("qwen3_5", vocab_size=8192)


@pytest.fixture(scope="module")
def tokenizer():
    return load(demo.TARGET)


@pytest.fixture(scope="module")
def answer(model, tokenizer):
    """Prompt and 80 tokens of plain decoding; none of them ends the text."""
    session = Session(Target(model))
    session.prefill(PROMPT)
    while len(session.tokens) < len(PROMPT) + 80:
        session.round()
    assert not set(session.tokens[len(PROMPT) :]) & set(tokenizer.eos_token_ids)
    return session.tokens[: len(PROMPT) + 80]


def with_eos(tokenizer, *ids):
    """The tokenizer, with other end tokens."""
    return TokenizerWrapper(tokenizer._tokenizer, eos_token_ids=list(ids))


def compare_end(session, recorder, monkeypatch):
    """C3 after a generation: recurrence, tape and conv to the bit, the rest within rounding."""
    recorder.compare(session)
    monkeypatch.setattr(common, "ops", ops)
    compare_model(session)


def test_looking_at_the_cache_while_streaming_changes_nothing(model, tokenizer, answer):
    session = Session(Target(model), ScriptedDrafter(answer, spoil=0.1))
    tokens = []
    for response in stream_generate(model, tokenizer, PROMPT, 40, session=session):
        tokens.append(response.token)
        assert session.cache.lengths == [len(session.tokens) - 1]
        if len(tokens) == 20:
            break
    assert tokens == answer[5:25]
    del response


def first_seen(answer, at):
    """The first index from `at` on whose token did not come before."""
    new = answer[len(PROMPT) :]
    return next(i for i in range(at, len(new)) if new[i] not in new[:i])


def test_the_same_tokens_and_fields_as_mlx_lm(model, tokenizer):
    theirs = list(mlx_lm.stream_generate(model, tokenizer, PROMPT, max_tokens=24))
    ours = list(stream_generate(model, tokenizer, PROMPT, max_tokens=24))
    assert [r.token for r in ours] == [r.token for r in theirs]
    assert "".join(r.text for r in ours) == "".join(r.text for r in theirs)
    assert [r.finish_reason for r in ours] == [r.finish_reason for r in theirs]
    fields = set(vars(theirs[0]))
    assert fields <= set(vars(ours[0]))
    for a, b in zip(ours, theirs, strict=True):
        assert (a.generation_tokens, a.prompt_tokens) == (b.generation_tokens, b.prompt_tokens)
        assert mx.abs(a.logprobs - b.logprobs.astype(mx.float32)).max() < 1e-3
        assert mx.argmax(a.logprobs).item() == a.token
    theirs = inspect.signature(mlx_lm.stream_generate).parameters
    assert list(inspect.signature(stream_generate).parameters)[:4] == list(theirs)[:4]


def test_speculation_marks_what_came_from_the_draft(model, tokenizer, answer):
    drafter = ScriptedDrafter(answer, spoil=0.25, seed=4)
    responses = list(stream_generate(model, tokenizer, PROMPT, 60, drafter, block_size=16))
    assert [r.token for r in responses] == answer[5:65]
    stats = responses[-1].stats
    assert responses[-1].round == stats.rounds > 4 and stats.tokens == 60
    for r in responses:
        assert r.from_draft == (r.position < r.accepted) and r.accepted <= r.drafted <= 15
    assert 0 < sum(r.from_draft for r in responses) < 60
    assert responses[-1].finish_reason == "length"


@pytest.mark.parametrize("budget", range(1, 20))
def test_the_budget_is_met_exactly(model, tokenizer, answer, budget, monkeypatch):
    for drafter in (None, ScriptedDrafter(answer, spoil=0.1, seed=budget)):
        session = Session(Target(model), drafter)
        recorder = Recorder(monkeypatch, session)
        responses = list(stream_generate(model, tokenizer, PROMPT, budget, session=session))
        compare_end(session, recorder, monkeypatch)
        assert [r.token for r in responses] == answer[5 : 5 + budget]
        assert [r.finish_reason for r in responses] == [None] * (budget - 1) + ["length"]


@pytest.mark.parametrize("place", range(0, 34, 3))
def test_an_end_token_at_any_place_in_a_block(model, tokenizer, answer, place, monkeypatch):
    """It is the last token and pending, has no text, and everything ends just before it (C3)."""
    place = first_seen(answer, place)
    eos = with_eos(tokenizer, answer[5 + place])
    for drafter in (None, ScriptedDrafter(answer, spoil=0.05, seed=place)):
        session = Session(Target(model), drafter)
        recorder = Recorder(monkeypatch, session)
        responses = list(stream_generate(model, eos, PROMPT, 60, session=session))
        assert [r.token for r in responses] == answer[5 : 6 + place]
        assert responses[-1].finish_reason == "stop"
        assert session.tokens == answer[: 6 + place]
        compare_end(session, recorder, monkeypatch)


def test_every_end_token_that_the_tokenizer_knows_counts(model, tokenizer, answer):
    early, late = first_seen(answer, 4), first_seen(answer, 9)
    eos = with_eos(tokenizer, answer[5 + late], answer[5 + early])
    drafter = ScriptedDrafter(answer, spoil=0.0)
    assert len(list(stream_generate(model, eos, PROMPT, 60, drafter))) == early + 1


def test_a_stop_string_across_tokens_and_blocks(model, tokenizer, answer, monkeypatch):
    whole = generate(model, tokenizer, PROMPT, max_tokens=60)
    for at in (3, 14, 40):
        stop = whole[at : at + 9]
        shown = whole[: whole.find(stop)]
        for drafter in (None, ScriptedDrafter(answer, spoil=0.1, seed=at)):
            session = Session(Target(model), drafter)
            recorder = Recorder(monkeypatch, session)
            responses = list(
                stream_generate(model, tokenizer, PROMPT, 60, session=session, stop=stop)
            )
            assert "".join(r.text for r in responses) == shown
            assert responses[-1].finish_reason == "stop"
            assert session.tokens == answer[: 5 + len(responses)]
            compare_end(session, recorder, monkeypatch)


@pytest.mark.parametrize("count", [1, 2, 7, 16, 17, 18])
def test_a_consumer_that_leaves_gets_what_it_was_given(
    model, tokenizer, answer, count, monkeypatch
):
    """close(), and an exception in the consumer: the session ends at the last delivered token."""
    for drafter in (None, ScriptedDrafter(answer, spoil=0.02, seed=count)):
        for thrown in (None, RuntimeError("consumer")):
            session = Session(Target(model), drafter)
            recorder = Recorder(monkeypatch, session)
            stream = stream_generate(model, tokenizer, PROMPT, 60, session=session)
            taken = [next(stream).token for _ in range(count)]
            if thrown is None:
                stream.close()
            else:
                with pytest.raises(RuntimeError, match="consumer"):
                    stream.throw(thrown)
            assert taken == answer[5 : 5 + count]
            assert session.tokens == answer[: 5 + count]
            compare_end(session, recorder, monkeypatch)
            assert session.round().tokens[0] == answer[5 + count]  # and it goes on from there


def test_a_conversation_goes_on_in_its_session(model, tokenizer, answer):
    drafter = ScriptedDrafter(answer, spoil=0.1)
    session = Session(Target(model), drafter)
    list(stream_generate(model, tokenizer, PROMPT, 10, session=session))
    turn = [9, 8, 7]
    second = [r.token for r in stream_generate(model, tokenizer, turn, 10, session=session)]
    fresh = answer[:15] + turn
    expected = [r.token for r in stream_generate(model, tokenizer, fresh, 10)]
    assert second == expected
    assert second != [r.token for r in stream_generate(model, tokenizer, turn, 10)]  # the control
    session.close()


def test_a_session_of_its_own_is_closed(model, tokenizer, monkeypatch):
    closed = []
    close = Session.close
    monkeypatch.setattr(Session, "close", lambda self: (closed.append(self), close(self))[1])
    list(stream_generate(model, tokenizer, PROMPT, 3))
    stream = stream_generate(model, tokenizer, PROMPT, 3)
    next(stream)
    stream.close()
    assert len(closed) == 2 and all(s.cache.lengths == [len(s.tokens) - 1] for s in closed)


def test_multibyte_text_is_whole(model, tokenizer):
    """Tokens of one emoji come one by one, also inside a block; no broken character is shown."""
    text = "héllo 🙂 日本"
    ids = tokenizer.encode(text)
    monkey = Session(Target(model), ScriptedDrafter(PROMPT + ids * 4, spoil=0.0))
    script = iter(ids)

    class Fixed:
        stats, target = monkey.stats, monkey.target

        def prefill(self, tokens, progress=None):
            pass

        def round(self, limit=None):
            token = next(script)
            logits = mx.zeros((1, 8192))
            return dflash_native.session.Round([token], [], 0, logits)

        def rewind(self, count):
            pass

    shown = [r.text for r in stream_generate(model, tokenizer, PROMPT, len(ids), session=Fixed())]
    assert "".join(shown) == text and not any("�" in piece for piece in shown)


def test_prompts_as_text_ids_and_arrays(model, tokenizer):
    text = "def main():\n"
    ids = tokenizer.encode(text)
    first = generate(model, tokenizer, text, max_tokens=6)
    assert first == generate(model, tokenizer, ids, max_tokens=6)
    assert first == generate(model, tokenizer, mx.array(ids), max_tokens=6)


def test_mlx_lms_arguments_work_or_are_refused_by_name(model, tokenizer, answer):
    drafter = ScriptedDrafter(answer, spoil=0.0)
    calls = []
    tokens = [
        r.token
        for r in stream_generate(
            model,
            tokenizer,
            PROMPT,
            6,
            draft_model=drafter,
            num_draft_tokens=2,
            prefill_step_size=2,
            prompt_progress_callback=lambda *done: calls.append(done),
        )
    ]
    assert tokens == answer[5:11] and calls == [(0, 4), (2, 4), (4, 4)]
    parameters = inspect.signature(generate_step).parameters
    known = set(parameters)
    for name in known - {"prompt", "model"} - set(inspect.signature(stream_generate).parameters):
        assert name in REFUSED, name
        with pytest.raises(ValueError, match=rf"\[generate\] {name} is not supported: "):
            stream_generate(model, tokenizer, PROMPT, 6, **{name: 4})
        default, _ = REFUSED[name]
        assert default is None or default == parameters[name].default
        stream_generate(model, tokenizer, PROMPT, 6, **{name: default}).close()
    with pytest.raises(TypeError, match="unexpected keyword argument 'temperatur'"):
        stream_generate(model, tokenizer, PROMPT, temperatur=1)


def test_a_draft_model_is_a_model_as_in_mlx_lm(model, tokenizer, answer):
    options = {"draft_model": model, "num_draft_tokens": 2, "max_tokens": 9}
    *_, last = responses = list(stream_generate(model, tokenizer, PROMPT, **options))
    assert [r.token for r in responses] == answer[5:14]
    assert last.stats.rounds == 3 and last.stats.accepted == 6  # it is right about itself
    other = make_model("qwen3", seed=4, vocab_size=Target(model).vocab_size)
    options["draft_model"] = other
    *_, last = responses = list(stream_generate(model, tokenizer, PROMPT, **options))
    assert [r.token for r in responses] == answer[5:14]
    assert last.stats.drafted > last.stats.accepted


def test_verbose_prints_text_and_rates(model, tokenizer, answer, capsys):
    text = generate(
        model, tokenizer, PROMPT, verbose=True, max_tokens=8, drafter=ScriptedDrafter(answer)
    )
    printed = capsys.readouterr().out
    assert (
        printed.startswith(text) and "tokens a round" in printed and "Prompt: 5 tokens" in printed
    )


def test_the_response_says_whether_decoding_was_exact(model, tokenizer):
    exact = Target(model, prefill="exact")
    for given, options, expected in (
        (model, {}, True),
        (model, {"exact": False}, False),
        (model, {"prefill": "exact"}, True),
        (exact, {}, True),
        (exact, {"exact": True, "prefill": "exact"}, True),
        (Target(model, exact=False), {}, False),
    ):
        [response] = stream_generate(given, tokenizer, PROMPT, 1, **options)
        assert response.exact == expected
    for given, options, named in (
        (exact, {"exact": False}, "exact=True but got exact=False"),
        (exact, {"prefill": "fast"}, "prefill='exact' but got prefill='fast'"),
        (model, {"session": Session(exact), "exact": False}, "exact=True but got exact=False"),
    ):
        with pytest.raises(ValueError, match=f"expected the target's own {named}"):
            stream_generate(given, tokenizer, PROMPT, 1, **options)
    with pytest.raises(ValueError, match="expected exact=True with prefill='exact'"):
        stream_generate(model, tokenizer, PROMPT, 1, exact=False, prefill="exact")


def test_sampling_and_processors_are_those_of_the_call():
    model, tokenizer, drafter = load_demo(mx.float32)
    target = Target(model)

    def tokens(**options):
        found = stream_generate(target, tokenizer, PROMPT, 24, drafter, block_size=6, **options)
        return [(response.token, response) for response in found]

    drawn = Sampling(temperature=0.9, seed=3)
    first, second = tokens(sampling=drawn), tokens(sampling=drawn)
    assert [token for token, _ in first] == [token for token, _ in second]
    assert [token for token, _ in first] != [token for token, _ in tokens()]
    plain = stream_generate(target, tokenizer, PROMPT, 24, sampling=drawn)
    assert [response.token for response in plain] == [token for token, _ in first]
    for token, response in first:
        logprobs = response.logprobs
        assert abs(mx.exp(logprobs).sum().item() - 1) < 1e-4
        best = response.top_logprobs(3)
        assert [p for _, p in best] == sorted((p for _, p in best), reverse=True)
        assert best[0][0] == mx.argmax(logprobs).item()
        assert (
            abs(dict(response.top_logprobs(logprobs.size))[token] - logprobs[token].item()) < 1e-6
        )
    for count, message in (
        (8193, "in 0 … 8192 but got 8193"),
        (1.5, r"to be an integer but got 1\.5"),
    ):
        with pytest.raises((ValueError, TypeError), match=rf"^\[top_logprobs\] .* count {message}"):
            response.top_logprobs(count)

    def only_seven(_, logits):
        return mx.where(mx.arange(logits.shape[1]) == 7, logits, -1e9)

    assert {token for token, _ in tokens(logits_processors=[only_seven])} == {7}
    assert {token for token, _ in tokens(sampling=drawn, logits_processors=[only_seven])} == {7}
    with pytest.raises(ValueError, match=r"sampler is not supported: .* pass sampling=Sampling"):
        tokens(sampler=lambda logprobs: logprobs)


def test_a_session_keeps_its_sampling_unless_another_is_given():
    model, tokenizer, _ = load_demo(mx.float32)
    target, drawn = Target(model), Sampling(temperature=0.9, seed=3)
    expected = [r.token for r in stream_generate(target, tokenizer, PROMPT, 9, sampling=drawn)]
    with Session(target, sampling=drawn) as session:
        got = stream_generate(target, tokenizer, PROMPT, 9, session=session)
        assert [r.token for r in got] == expected
        calls = []
        for turn in range(1, 4):  # before, a turn's processors stayed for the next ones
            noted = lambda _, logits: calls.append(1) or logits  # noqa: E731
            options = {"session": session, "logits_processors": [noted]}
            list(stream_generate(target, tokenizer, PROMPT, 4, **options))
            assert session.sampling is drawn and len(calls) <= 5 * turn
        list(stream_generate(target, tokenizer, PROMPT, 4, session=session))
        assert len(calls) <= 15
        other = Sampling(temperature=0.9, seed=4)
        list(stream_generate(target, tokenizer, PROMPT, 9, session=session, sampling=other))
        assert session.sampling is other
