"""A whole run at a small size: each stage by its own function, then the files in every reader."""

from __future__ import annotations

import importlib
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import mlx_lm.utils
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the extra `train`")

from typer.testing import CliRunner

from dflash_native import hub
from dflash_native.drafters import DFlashDrafter
from dflash_native.session import Session
from dflash_native.targets import Target as MlxTarget
from dflash_native.training import checkpoints, corpus, export, losses, stages, tokenizer
from dflash_native.training.__main__ import CUT, app
from dflash_native.training.documents import Document
from dflash_native.training.draft import Draft
from dflash_native.training.evaluate import evaluate
from dflash_native.training.loop import Plan
from dflash_native.training.target import Target
from training_shapes import DRAFT, DRAFT2, TARGET, VOCAB, sharpen

KINDS = {"dflash": DRAFT, "dflash2": DRAFT2}


@pytest.fixture(autouse=True, scope="module")
def on_cpu():
    before = mx.default_device()
    mx.set_default_device(mx.cpu)
    yield
    mx.set_default_device(before)


def sentences(seed, count):
    draw = random.Random(seed)
    words = "alpha beta gamma delta epsilon zeta eta theta iota kappa".split()
    lines = []
    for _ in range(count):
        a, b = draw.choice(words), draw.choice(words)
        lines.append(f"def {a}_{b}({a}, {b}):\n    return {a} + {b}\n")
    return "\n".join(lines)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run's folder after every stage but the export."""
    folder = tmp_path_factory.mktemp("run")
    builder = corpus.Builder()
    builder.train = [Document(f"t{i}", "code", sentences(i, 12)) for i in range(400)]
    builder.held = [Document(f"c{i}", "code", sentences(1000 + i, 40)) for i in range(8)]
    builder.held += [Document(f"p{i}", "prose", sentences(2000 + i, 12)) for i in range(12)]
    builder.counts.update(files=420, kept=420)
    corpus.write(builder, [{"source": "here-1", "licence": "MIT", "characters": 1}], folder)
    tokenizer.build(folder, VOCAB + 16, 10**6)

    torch.set_num_threads(1)
    plan = Plan(steps=50, report_steps=10)
    assert stages.train_target(folder, plan, TARGET, batch=4, length=64)
    stages.make_continuations(folder, batches=2, rows=24, length=64)
    for kind in KINDS:
        plan = Plan(steps=30, flat=0.3, report_steps=10)
        assert stages.train_draft(folder, plan, kind, DRAFT, batch=8, blocks=4)
    evaluate(folder, rows=6, prompt=16, generated=40, length=64)
    return folder


def test_the_gpu_stages_need_nothing_else_of_the_package():
    """A machine with PyTorch and without MLX runs them as `python -m training`."""
    script = (
        "import sys, training.__main__, training.stages, training.evaluate\n"
        "print(sorted({name.partition('.')[0] for name in sys.modules}))"
    )
    folder = Path(stages.__file__).parent.parent
    places = [str(folder), str(Path(torch.__file__).parent.parent)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(places)}
    command = [sys.executable, "-c", script]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert "'training'" in found.stdout and "'torch'" in found.stdout
    assert "'mlx" not in found.stdout and "'dflash_native'" not in found.stdout


def reported(folder, name):
    lines = (folder / f"{name}.log.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


def test_losses_fall(run):
    target = reported(run, "target")
    assert target[0] == pytest.approx(np.log(TARGET.vocab_size), abs=0.3)
    assert target[-1] < 0.5 * target[0]
    for kind in KINDS:
        draft = reported(run, kind)
        assert draft[-1] < 0.8 * draft[0], kind


def test_the_figures_are_those_of_the_run(run):
    found = json.loads((run / "evaluation.json").read_text())
    target = json.loads((run / "target.json").read_text())
    assert target["tokens"] == 50 * 4 * 64 and target["steps"] == 50
    assert 0.2 < found["held_out"]["code"]["nats_a_token"] < 3
    for kind in KINDS:
        for name in ("code, T = 0", "code, T = 0.8", "prose, T = 0", "prose, T = 0.8"):
            replayed = found["drafts"][kind][name]
            assert 1 <= replayed["tokens_a_round"] <= DRAFT.block_size
            assert replayed["survival"] == sorted(replayed["survival"], reverse=True)
        assert list(found["drafts"][kind]["code, T = 0"]["shorter_blocks"]) == ["4"]
        assert found["twenty_prompts"][kind]["rounds"] > 0
    assert set(found["loops"]) == set(found["drafts"]["dflash"])


def test_continuations_are_kept_by_a_second_call(run):
    files = sorted(run.glob("continuations-*.pt"))
    assert len(files) == 2
    times = [file.stat().st_mtime_ns for file in files]
    stages.make_continuations(run, batches=2, rows=24, length=64)
    assert [file.stat().st_mtime_ns for file in files] == times
    first, second = (torch.load(file, weights_only=True) for file in files)
    assert not torch.equal(first["texts"], second["texts"])
    greedy = torch.load(files[0], weights_only=True)["texts"]
    assert greedy.shape == (24, 64) and greedy.max() < TARGET.vocab_size


def test_a_cut_command_exits_with_its_code_and_goes_on(run, tmp_path):
    (tmp_path / "train.tokens.xz").symlink_to(run / "train.tokens.xz")
    plan = Plan(steps=3, command_seconds=0.0)
    results = [stages.train_target(tmp_path, plan, TARGET, batch=2, length=32) for _ in range(3)]
    assert results == [False, False, True]
    for done, code in ((False, CUT), (True, 0)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(stages, "train_target", lambda *_, done=done, **__: done)
            found = CliRunner().invoke(app, ["target", "--run", str(tmp_path)])
        assert found.exit_code == code


@pytest.fixture(scope="module")
def plain(tmp_path_factory, run):
    """A sharpened target in fp32 files, which no rounding hides; its PyTorch twin."""
    folder = tmp_path_factory.mktemp("plain")
    torch.manual_seed(2)
    target = sharpen(Target(TARGET)).requires_grad_(False)
    checkpoints.write_target(target, folder / "target", run / "tokenizer", torch.float32)
    return folder / "target", target


def tokens(count, seed=0):
    return np.random.default_rng(seed).integers(0, VOCAB, (1, count))


def largest_gap(ours, theirs):
    return float(
        np.abs(np.array(ours, dtype=np.float64) - np.array(theirs, dtype=np.float64)).max()
    )


def expected_logits(target, ids):
    hidden, _ = target(torch.from_numpy(ids), target.rope(ids.shape[1]), torch.float32)
    return target.head(hidden, torch.float32).numpy()


def test_the_target_gives_the_same_logits_in_mlx_lm_and_here(plain):
    folder, target = plain
    ids = tokens(100)
    expected = expected_logits(target, ids)
    model, _ = mlx_lm.utils.load(str(folder))
    assert largest_gap(model(mx.array(ids)), expected) < 1e-4
    model, _ = hub.load(folder, mx.float32)
    ours = MlxTarget(model)
    hidden, taps = ours.forward(mx.array(ids), ours.make_cache(), commit=True, tap_layers=(0, 2, 3))
    assert largest_gap(ours.logits(hidden), expected) < 1e-4
    _, found = target(torch.from_numpy(ids), target.rope(100), torch.float32, (0, 2, 3))
    assert largest_gap(taps, found.numpy()) < 1e-4
    assert np.abs(expected).max() > 1
    assert largest_gap(model(mx.array(tokens(100, 1))), expected) > 1


def test_bf16_norms_are_the_same_numbers_for_readers_that_add_one_in_bf16_and_in_fp32(tmp_path):
    """mlx-lm adds one in bf16, transformers in fp32: unrounded factors gave logits 0.056 apart."""
    torch.manual_seed(3)
    target = sharpen(Target(TARGET)).requires_grad_(False)
    checkpoints.write_target(target, tmp_path, None)
    back = checkpoints.read_target(tmp_path)
    stored = checkpoints.target_tensors(target, torch.bfloat16)
    name = "model.language_model.layers.0.input_layernorm.weight"
    assert torch.equal(stored[name].float() + 1, (stored[name] + 1).float())
    naive = (target.layers[0].input_layernorm.weight - 1).bfloat16()
    assert not torch.equal(naive.float() + 1, (naive + 1).float())
    model, _ = mlx_lm.utils.load_model(tmp_path)
    model.set_dtype(mx.float32)
    ids = tokens(60)
    assert largest_gap(model(mx.array(ids)), expected_logits(back, ids)) < 1e-4


@pytest.fixture(scope="module")
def authors():
    try:
        module = importlib.import_module("dflash.model_mlx")
    except ImportError as error:
        pytest.fail(f"the authors' model is missing: pip install --no-deps dflash==0.1.0 ({error})")
    with pytest.MonkeyPatch.context() as patch:  # its loader asks the hub also for a local folder
        patch.setattr(module, "snapshot_download", lambda path, **_: path)
        yield module


@pytest.mark.parametrize("kind", KINDS)
def test_a_draft_gives_the_same_logits_here_and_in_the_authors_model(
    kind, plain, tmp_path, authors
):
    folder, target = plain
    torch.manual_seed(5)
    draft = sharpen(Draft(KINDS[kind])).requires_grad_(False)
    checkpoints.write_draft(draft, tmp_path, torch.float32)
    start, block = 30, DRAFT.block_size
    ids = tokens(start + block)
    texts = torch.from_numpy(ids)
    _, taps = target(texts, target.rope(len(ids[0])), torch.float32, DRAFT.target_layer_ids)
    anchors = torch.tensor([[start]])
    blocks = losses.Blocks(texts, taps, anchors, torch.full_like(anchors, block))
    table = target.embed_tokens.weight
    hidden, _, _ = losses.draft_hidden(draft, blocks, table, draft.rope(60), torch.float32)
    logits = target.head(hidden[0], torch.float32)
    if kind == "dflash2":
        drafts = draft.candidate_selector.select(hidden[0], logits, texts[:, start])
        assert not torch.equal(drafts, logits.argmax(-1))
    else:
        drafts = logits.argmax(-1)

    model, _ = hub.load(folder, mx.float32)
    session = DFlashDrafter.load(tmp_path).begin(MlxTarget(model))
    session.extend(mx.array(taps[:, :start].numpy()), 0)
    anchor = mx.array(ids[:, start : start + 1])
    found = session.model.norm(session.hidden(anchor, start)[:, 1:])
    assert largest_gap(found, hidden[0].numpy()) < 1e-4
    assert largest_gap(session.logits(found), logits.numpy()) < 1e-4
    assert session.propose(anchor, start, block - 1).tolist() == drafts.tolist()
    other = session.model.norm(session.hidden((anchor + 1) % VOCAB, start)[:, 1:])
    assert largest_gap(other, hidden[0].numpy()) > 1e-2

    theirs = authors.load_draft(str(tmp_path)).bind(model.language_model)
    masks = mx.full((1, block - 1), DRAFT.mask_token_id)
    rows = mx.concatenate([anchor, masks], axis=1)
    context = mx.array(taps[:, :start].numpy())
    seen = theirs.hidden_states(rows, context, theirs.make_cache(), logits_start=1)
    assert largest_gap(seen, hidden[0].numpy()) < 1e-4
    assert largest_gap(theirs.compute_logits(seen), logits.numpy()) < 1e-4


@pytest.fixture(scope="module")
def pair(run, tmp_path_factory):
    """What the command `export` makes of the run."""
    folder = tmp_path_factory.mktemp("pair")
    found = CliRunner().invoke(app, ["export", "--run", str(run), "--out", str(folder)])
    assert found.exit_code == 0, found.output
    assert str(folder / "draft2" / "model.safetensors") in found.output
    return folder


def test_the_export_loads_and_decodes_without_loss(pair):
    model, coder = hub.load(pair / "target", mx.float32)
    target = MlxTarget(model)
    prompt = coder.encode(sentences(5, 6))[:48]

    def decode(drafter):
        session = Session(target, drafter=drafter, block_size=DRAFT.block_size if drafter else 1)
        session.prefill(prompt)
        made, rounds = [], 0
        while len(made) < 40:
            made += session.round().tokens
            rounds += 1
        return made[:40], rounds

    plain, _ = decode(None)
    for name in ("draft", "draft2"):
        made, rounds = decode(hub.load_drafter(pair / name, mx.float32))
        assert made == plain and rounds < 30, name
    chat = coder.apply_chat_template(
        [{"role": "user", "content": "alpha"}], tokenize=False, add_generation_prompt=True
    )
    assert chat == "<|im_start|>user\nalpha<|im_end|>\n<|im_start|>assistant\n"


def test_the_card_states_the_figures(run, pair):
    card = (pair / "MODEL_CARD.md").read_text()
    found = json.loads((run / "evaluation.json").read_text())
    assert f"| code | {found['held_out']['code']['nats_a_token']} |" in card
    for kind in KINDS:
        assert f"| {found['twenty_prompts'][kind]['tokens_a_round']} |" in card
    assert "| here-1 | MIT |" in card and "## Acceptance: DFlash2" in card
    assert sorted(path.name for path in pair.iterdir()) == [
        "MODEL_CARD.md", "draft", "draft2", "target",
    ]  # fmt: skip
    total = sum(path.stat().st_size for path in pair.glob("*/*"))
    assert f"| all | {total:,} |" in card


def test_what_is_too_large_or_not_bf16_does_not_ship(run, tmp_path, monkeypatch):
    monkeypatch.setattr(export, "LIMIT_BYTES", 1000)
    with pytest.raises(ValueError, match="expected less than 1000 bytes but got "):
        export.export(run, tmp_path)
    checkpoints.write_draft(Draft(DRAFT), tmp_path / "wide", torch.float32)
    with pytest.raises(ValueError, match="expected a bf16 draft but got"):
        export.write_draft(tmp_path / "wide", tmp_path / "draft")
