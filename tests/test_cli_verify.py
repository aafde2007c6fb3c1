"""`dflash-native verify`: what is compared, counted and printed, and how it ends."""

from __future__ import annotations

import hashlib
import json

import mlx.core as mx
import pytest
from typer.testing import CliRunner

from dflash_native import demo
from dflash_native.cli import app, loading, verify
from dflash_native.cli.verify import Rehearsal, Variant, compare
from dflash_native.demo import Prompt, parse_prompts
from dflash_native.session import Session

PROMPTS = [Prompt(each.name, each.kind, each.text[:24]) for each in demo.prompts()[:2]]


@pytest.fixture(autouse=True, scope="module")
def on_cpu():
    before = mx.default_device()
    mx.set_default_device(mx.cpu)
    yield
    mx.set_default_device(before)


@pytest.fixture(scope="module")
def pair():
    return loading.demo_pair("bfloat16")


@pytest.fixture
def short(monkeypatch):
    monkeypatch.setattr(verify, "DEMO_VARIANTS", (("bf16", "bfloat16"),))
    monkeypatch.setattr(verify, "demo_prompts", lambda: PROMPTS)


def run(*arguments):
    return CliRunner().invoke(app, ["verify", *map(str, arguments)])


def test_json_ends_with_one_object(short, pair):
    shown = run("--max-tokens", 12, "--json")
    assert shown.exit_code == 0, shown.stderr
    found = json.loads(shown.stdout.splitlines()[-1])
    assert (found["prompts"], found["max_tokens"], found["exact"]) == (2, 12, True)
    assert found["differ_bf16"] == found["differ_4bit"] == 0
    assert 2 <= found["rejections"] <= found["rounds"] <= 2 * 24
    assert {"differs_from_stock_bf16", "sha256_bf16", "first_differ_bf16"} <= found.keys()
    found_without = json.loads(run("--max-tokens", 12, "--json", "--no-stock").stdout)
    assert found_without == {k: v for k, v in found.items() if "from_stock" not in k}
    digest = hashlib.sha256()
    for prompt in PROMPTS:
        ids = pair[1].encode(prompt.text)
        session = Session(pair[0])
        session.prefill(ids)
        for _ in range(12):
            session.round()
        digest.update(json.dumps(session.tokens[len(ids) :]).encode())
    assert found["sha256_bf16"] == digest.hexdigest() != found["sha256_4bit"]


def test_the_four_formats_of_the_demo_pair(monkeypatch):
    monkeypatch.setattr(verify, "demo_prompts", lambda: PROMPTS[:1])
    shown = run("--max-tokens", 3)
    assert shown.exit_code == 0, shown.stderr
    for name in ("fp32", "bf16", "8bit", "4bit"):
        assert f"{name}\n  speculative: equal to plain decoding in 1 of 1" in shown.stdout


def wrong_at(position):
    """Plain decoding that takes another token at a position of the continuation."""

    class Wrong(Session):
        def round(self, limit=None):
            result = super().round(limit)
            if self.drafter is None and len(self.tokens) == position:
                result.tokens[-1] = self.tokens[-1] = (self.tokens[-1] + 1) % 8192
            return result

    return Wrong


def test_a_difference_is_told_and_ends_with_1(short, pair, monkeypatch):
    """The control: where plain decoding takes another token, all that is said of it."""
    target, tokenizer, drafter = pair
    ids = tokenizer.encode(PROMPTS[0].text)
    variant = Variant("bf16", target, tokenizer, drafter)
    honest = compare(variant, PROMPTS[:1], 12)
    assert honest.speculative == []
    monkeypatch.setattr(verify.measure, "Session", wrong_at(len(ids) + 5))
    spoilt = compare(variant, PROMPTS[:1], 12)
    assert spoilt.digest != honest.digest
    [found] = spoilt.speculative
    assert (found.prompt, found.position) == (PROMPTS[0].name, 4)
    assert found.plain == (found.other + 1) % 8192 and found.gap > 0
    shown = run("--prompts", 1, "--max-tokens", 12, "--json")
    assert shown.exit_code == 1
    assert json.loads(shown.stdout)["differ_bf16"] == 1
    shown = run("--prompts", 1, "--max-tokens", 12)
    assert shown.exit_code == 1 and "equal to plain decoding in 0 of 1 prompts" in shown.stdout
    assert f"token 5 is {found.other} " in shown.stdout and "logits are" in shown.stdout


def test_a_target_without_a_draft_gets_drafts_of_its_own_answer(pair):
    target, tokenizer, _ = pair
    outcome = compare(Variant("bf16", target, tokenizer, None), PROMPTS, 40)
    assert outcome.speculative == []
    assert 8 <= outcome.rejections <= outcome.rounds < 40
    drafts = Rehearsal([*range(100, 200)]).propose(mx.array([[1]]), 8, 15)
    assert [at for at, token in enumerate(drafts[0].tolist(), 9) if token != 100 + at] == [
        10,
        15,
        20,
    ]


def test_prompt_files(tmp_path, short):
    one, two = tmp_path / "one.txt", tmp_path / "two.txt"
    one.write_text("x = 1\n")
    two.write_text("=== first (a)\nx = 1\n=== second (b)\ny = 2\n")
    assert [p.text for p in parse_prompts(two.read_text())] == ["x = 1\n", "y = 2\n"]
    for file, count in ((one, 1), (two, 2)):
        found = json.loads(run("--prompt-file", file, "--max-tokens", 2, "--json").stdout)
        assert found["prompts"] == count
    one.write_text("")
    for arguments, words in (
        (("--prompt-file", one), "but got an empty one"),
        (("--draft", "x"), "--draft only with --model"),
        (("--max-tokens", 0), "of at least 1 but got 20 and 0"),
    ):
        shown = run(*arguments)
        assert shown.exit_code == 2 and words in shown.stderr


def test_a_named_model_is_called_by_its_format():
    shown = run("--model", demo.TARGET, "--draft", demo.DRAFT, "--prompts", 1, "--max-tokens", 2)
    assert shown.exit_code == 0, shown.stderr
    assert shown.stdout.startswith("8bit\n")
    assert run("--model", demo.DRAFT).exit_code == 1
