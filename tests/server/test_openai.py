"""The demo pair's server and the `openai` client: what every parameter does."""

from __future__ import annotations

import math
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

import running
from dflash_native import demo

PROMPT = demo.prompts()[2].text
CHAT = {"model": "dflash-native-demo", "messages": [{"role": "user", "content": PROMPT}]}
TEXT = {"model": "dflash-native-demo", "prompt": PROMPT}


@pytest.fixture(scope="module")
def text(client):
    """48 greedy tokens after the prompt."""
    return client.completions.create(**TEXT, max_tokens=48).choices[0].text


def test_models(client, url):
    assert [model.id for model in client.models.list()] == ["dflash-native-demo"]
    assert client.models.retrieve("dflash-native-demo").owned_by == "dflash-native"
    with pytest.raises(openai.NotFoundError) as missing:
        client.models.retrieve("org/other")
    assert missing.value.code == "model_not_found"


def test_chat_is_the_continuation_where_there_is_no_template(client, text):
    answer = client.chat.completions.create(**CHAT, max_tokens=48)
    choice = answer.choices[0]
    assert choice.message.role == "assistant" and choice.finish_reason == "length"
    assert choice.message.content == text.removeprefix(" ") or choice.message.content == text
    turns = [*CHAT["messages"], {"role": "assistant", "content": text}, CHAT["messages"][0]]
    again = client.chat.completions.create(model=CHAT["model"], messages=turns, max_tokens=1)
    joined = client.completions.create(
        model=CHAT["model"], prompt=f"{PROMPT}{text}\n\n{PROMPT}", max_tokens=1
    )
    assert again.usage.prompt_tokens == joined.usage.prompt_tokens


@pytest.mark.parametrize("include_usage", [False, True])
def test_a_stream_says_the_same(client, include_usage):
    whole = client.chat.completions.create(**CHAT, max_tokens=40)
    options = {"stream_options": {"include_usage": True}} if include_usage else {}
    stream = client.chat.completions.create(**CHAT, max_tokens=40, stream=True, **options)
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    spoken = [chunk for chunk in chunks if chunk.choices]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in spoken)
    assert text == whole.choices[0].message.content
    reasons = [chunk.choices[0].finish_reason for chunk in spoken]
    assert reasons[-1] == "length" and set(reasons[:-1]) == {None}
    assert len({chunk.id for chunk in chunks}) == 1
    usages = [chunk.usage for chunk in chunks]
    assert set(usages[:-1]) == {None}
    if include_usage:
        assert chunks[-1].choices == [] and usages[-1].completion_tokens == 40
        assert usages[-1].prompt_tokens == whole.usage.prompt_tokens
    else:
        assert usages[-1] is None


def test_the_end_of_a_stream_stands_there_once(url):
    for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)):
        events = running.stream(url, path, {**body, "max_tokens": 9, "n": 2})
        assert events.count("[DONE]") == 1 and events[-1] == "[DONE]"
        reasons = [
            (choice["index"], choice["finish_reason"])
            for event in events[:-1]
            for choice in event["choices"]
            if choice["finish_reason"]
        ]
        assert reasons == [(0, "length"), (1, "length")]


@pytest.mark.parametrize("streaming", [False, True])
def test_usage_is_what_was_delivered(client, streaming):
    """For budgets below, at and above the block of 8; a log probability stands for each token."""
    for budget in range(1, 21):
        asked = {**TEXT, "max_tokens": budget, "logprobs": 0}
        if streaming:
            more = {"stream": True, "stream_options": {"include_usage": True}}
            chunks = list(client.completions.create(**asked, **more))
            usage = chunks[-1].usage
            tokens = [
                token
                for chunk in chunks[:-1]
                for token in (chunk.choices[0].logprobs or chunk.choices[0]).tokens
            ]
        else:
            answer = client.completions.create(**asked)
            usage, tokens = answer.usage, answer.choices[0].logprobs.tokens
        assert usage.completion_tokens == budget == len(tokens)
        assert usage.total_tokens == usage.prompt_tokens + budget
        speculation = usage.speculation
        assert speculation["rounds"] <= budget
        assert speculation["accepted"] <= speculation["drafted"]
        assert sum(speculation["accepted_at"]) == speculation["accepted"]


def test_speculation_is_in_the_usage(client):
    usage = client.completions.create(**TEXT, max_tokens=64).usage
    assert usage.speculation["tokens_per_round"] > 1.5 and usage.speculation["exact"] is True


def test_log_probabilities(client, text):
    chat = client.chat.completions.create(**CHAT, max_tokens=12, logprobs=True, top_logprobs=4)
    entries = chat.choices[0].logprobs.content
    old = client.completions.create(**TEXT, max_tokens=12, logprobs=4).choices[0].logprobs
    assert "".join(old.tokens) == text[: len("".join(old.tokens))]
    assert [entry.logprob for entry in entries] == pytest.approx(old.token_logprobs)
    for entry, at in zip(entries, range(12), strict=True):
        best = [top.logprob for top in entry.top_logprobs]
        assert len(best) == 4 and best == sorted(best, reverse=True)
        assert entry.top_logprobs[0].token == entry.token  # greedy
        assert entry.logprob == best[0] and sum(map(math.exp, best)) <= 1
        assert bytes(entry.bytes).decode() == entry.token
        assert old.text_offset[at] == len("".join(old.tokens[:at]))
    none = client.chat.completions.create(**CHAT, max_tokens=3, logprobs=True)
    assert [entry.top_logprobs for entry in none.choices[0].logprobs.content] == [[]] * 3
    assert client.chat.completions.create(**CHAT, max_tokens=3).choices[0].logprobs is None


def texts(client, count=5, **more):
    answers = [client.completions.create(**TEXT, max_tokens=24, **more) for _ in range(count)]
    return {answer.choices[0].text for answer in answers}


def test_seeds(client):
    """Five with a seed give one text, five without one five, five without temperature one."""
    assert len(texts(client, temperature=1, seed=42)) == 1
    assert len(texts(client, temperature=1)) == 5
    assert len(texts(client)) == 1
    assert texts(client, 1, temperature=1, seed=42) != texts(client, 1, temperature=1, seed=43)


def test_choices_have_noise_of_their_own(client):
    answer = client.completions.create(**TEXT, max_tokens=24, temperature=1, seed=7, n=3)
    found = {choice.index: choice.text for choice in answer.choices}
    assert sorted(found) == [0, 1, 2] and len(set(found.values())) == 3
    assert found[0] in texts(client, 1, temperature=1, seed=7)
    assert found[2] in texts(client, 1, temperature=1, seed=9)
    assert answer.usage.completion_tokens == 72
    one = client.completions.create(**TEXT, max_tokens=1)
    assert answer.usage.prompt_tokens == one.usage.prompt_tokens  # once, not three times


def test_several_prompts_and_token_ids(client, text):
    prompts = [PROMPT, "import os\n"]
    answer = client.completions.create(model=TEXT["model"], prompt=prompts, max_tokens=8, n=2)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in answer.choices][:2] == [
        text[: len(answer.choices[0].text)]
    ] * 2
    tokenizer_ids = [1, 2, 3]
    by_id = client.completions.create(model=TEXT["model"], prompt=tokenizer_ids, max_tokens=4)
    assert by_id.usage.prompt_tokens == 3
    many = client.completions.create(model=TEXT["model"], prompt=[tokenizer_ids] * 2, max_tokens=4)
    assert [choice.text for choice in many.choices] == [by_id.choices[0].text] * 2


@pytest.mark.parametrize(
    "change",
    [
        {"presence_penalty": 2.0},
        {"frequency_penalty": 2.0},
        {"extra_body": {"repetition_penalty": 1.8}},
        {"extra_body": {"repetition_penalty": 1.8, "repetition_context_size": 400}},
        {"logit_bias": {"12": 60}},
        {"temperature": 1.2, "seed": 3},
    ],
)
def test_every_parameter_changes_the_text(client, text, change):
    asked = {**TEXT, "max_tokens": 48, **change}
    changed = client.completions.create(**asked).choices[0].text
    assert changed != text
    assert changed == client.completions.create(**asked).choices[0].text


@pytest.mark.parametrize(
    "change",
    [{"top_p": 0.05}, {"extra_body": {"top_k": 1}}, {"extra_body": {"min_p": 1.0}}],
)
def test_filters_that_leave_one_token_are_greedy(client, text, change):
    drawn = client.completions.create(**TEXT, max_tokens=48, temperature=1.5, seed=1)
    assert drawn.choices[0].text != text
    filtered = client.completions.create(**TEXT, max_tokens=48, temperature=1.5, seed=1, **change)
    assert filtered.choices[0].text[:30] == text[:30]


def test_penalties_leave_the_prompt_alone(client):
    """OpenAI's are of the generated text: the first token has none before it."""
    plain = client.completions.create(**TEXT, max_tokens=1, logprobs=5).choices[0].logprobs
    for name in ("presence_penalty", "frequency_penalty"):
        answer = client.completions.create(**TEXT, max_tokens=1, logprobs=5, **{name: 2.0})
        assert answer.choices[0].logprobs.top_logprobs == plain.top_logprobs


def test_a_bias_forces_and_bans(client):
    """Emoji as the tokens of their bytes, which no draft of this pair proposes."""
    first = client.completions.create(**TEXT, max_tokens=1, logprobs=1).choices[0]
    forced = client.completions.create(**TEXT, max_tokens=6, logit_bias={"300": 100}, logprobs=0)
    assert len(set(forced.choices[0].logprobs.tokens)) == 1
    assert forced.choices[0].logprobs.tokens[0] != first.logprobs.tokens[0]


def test_a_reader_that_stops_is_noticed(client, url):
    stream = client.chat.completions.create(**CHAT, max_tokens=3000, stream=True)
    for _, _ in zip(range(5), stream, strict=False):
        pass
    assert not running.idle(url)
    stream.close()
    assert running.until(lambda: running.idle(url)) < 2


@pytest.mark.parametrize("streaming", ["false", "true"])
def test_curl(url, streaming):
    body = f'{{"prompt": "import os", "max_tokens": 8, "stream": {streaming}}}'
    command = ["curl", "-sSN", f"{url}/v1/completions", "-d", body]
    done = subprocess.run(
        [*command, "-H", "content-type: application/json"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert ("[DONE]" in done.stdout) == (streaming == "true") and "finish_reason" in done.stdout
    # What curl calls a body by itself is no JSON.
    refused = subprocess.run(command, capture_output=True, text=True)
    assert "expected content-type application/json" in refused.stdout


def test_curl_that_leaves(url):
    body = '{"prompt": "import os", "max_tokens": 3000}'
    start = time.monotonic()
    kind = "content-type: application/json"
    command = ["curl", "-sS", "-m", "1", f"{url}/v1/completions", "-d", body, "-H", kind]
    subprocess.run(command, capture_output=True)
    running.until(lambda: running.idle(url))
    assert time.monotonic() - start < 4  # 3000 tokens take longer


def test_four_streams_are_as_the_answers_one_after_the_other(url):
    """Each in its own session, in turn: no token differs, sampled ones included."""
    bodies = [
        {"prompt": prompt.text, "max_tokens": 96, "temperature": 0.7 * (i % 2), "seed": i}
        for i, prompt in enumerate(demo.prompts()[:4])
    ]

    def run(body):
        start = time.monotonic()
        found = running.stream(url, "/v1/completions", body)
        text = "".join(event["choices"][0]["text"] for event in found[:-1])
        return text, start, time.monotonic()

    alone = [run(body)[0] for body in bodies]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(run, bodies))
    assert [text for text, _, _ in together] == alone
    assert max(start for _, start, _ in together) < min(end for _, _, end in together)
    assert len(set(alone)) == 4
