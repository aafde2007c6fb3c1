"""Target, drafts, losses and optimiser of the training code, in PyTorch on the CPU."""

from __future__ import annotations

import json

import pytest

torch = pytest.importorskip("torch", reason="needs the extra `train`")

import torch.nn.functional as F
from torch import nn

from dflash_native.training import gated_delta, losses
from dflash_native.training.acceptance import Texts, proposals, replay
from dflash_native.training.decoding import Decoder, gumbel, loop_mask
from dflash_native.training.draft import Draft
from dflash_native.training.loop import Plan, train
from dflash_native.training.optimiser import MuonAdamW, orthogonalise
from dflash_native.training.target import Target
from dflash_native.training.windows import Windows
from training_shapes import DRAFT, DRAFT2, TARGET, sharpen


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def target():
    torch.manual_seed(1)
    return sharpen(Target(TARGET)).requires_grad_(False)


def recurrence(tokens, same_keys=False, width=8):
    shape = (2, tokens, 3)
    k = torch.randn(*shape, width)
    if same_keys:
        k = torch.ones_like(k) + 0.01 * k
    q, k = F.normalize(torch.randn(*shape, width), dim=-1), F.normalize(k, dim=-1)
    beta = torch.rand(shape) * (0.04 if same_keys else 1) + (0.96 if same_keys else 0)
    g = -torch.rand(shape) * (0.01 if same_keys else 1)
    return [x.requires_grad_() for x in (q, k, torch.randn(*shape, width + 4), g, beta)]


@pytest.mark.parametrize("tokens, chunk", [(1, 8), (64, 64), (63, 16), (130, 64), (40, 2)])
@pytest.mark.parametrize("same_keys", [False, True])
def test_chunks_equal_single_steps_forward_and_backward(tokens, chunk, same_keys):
    """Nearly equal keys, beta near 1: there the Neumann product overflowed, the blocks do not."""
    inputs = recurrence(tokens, same_keys)
    expected, _ = gated_delta.sequential(*inputs)
    found = gated_delta.chunked(*inputs, chunk=chunk)
    weight = torch.randn_like(expected)
    ours = torch.autograd.grad((found * weight).sum(), inputs)
    theirs = torch.autograd.grad((expected * weight).sum(), inputs)

    def error(a, b):
        return ((a - b).norm() / b.norm().clamp_min(1e-6)).item()

    assert error(found, expected) < 1e-5
    for a, b in zip(ours, theirs, strict=True):
        assert error(a, b) < (5e-4 if same_keys else 1e-5)
    if tokens > 1:
        other = gated_delta.chunked(inputs[0], *(x.roll(1, 1) for x in inputs[1:]), chunk=chunk)
        assert error(other, expected) > 1e-3


def test_chunks_pass_the_gradient_check():
    inputs = [x[:1].detach().double().requires_grad_() for x in recurrence(5, width=2)]
    assert torch.autograd.gradcheck(
        lambda *x: gated_delta.chunked(*x, chunk=4), inputs, fast_mode=True
    )


def test_decoding_gives_the_tokens_of_whole_forwards(target):
    lengths, temperatures = torch.tensor([8, 4, 1]), torch.tensor([0.0, 0.8, 0.0])
    seeds = torch.tensor([5, 6, 7])
    prompts = torch.randint(0, 60, (3, 8))
    decoder = Decoder(target, 3, 60, torch.float32)
    texts = decoder(prompts, lengths, temperatures, seeds)
    hidden, _ = target(texts, target.rope(60), torch.float32)
    logits = target.head(hidden, torch.float32)
    noise = gumbel(seeds[:, None], torch.arange(1, 61), TARGET.vocab_size)
    drawn = (logits + temperatures[:, None, None] * noise).argmax(-1)
    for row, length in enumerate(lengths):
        assert texts[row, :length].tolist() == prompts[row, :length].tolist()
        assert texts[row, length:].tolist() == drawn[row, length - 1 : -1].tolist()
    assert drawn[1, 3:-1].tolist() != logits[1, 3:-1].argmax(-1).tolist()
    assert torch.equal(decoder(prompts, lengths, temperatures, seeds), texts)
    assert not torch.equal(decoder(prompts, lengths, temperatures, seeds + 1), texts)


def test_the_noise_is_gumbels_and_differs_by_row_and_position():
    noise = gumbel(torch.arange(300)[:, None], torch.arange(40), 80)
    assert abs(noise.mean().item() - 0.5772) < 0.01
    assert abs(noise.std().item() - 1.2825) < 0.01
    flat = noise.flatten(0, 1)
    assert len(flat[:, 0].unique()) > 0.99 * len(flat)
    assert abs(torch.corrcoef(flat[:, :2].T)[0, 1].item()) < 0.03
    again = gumbel(torch.tensor([[7]]), torch.tensor([3]), 80)
    assert torch.equal(again[0], noise[7, 3:4])


def test_loops_are_found_and_nothing_else():
    text = torch.arange(100)[None].clone()
    text[0, 40:70] = torch.arange(30) % 5
    loops = loop_mask(text)[0]
    # The first period and the max(2 * 5, 8) tokens that confirm it are no loop yet.
    assert loops.nonzero()[:, 0].tolist() == list(range(40 + 5 + 9, 70))
    constant = torch.zeros(1, 20, dtype=torch.int64)
    assert loop_mask(constant)[0].tolist() == [False] * 8 + [True] * 12
    assert not loop_mask(torch.randint(0, 1000, (4, 200))).any()


@pytest.mark.parametrize("shape", [DRAFT, DRAFT2], ids=["dflash", "dflash2"])
def test_a_draft_sees_only_what_stands_before_its_block(target, shape):
    draft = sharpen(Draft(shape))
    texts = torch.randint(0, 60, (1, 60))
    _, taps = target(texts, target.rope(60), torch.float32, shape.target_layer_ids)
    anchors = torch.tensor([[20, 9, 33]])
    lengths = torch.full_like(anchors, shape.block_size)

    def run(texts, taps, anchors, lengths):
        blocks = losses.Blocks(texts, taps, anchors, lengths)
        table = target.embed_tokens.weight
        return losses.draft_hidden(draft, blocks, table, draft.rope(80), torch.float32)

    hidden, before, labels = run(texts, taps, anchors, lengths)
    assert labels[0, 0].tolist() == texts[0, 21 : 20 + shape.block_size].tolist()
    assert before[0, 0].tolist() == texts[0, 20 : 19 + shape.block_size].tolist()
    alone, _, _ = run(texts, taps, anchors[:, 1:2], lengths[:, 1:2])
    assert (hidden[:, 1:2] - alone).abs().max() < 1e-5
    later = taps.clone()
    later[:, 20:] += 1
    changed, _, _ = run(texts, later, anchors, lengths)
    gaps = (changed - hidden).abs().amax((0, 2, 3))
    assert gaps[0] < 1e-5 and gaps[1] < 1e-5 and gaps[2] > 1e-2
    # What stands a window before the last slot is seen by the full layer alone.
    other = texts.clone()
    other[0, 20] = (other[0, 20] + 1) % 60
    changed, _, _ = run(other, taps, anchors, lengths)
    assert (changed - hidden).abs().amax((0, 2, 3))[0] > 1e-2
    short, _, _ = run(texts, taps, anchors, torch.full_like(lengths, 3))
    assert (short - hidden).abs().max() > 1e-3


def test_slots_outside_a_shorter_block_are_seen_by_nobody(target):
    """A draft of block 16 that was never shortened fell from 4.1 to 1.6 tokens a round at 4."""
    draft = sharpen(Draft(DRAFT))
    texts = torch.randint(0, 60, (2, 40))
    _, taps = target(texts, target.rope(40), torch.float32, DRAFT.target_layer_ids)
    anchors = torch.tensor([[12], [20]])
    table = target.embed_tokens.weight
    found = []
    for change in (0.0, 1.0):
        blocks = losses.Blocks(texts, taps, anchors, torch.full((2, 1), 4))
        embedded = table[torch.full((2, DRAFT.block_size), DRAFT.mask_token_id)].clone()
        embedded[:, 4:] += change
        found.append(draft(embedded, taps, anchors, draft.rope(60), torch.float32, blocks.lengths))
    assert (found[0][:, :, :4] - found[1][:, :, :4]).abs().max() < 1e-6
    assert (found[0][:, :, 4:] - found[1][:, :, 4:]).abs().max() > 1e-2


def test_anchors_leave_room_and_lengths_vary():
    starts = torch.tensor([5, 30])
    generator = torch.Generator().manual_seed(0)
    anchors, lengths = losses.draw_anchors(starts, 50, 16, 4000, 0.5, generator)
    assert anchors[0].min() == 5 and anchors[1].min() == 30 and anchors.max() == 34
    assert lengths.unique().tolist() == list(range(2, 17))
    assert abs((lengths == 16).double().mean().item() - 0.5) < 0.03
    weights = losses.position_weights(torch.tensor([[4, 16]]), 16, 5.0)
    assert (weights[0, 0] > 0).tolist() == [True] * 3 + [False] * 12
    assert weights[0, 1, 5].item() == pytest.approx(2.718281828**-1)


def test_the_selectors_path_is_that_of_its_scores(target):
    draft = sharpen(Draft(DRAFT2))
    selector = draft.candidate_selector
    nn.init.normal_(selector.predecessor_codebook)
    hidden = torch.randn(2, 5, TARGET.hidden_size)
    logits = target.head(hidden, torch.float32)
    anchor = torch.tensor([3, 4])
    path = selector.select(hidden, logits, anchor)
    before = torch.cat([anchor[:, None], path[:, :-1]], 1)
    scores = logits + selector.steps(hidden, before, torch.float32)
    candidates = logits.topk(DRAFT2.selector_top_k, -1).indices
    allowed = torch.full_like(scores, float("-inf")).scatter(-1, candidates, 0.0)
    assert torch.equal((scores + allowed).argmax(-1), path)
    assert not torch.equal(logits.argmax(-1), path)


def test_a_draft_that_knows_the_text_is_accepted_whole(target, monkeypatch):
    tokens = torch.randint(0, 60, (4, 100))
    zeros = torch.zeros(4)
    loops = torch.zeros(4, 100, dtype=torch.bool)
    loops[2:] = True
    texts = Texts(tokens, torch.zeros(4, 100, 96), loops, zeros, zeros.long(), 20, 90)
    draft = Draft(DRAFT)
    block = DRAFT.block_size

    def oracle(draft, target, texts, anchors, dtype, length):
        labels = texts.tokens.gather(1, anchors[:, None] + torch.arange(1, length))
        said = labels.clone()
        said[2:, 2] += 1  # rows in loops accept two drafts a round
        return said, labels

    monkeypatch.setattr("dflash_native.training.acceptance.proposals", oracle)
    found = replay(draft, target, texts, torch.float32)
    whole = -(-69 // block)
    assert found["rounds"] == 2 * whole + 2 * 23
    assert found["tokens_a_round"] == pytest.approx(4 * 69 / found["rounds"], abs=1e-3)
    assert found["outside_loops"] == pytest.approx(69 / whole, abs=1e-3)
    assert found["survival"][1] == 1.0 and found["survival"][2] < 0.5
    assert len(found["survival"]) == block - 1


def test_drafts_are_drawn_with_the_noise_of_the_text(target):
    """A drawn text and an argmax draft agree by luck only: the draft draws with the same noise."""
    draft = Draft(DRAFT)
    tokens = torch.randint(0, 60, (3, 60))
    _, taps = target(tokens, target.rope(60), torch.float32, DRAFT.target_layer_ids)
    anchors = torch.tensor([20, 21, 22])
    seeds, loops = torch.arange(3), torch.zeros_like(tokens, dtype=torch.bool)
    said = {}
    for temperature in (0.0, 50.0):
        texts = Texts(tokens, taps, loops, torch.full((3,), temperature), seeds, 16, 44)
        said[temperature], _ = proposals(draft, target, texts, anchors, torch.float32, 6)
    slots = anchors[:, None] + torch.arange(1, 6)
    noise = gumbel(seeds[:, None], slots, TARGET.vocab_size)
    assert (said[50.0] == noise.argmax(-1)).double().mean() > 0.9
    assert (said[0.0] == noise.argmax(-1)).double().mean() < 0.5


def test_windows_hold_each_place_once_an_epoch_and_hang_on_the_step_alone():
    windows = Windows(torch.arange(1000), 9, 10, seed=3)
    steps = windows.steps_per_epoch
    found = torch.cat([windows(step) for step in range(steps)])
    assert (found[:, 1:] - found[:, :-1] == 1).all()
    assert len(found[:, 0].unique()) == len(found) == 10 * steps
    later = windows(steps + 1)
    assert torch.equal(Windows(torch.arange(1000), 9, 10, seed=3)(steps + 1), later)
    assert not torch.equal(windows(1), later)
    with pytest.raises(ValueError, match="expected 10 windows of 200 but got 1000 tokens"):
        Windows(torch.arange(1000), 200, 10, seed=3)


def test_orthogonalised_matrices_have_singular_values_near_one():
    for shape in ((3, 40, 24), (2, 24, 40)):
        matrices = torch.randn(shape)
        values = torch.linalg.svdvals(orthogonalise(matrices).float())
        assert values.min() > 0.6 and values.max() < 1.3
        assert torch.linalg.svdvals(matrices).max() > 5


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32, 24))
        self.bias = nn.Parameter(torch.zeros(32))
        self.embed_tokens = nn.Parameter(torch.randn(50, 24))


def steps_of(model):
    def loss_of(step):
        tokens = torch.randint(0, 50, (64,), generator=torch.Generator().manual_seed(step))
        made = F.embedding(tokens, model.embed_tokens) @ model.weight.T + model.bias
        return (made - tokens[:, None] / 50).square().mean()

    return loss_of


def run_small(folder, plan):
    torch.manual_seed(4)
    model = Small()
    optimiser = MuonAdamW(model.named_parameters())
    return model, train(model, optimiser, steps_of(model), plan, folder, "small")


def test_a_cut_training_goes_on_to_the_same_weights(tmp_path):
    for name in ("whole", "cut", "other"):
        (tmp_path / name).mkdir()
    whole, figures = run_small(tmp_path / "whole", Plan(steps=30, report_steps=5))
    assert figures["steps"] == 30
    cuts = 0
    while True:
        # A command of no time at all: it saves and stops after its first step.
        cut, figures = run_small(tmp_path / "cut", Plan(steps=30, command_seconds=0.0))
        if figures is not None:
            break
        cuts += 1
    assert cuts == 29
    other, _ = run_small(tmp_path / "other", Plan(steps=29))
    for name, value in whole.state_dict().items():
        assert torch.equal(cut.state_dict()[name], value), name
        assert not torch.equal(other.state_dict()[name], value), name
    lines = (tmp_path / "whole" / "small.log.jsonl").read_text().splitlines()
    reports = [json.loads(line)["loss"] for line in lines]
    assert reports[-1] < 0.9 * reports[0]


def test_a_schedule_over_time_ends_by_the_clock(tmp_path):
    _, figures = run_small(tmp_path, Plan(seconds=0.3))
    assert 0.3 <= figures["seconds"] < 3 and figures["steps"] > 3
    plan = Plan(seconds=10.0)
    shares = [plan.scale(plan.progress(0, t)) for t in (0.0, 0.075, 1.0, 4.4, 7.25, 10.0)]
    assert shares == pytest.approx([1e-3, 0.5, 1.0, 1.0, 0.5, 0.02])
    with pytest.raises(ValueError, match="expected either seconds or steps"):
        Plan()


def test_a_loss_that_is_no_number_stops_the_training(tmp_path):
    model = Small()
    loss = steps_of(model)
    with pytest.raises(RuntimeError, match="expected a finite loss at step 1"):
        train(
            model,
            MuonAdamW(model.named_parameters()),
            lambda step: loss(step) * float("nan"),
            Plan(steps=5),
            tmp_path,
            "small",
        )
