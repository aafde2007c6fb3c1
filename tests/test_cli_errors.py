"""The command line, given what it cannot use: one sentence, an exit code, no traceback."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from dflash_native import demo as demo_files
from dflash_native import hub
from dflash_native.cli import app
from dflash_native.cli import demo as demo_command
from dflash_native.cli import generate as generate_command
from dflash_native.targets import Target


@pytest.fixture(scope="module")
def pair():
    model, tokenizer, drafter = hub.load_demo()
    return Target(model), tokenizer, drafter


@pytest.fixture
def loaded(pair, monkeypatch):
    """The commands get the pair that is loaded already."""
    for command in (demo_command, generate_command):
        monkeypatch.setattr(command, "demo_pair", lambda dtype, exact: pair)


def run(*arguments, stdin=None):
    return CliRunner().invoke(app, [str(argument) for argument in arguments], input=stdin)


def refused(code, words, *arguments, stdin=None):
    shown = run(*arguments, stdin=stdin)
    assert isinstance(shown.exception, SystemExit), shown.exception
    assert shown.exit_code == code
    assert shown.stdout == ""
    assert shown.stderr.startswith("dflash-native: ") and shown.stderr.count("\n") == 1
    assert words in shown.stderr, shown.stderr


@pytest.mark.parametrize(
    ("words", "arguments"),
    [
        ("empty", ["generate", "--prompt", ""]),
        ("empty", ["generate", "--prompt", "-"]),
        ("--block-size of at least 1 but got 0", ["generate", "--prompt", "x", "--block-size", 0]),
        ("--draft only with --model", ["generate", "--prompt", "x", "--draft", "d"]),
        (
            "got no --draft",
            ["generate", "--prompt", "x", "--model", "m", "--block-size", 4],
        ),
        ("--max-tokens of at least 1", ["generate", "--prompt", "x", "--max-tokens", 0]),
        ("--stop", ["generate", "--prompt", "x", "--stop", ""]),
        ("temperature to be finite", ["generate", "--prompt", "x", "--temperature", "nan"]),
        ("min_p to be finite", ["generate", "--prompt", "x", "--min-p", "inf"]),
        (
            "top_k of at most 8191 in a vocabulary of 8192 tokens but got 8192",
            ["generate", "--prompt", "x", "--top-k", 8192],
        ),
        (
            "repetition_penalty 0 (none) or in 1e-06 … 1e+06 but got 1e+38",
            ["generate", "--prompt", "x", "--repetition-penalty", "1e38"],
        ),
        ("(or lookup, or combined)", ["generate", "--prompt", "x", "--draft", "combined:d"]),
        *(
            (
                f"--draft combined:PATH with --model, the draft beside the lookup, but got {draft}",
                [command, *text, "--model", "m", "--draft", draft],
            )
            for command, text in (
                ("generate", ["--prompt", "x"]),
                ("verify", []),
                ("doctor", ["--measure"]),
            )
            for draft in ("combined", "combined:", "combined:lookup")
        ),
        ("--context only with --measure", ["doctor", "--context", 64]),
        ("--model only with --measure", ["doctor", "--model", "m", "--draft", "d"]),
        ("--draft only with --measure", ["doctor", "--draft", "lookup"]),
        ("--draft with --model but got none", ["doctor", "--measure", "--model", "m"]),
        ("--draft only with --model", ["doctor", "--measure", "--draft", "d"]),
        ("--prompts in 1 … 20 but got 21", ["demo", "--prompts", 21]),
        ("--prompts in 1 … 20 but got 0", ["demo", "--prompts", 0]),
        ("--max-tokens of at least 1 but got -1", ["demo", "--max-tokens", -1]),
        ("--block-size in 1 … 16 but got 17", ["demo", "--block-size", 17]),
    ],
)
def test_a_bad_option_is_one_sentence(loaded, words, arguments):
    refused(2, words, *arguments, stdin="")


def test_a_block_beyond_the_draft_is_one_sentence(loaded):
    for command in (("generate", "--prompt", "x"), ("demo",)):
        refused(2, "1 … 16", *command, "--block-size", 17)


def copy_of(source, folder, **replaced):
    """A checkpoint's folder, its files linked but for those to replace."""
    folder.mkdir()
    for path in source.iterdir():
        (folder / path.name).symlink_to(path)
    for name, content in replaced.items():
        (folder / name).unlink()
        (folder / name).write_bytes(content)
    return folder


@pytest.mark.parametrize("kind", ["target", "draft", "draft model"])
def test_a_truncated_checkpoint_is_one_sentence(kind, tmp_path):
    source = demo_files.DRAFT if kind == "draft" else demo_files.TARGET
    part = (source / "model.safetensors").read_bytes()[:200_000]
    bad = copy_of(source, tmp_path / "bad", **{"model.safetensors": part})
    model = ("--model", bad) if kind == "target" else ("--model", demo_files.TARGET, "--draft", bad)
    refused(1, "truncated", "generate", "--prompt", "x", *model)


def test_a_foreign_tokenizer_is_one_sentence(tmp_path):
    tokenizer = json.loads((demo_files.TARGET / "tokenizer.json").read_text())
    other = tokenizer["added_tokens"][0] | {"id": 9000, "content": "<|other|>"}
    tokenizer["added_tokens"].append(other)
    bad = copy_of(
        demo_files.TARGET, tmp_path / "bad", **{"tokenizer.json": json.dumps(tokenizer).encode()}
    )
    refused(1, "belongs to another model", "generate", "--prompt", "x", "--model", bad)


def test_what_is_not_there_is_one_sentence(tmp_path, monkeypatch):
    refused(1, "no folder", "generate", "--prompt", "x", "--model", tmp_path / "missing")
    empty = tmp_path / "empty"
    empty.mkdir()
    refused(1, "config.json", "generate", "--prompt", "x", "--model", empty)

    def offline(*args, **kwargs):
        raise OSError("no route")

    monkeypatch.setattr(hub, "snapshot_download", offline)
    refused(1, "cannot be downloaded", "generate", "--prompt", "x", "--model", "own/model")


def test_a_draft_in_the_place_of_the_target():
    refused(1, "is a DFlash draft", "generate", "--prompt", "x", "--model", demo_files.DRAFT)


def test_a_draft_model_of_another_vocabulary_is_one_sentence(tmp_path):
    generate = ("generate", "--prompt", "x", "--model", demo_files.TARGET, "--draft")
    tokenizer = json.loads((demo_files.TARGET / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    a, b = sorted(vocab, key=vocab.get)[300:302]
    vocab[a], vocab[b] = vocab[b], vocab[a]
    other = json.dumps(tokenizer).encode()
    bad = copy_of(demo_files.TARGET, tmp_path / "ids", **{"tokenizer.json": other})
    refused(1, "as the target's tokenizer has it, but got", *generate, bad)
    config = json.loads((demo_files.TARGET / "config.json").read_text())
    config["model_type"] = "nothing"
    bad = copy_of(
        demo_files.TARGET, tmp_path / "type", **{"config.json": json.dumps(config).encode()}
    )
    refused(1, "mlx-lm cannot load", *generate, bad)
    refused(1, "no folder", *generate, tmp_path / "missing")
    refused(2, "--draft only with --model", "generate", "--prompt", "x", "--draft", "./lookup")


def test_our_own_faults_keep_their_traceback(monkeypatch):
    def fault(dtype, exact):
        raise TypeError("unsupported operand")

    monkeypatch.setattr(generate_command, "demo_pair", fault)
    assert isinstance(run("generate", "--prompt", "x").exception, TypeError)


def test_an_unknown_instruction_set_is_one_sentence():
    done = subprocess.run(
        [sys.executable, "-m", "dflash_native", "doctor"],
        env=os.environ | {"DFLASH_NATIVE_ISA": "mmx"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and "mmx" in done.stderr
