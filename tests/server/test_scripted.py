"""Text across tokens and blocks: UTF-8, stop strings, tool calls, reasoning. The text is known."""

from __future__ import annotations

import json

import openai
import pytest

import scripts
from scripts import SCRIPTS

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tomorrow's.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


def asked(script, **more):
    return {
        "model": "scripted",
        "messages": [{"role": "user", "content": scripts.name(script)}],
    } | more


def whole(actor, script, **more):
    return actor.chat.completions.create(**asked(script, **more)).choices[0]


def streamed(actor, script, **more):
    """What a client puts together of a stream, and its chunks."""
    chunks = list(actor.chat.completions.create(**asked(script, stream=True, **more)))
    found = {"content": "", "reasoning": "", "tool_calls": [], "reasons": []}
    for chunk in chunks:
        for choice in chunk.choices:
            found["content"] += choice.delta.content or ""
            found["reasoning"] += getattr(choice.delta, "reasoning_content", None) or ""
            found["tool_calls"] += choice.delta.tool_calls or []
            found["reasons"] += [choice.finish_reason] * (choice.finish_reason is not None)
    return found, chunks


def test_the_script_is_spoken_in_blocks(actor):
    """Without wide blocks the tests of this file would show nothing."""
    answer = actor.chat.completions.create(**asked("plain"))
    assert answer.choices[0].message.content == SCRIPTS["plain"]
    assert answer.choices[0].finish_reason == "stop"
    speculation = answer.usage.speculation
    assert speculation["tokens_per_round"] > 3 and speculation["acceptance"] == 1


def test_characters_across_tokens_and_blocks(actor):
    found, chunks = streamed(actor, "emoji")
    assert found["content"] == SCRIPTS["emoji"] == whole(actor, "emoji").message.content
    assert found["reasons"] == ["stop"]
    parts = [chunk.choices[0].delta.content for chunk in chunks]
    assert len(parts) > 5 and not any("\ufffd" in (part or "") for part in parts)


def test_bytes_of_logprobs_make_up_the_characters(actor):
    """The text of a token that is a part of a character says nothing, its bytes do."""
    choice = whole(actor, "emoji", logprobs=True)
    entries = choice.logprobs.content
    assert any(entry.token == "\ufffd" for entry in entries)  # cut inside of a character
    together = b"".join(bytes(entry.bytes) for entry in entries)
    assert together.decode() == SCRIPTS["emoji"]


@pytest.mark.parametrize("max_tokens", range(1, 24))
def test_a_budget_inside_a_character_ends_with_whole_characters(actor, max_tokens):
    answer = actor.chat.completions.create(**asked("emoji", max_tokens=max_tokens))
    text = answer.choices[0].message.content
    assert answer.usage.completion_tokens == max_tokens
    assert answer.choices[0].finish_reason == "length"
    # What is left of a character at the end is shown as one that is broken, as decode does.
    assert SCRIPTS["emoji"].startswith(text.rstrip("\ufffd"))


@pytest.mark.parametrize(
    "stop", ["STOP", "Nothing", "N", "any <mark>", "all, ", "mark> at all, STOP would be one."]
)
@pytest.mark.parametrize("streaming", [False, True])
def test_stop_strings_across_blocks(actor, stop, streaming):
    expected = SCRIPTS["plain"][: SCRIPTS["plain"].index(stop)]
    stops = ["never", stop, "one!", "alas"]
    if streaming:
        found, chunks = streamed(actor, "plain", stop=stops)
        assert found["content"] == expected and found["reasons"] == ["stop"]
        assert chunks[-1].choices[0].finish_reason == "stop"
    else:
        choice = whole(actor, "plain", stop=stops)
        assert choice.message.content == expected and choice.finish_reason == "stop"


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_first_end_in_a_block_wins(actor, checkpoint, script):
    """The end token at the budget's last place is "stop", one token less "length"; and the text of
    a stop string counts as far as it was needed."""
    pieces = [piece.decode(errors="replace") for piece in checkpoint[1][script]]
    for budget, reason in ((len(pieces), "length"), (len(pieces) + 1, "stop"), (500, "stop")):
        answer = actor.chat.completions.create(**asked(script, max_tokens=budget))
        assert answer.choices[0].finish_reason == reason
        assert answer.choices[0].message.content == SCRIPTS[script]
        assert answer.usage.completion_tokens == min(budget, len(pieces) + 1)
    at = 6
    stop = b"".join(checkpoint[1][script][at : at + 3]).decode(errors="ignore")
    if stop and stop in SCRIPTS[script] and SCRIPTS[script].index(stop) > 3:
        for budget in (at + 3, at + 4, 500):
            answer = actor.chat.completions.create(**asked(script, stop=stop, max_tokens=budget))
            assert answer.choices[0].finish_reason == "stop"
            assert answer.usage.completion_tokens <= at + 3


def test_a_stop_string_that_does_not_come_holds_nothing_back(actor):
    found, _ = streamed(actor, "plain", stop=["one.!", "at allways"])
    assert found["content"] == SCRIPTS["plain"] and found["reasons"] == ["stop"]


def test_a_tool_call(actor):
    choice = whole(actor, "tool", tools=[WEATHER])
    (call,) = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls" and choice.message.content == "See: "
    assert call.function.name == "weather" and call.id.startswith("call_")
    assert json.loads(call.function.arguments) == {"city": "Zürich 😀", "days": 3}


@pytest.mark.parametrize("script", ["tool", "two", "broken", "plain"])
def test_streaming_gives_the_same_calls(actor, script):
    choice = whole(actor, script, tools=[WEATHER])
    found, _ = streamed(actor, script, tools=[WEATHER])
    assert found["reasons"] == [choice.finish_reason]
    assert found["content"] == (choice.message.content or "")
    calls = choice.message.tool_calls or []
    assert [call.index for call in found["tool_calls"]] == list(range(len(calls)))
    assert [call.function for call in found["tool_calls"]] != [] or script in ("broken", "plain")
    for ours, theirs in zip(found["tool_calls"], calls, strict=True):
        assert ours.function.name == theirs.function.name
        assert ours.function.arguments == theirs.function.arguments


def test_two_calls_or_the_first_one_alone(actor):
    both = whole(actor, "two", tools=[WEATHER])
    assert [call.function.name for call in both.message.tool_calls] == ["first", "second"]
    assert both.message.content == " and !"
    one = whole(actor, "two", tools=[WEATHER], parallel_tool_calls=False)
    assert [call.function.name for call in one.message.tool_calls] == ["first"]
    assert one.finish_reason == "tool_calls" and not (one.message.content or "").strip()


def test_what_is_no_call_is_text_and_nothing_is_lost(actor):
    assert whole(actor, "broken", tools=[WEATHER]).message.content == SCRIPTS["broken"]
    for more in ({}, {"tools": [WEATHER], "tool_choice": "none"}):
        choice = whole(actor, "tool", **more)
        assert choice.message.content == SCRIPTS["tool"] and choice.finish_reason == "stop"


@pytest.mark.parametrize("max_tokens", [5, 9, 14, 20])
def test_a_call_that_the_budget_cuts_off(actor, max_tokens):
    for found in (
        whole(actor, "tool", tools=[WEATHER], max_tokens=max_tokens),
        streamed(actor, "tool", tools=[WEATHER], max_tokens=max_tokens)[0],
    ):
        as_stream = isinstance(found, dict)
        content = found["content"] if as_stream else found.message.content
        assert SCRIPTS["tool"].startswith(content.rstrip("\ufffd")) and content
        reason = found["reasons"][0] if as_stream else found.finish_reason
        assert reason == "length"


def test_a_prompt_that_ends_in_think_starts_inside_reasoning(actor):
    thought, said = SCRIPTS["reason"].split("</think>")
    more = {"extra_body": {"chat_template_kwargs": {"reason": True}}}
    message = whole(actor, "plain", **more).message
    assert message.reasoning_content == message.reasoning == thought
    assert message.content == said
    found, _ = streamed(actor, "plain", **more)
    assert found["reasoning"] == thought and found["content"] == said
    # The control: without the open mark the same words are content.
    assert whole(actor, "reason").message.content == SCRIPTS["reason"]


def test_a_conversation_with_a_tool_goes_on(actor):
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "weather", "arguments": '{"a": 1}'},
    }
    messages = [
        {"role": "developer", "content": "Be brief."},
        {
            "role": "user",
            "content": [{"type": "text", "text": "How "}, {"type": "text", "text": "is it?"}],
        },
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "call_1", "content": "rain" + scripts.name("plain")},
    ]
    answer = actor.chat.completions.create(model="scripted", messages=messages, tools=[WEATHER])
    assert answer.choices[0].message.content == SCRIPTS["plain"]
    for arguments in ("no JSON", "[]", "[" * 100_000, '{"a": NaN}'):  # the third was a 500
        call["function"]["arguments"] = arguments
        with pytest.raises(openai.BadRequestError) as refused:
            actor.chat.completions.create(model="scripted", messages=messages)
        assert refused.value.param == "messages.2.tool_calls.0.function.arguments"


def test_what_the_template_does_not_read_is_refused(actor):
    for more in (
        {"reasoning_effort": "low"},
        {"extra_body": {"chat_template_kwargs": {"unknown": 1}}},
        {"extra_body": {"chat_template_kwargs": {"tokenize": False}}},
    ):
        with pytest.raises(openai.BadRequestError, match="template does not read it"):
            whole(actor, "plain", **more)


def test_the_sentence_of_a_template_that_refuses(actor):
    messages = [{"role": "system", "content": "refused"}, {"role": "user", "content": "x"}]
    with pytest.raises(openai.BadRequestError, match="no such system message"):
        actor.chat.completions.create(model="scripted", messages=messages)
