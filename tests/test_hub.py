"""Loading: the shipped demo pair, dtypes, and one clear sentence for whatever is no model."""

from __future__ import annotations

import json
import shutil
import socket
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import numpy as np
import pytest
from mlx.utils import tree_flatten
from tokenizers import Regex, Tokenizer
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split

from dflash_native import demo, hub
from dflash_native.training.export import quantise

LIMIT_BYTES = 30_000_000
NORMS = ("layernorm.weight", "model.norm.weight", "q_norm.weight", "k_norm.weight")


@pytest.fixture(autouse=True, scope="module")
def on_cpu():
    """fp32 figures below are those of the CPU: a GPU may multiply in TF32."""
    before = mx.default_device()
    mx.set_default_device(mx.cpu)
    yield
    mx.set_default_device(before)


@pytest.fixture(scope="module")
def pair():
    return hub.load_demo()


@pytest.fixture(scope="module")
def stored():
    return mx.load(str(demo.TARGET / "model.safetensors"))


def parameters(model):
    return dict(tree_flatten(model.parameters()))


def loss(model, tokenizer):
    """Mean nats a token over the first 24 of two prompts."""
    tokens = mx.array([tokenizer.encode(prompt.text)[:24] for prompt in demo.prompts()[:2]])
    logits = model(tokens[:, :-1]).astype(mx.float32)
    return nn.losses.cross_entropy(logits, tokens[:, 1:]).mean().item()


def copy_target(folder, **replaced):
    """The demo target at `folder`, its files linked but for those to replace."""
    folder.mkdir()
    for path in demo.TARGET.iterdir():
        if path.name not in replaced:
            (folder / path.name).symlink_to(path)
    for name, content in replaced.items():
        (folder / name).write_bytes(content)
    return folder


# The shipped files.


def test_everything_shipped_is_under_30_mb():
    files = [p for p in demo.TARGET.parent.rglob("*") if p.is_file() and p.suffix != ".pyc"]
    total = sum(path.stat().st_size for path in files)
    assert {"MODEL_CARD.md", "prompts.txt"} <= {path.name for path in files}
    assert 25_000_000 < total < LIMIT_BYTES


def test_prompts_are_twenty_beginnings_of_96_to_128_tokens(pair):
    prompts = demo.prompts()
    assert len({prompt.name for prompt in prompts}) == 20
    assert len({prompt.text for prompt in prompts}) == 20
    assert len({prompt.kind for prompt in prompts}) >= 6
    for prompt in prompts:
        tokens = pair[1].encode(prompt.text)
        assert 96 <= len(tokens) <= 128, prompt.name
        assert pair[1].decode(tokens) == prompt.text
        assert "===" not in prompt.text.splitlines()[0]


def test_the_demo_knows_its_language_and_a_second_norm_shift_ruins_it(pair, stored, tmp_path):
    """mlx-lm adds 1 to the norms of a raw checkpoint, which it knows by the conv's layout.

    Held-out text costs the original 1.48 nats a token and a uniform guess 9.01.
    """
    model, tokenizer, _ = pair
    assert loss(model, tokenizer) < 3.0
    norms = {n: v.astype(mx.float32) for n, v in stored.items() if n.endswith(NORMS)}
    assert len(norms) > 2 * len(model.layers)
    assert all(mx.array_equal(parameters(model)[name], norms[name]) for name in norms)

    shifted = {n: v.moveaxis(1, 2) if "conv1d" in n else v for n, v in stored.items()}
    folder = copy_target(tmp_path / "shifted", **{"model.safetensors": b""})
    mx.save_safetensors(str(folder / "model.safetensors"), shifted)
    wrong, _ = hub.load(folder, mx.float32)
    assert loss(wrong, tokenizer) > 5.0

    raw = {n: v - 1 if n.endswith(NORMS) else v for n, v in shifted.items()}
    mx.save_safetensors(str(folder / "model.safetensors"), raw)
    again, _ = hub.load(folder, mx.float32)
    assert all(mx.allclose(parameters(again)[n], norms[n], 2**-7, 2**-7) for n in norms)


def test_text_is_cut_as_the_tokenizer_file_says(pair):
    """transformers 5 cuts by its own rule for qwen3_5: 9 of 20 prompts came out otherwise."""
    file = Tokenizer.from_file(str(demo.TARGET / "tokenizer.json"))
    expected = [file.encode(prompt.text).ids for prompt in demo.prompts()]
    assert [pair[1].encode(prompt.text) for prompt in demo.prompts()] == expected
    rule = Regex(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+")
    file.pre_tokenizer = Sequence([Split(rule, "isolated"), ByteLevel(False, use_regex=False)])
    assert [file.encode(prompt.text).ids for prompt in demo.prompts()] != expected


# dtypes.


@pytest.mark.parametrize(
    ("dtype", "drafts"),
    [
        (mx.float32, mx.float32),
        (mx.bfloat16, mx.bfloat16),
        (mx.float16, mx.float32),  # an fp16 draft overflows
    ],
    ids=["float32", "bfloat16", "float16"],
)
def test_load_demo_gives_plain_modules_of_the_dtype(dtype, drafts, stored):
    model, _, drafter = hub.load_demo(dtype)
    weighty = [m for m in model.modules() if isinstance(m, nn.Linear | nn.Embedding)]
    assert len(weighty) == sum(name.endswith(".scales") for name in stored) > 0
    assert not any("scales" in module for module in model.modules())
    for name, value in parameters(model).items():
        assert value.dtype == (mx.float32 if name.endswith("A_log") else dtype), name
        assert mx.all(mx.isfinite(value)).item(), name
    assert {value.dtype for value in parameters(drafter.model).values()} == {drafts}
    assert model.language_model.model.embed_tokens(mx.array([[1]])).dtype == dtype


def test_without_a_dtype_the_demo_stays_in_8_bits_as_mlx_lm_loads_it(stored):
    model, _, drafter = hub.load_demo(None)
    quantised = [m for m in model.modules() if "scales" in m]
    assert {(type(m), m.bits, m.group_size) for m in quantised} == {
        (nn.QuantizedLinear, 8, 64),
        (nn.QuantizedEmbedding, 8, 64),
    }
    assert parameters(drafter.model)["norm.weight"].dtype == mx.bfloat16
    theirs, _ = mlx_lm.load(str(demo.TARGET))
    ours, theirs = parameters(model), parameters(theirs)
    assert ours.keys() == theirs.keys() == stored.keys()
    assert all(mx.array_equal(ours[name], theirs[name]) for name in ours)


def test_dequantised_in_fp32_and_rounded_once(pair, stored):
    """`scale * q + bias` in numpy; the control computes in bf16, the dtype of the scales."""
    name = "language_model.model.layers.0.linear_attn.out_proj"
    scales, biases = (
        np.array(stored[f"{name}.{part}"].astype(mx.float32))[..., None]
        for part in ("scales", "biases")
    )
    packed = np.array(stored[f"{name}.weight"]).view(np.uint8)
    q = packed.reshape(*scales.shape[:2], 64).astype(np.float32)
    expected = (scales * q + biases).reshape(packed.shape)
    weight = np.array(parameters(pair[0])[f"{name}.weight"])
    np.testing.assert_allclose(weight, expected, rtol=0, atol=np.abs(expected).max() * 2**-23)

    low = mx.dequantize(
        *(stored[f"{name}.{part}"] for part in ("weight", "scales", "biases")), 64, 8
    )
    assert np.abs(np.array(low.astype(mx.float32)) - expected).max() > 1e-5
    half, _ = hub.load(demo.TARGET, mx.bfloat16)
    rounded = mx.array(weight).astype(mx.bfloat16)
    assert mx.array_equal(parameters(half)[f"{name}.weight"], rounded)


def test_a_layer_that_cannot_be_made_plain_is_refused_by_name(monkeypatch):
    real = hub.load_model

    def with_mxfp4(folder, **options):
        model, config = real(folder, **options)
        mlp = model.language_model.model.layers[0].mlp
        mlp.gate_proj = nn.Linear(64, 64, bias=False).to_quantized(32, 4, mode="mxfp4")
        return model, config

    monkeypatch.setattr(hub, "load_model", with_mxfp4)
    with pytest.raises(ValueError, match=r"QuantizedLinear \(mxfp4\) at .*layers.0.mlp.gate_proj"):
        hub.load(demo.TARGET, mx.float32)
    hub.load(demo.TARGET)


def test_a_dtype_that_is_none_is_refused():
    with pytest.raises(
        ValueError, match=r"^\[load\] expected mx.float32, .* but got mlx.core.int8$"
    ):
        hub.load_demo(mx.int8)
    with pytest.raises(ValueError, match=r"expected mx.float32, .* but got 'float32'"):
        hub.load_demo("float32")
    with pytest.raises(ValueError, match=r"expected bfloat16 or float32 but got mlx.core.float16"):
        hub.load_drafter(demo.DRAFT, mx.float16)


# Whatever is no model.


def test_the_demo_needs_no_network(monkeypatch):
    calls = []

    def refuse(*args, **kwargs):
        calls.append(args)
        raise OSError("no network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    hub.load_demo(None)
    assert not calls
    with pytest.raises(OSError, match="no network"):  # the control: the guard does guard
        socket.create_connection(("localhost", 9))
    assert calls


@pytest.fixture
def offline(monkeypatch, tmp_path):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("load", [hub.load, hub.load_drafter])
def test_a_hub_id_offline_is_one_sentence(offline, load):
    with pytest.raises(FileNotFoundError) as caught:
        load("nobody/no-such-model")
    message = str(caught.value)
    assert message.startswith(f"[{load.__name__}] there is no folder 'nobody/no-such-model'")
    assert "cannot be downloaded" in message and "\n" not in message


def test_a_draft_on_the_hub_is_refused_before_its_weights_are_fetched(monkeypatch):
    asked = []

    def fake(hub_id, allow_patterns):
        asked.append(allow_patterns)
        return str(demo.DRAFT)

    monkeypatch.setattr(hub, "snapshot_download", fake)
    with pytest.raises(ValueError, match="expected a target but 'some/draft' is a DFlash draft"):
        hub.load("some/draft")
    assert asked == [["config.json"]]
    hub.load_drafter("some/draft")
    assert len(asked) == 3


@pytest.mark.parametrize("load", [hub.load, hub.load_drafter])
def test_a_missing_folder_or_configuration(load, tmp_path):
    for missing in (tmp_path / "nowhere", str(tmp_path / "nowhere"), "nowhere", "./no/where"):
        with pytest.raises(FileNotFoundError, match=r"there is no folder '.*where'$"):
            load(missing)
    with pytest.raises(FileNotFoundError, match=r"expected .*config.json but there is no such"):
        load(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config.json is no configuration"):
        load(tmp_path)
    with pytest.raises(ValueError, match=r"expected a model's folder but .*config.json is a file"):
        load(tmp_path / "config.json")


def test_draft_and_target_are_not_taken_for_each_other():
    with pytest.raises(ValueError, match=r"a target but '.*draft' is a DFlash draft .*DraftModel"):
        hub.load(demo.DRAFT)
    with pytest.raises(ValueError, match=r"a DFlash draft but '.*target' is a target .*Qwen3_5"):
        hub.load_drafter(demo.TARGET)


def test_a_dflash_draft_is_told_from_a_language_model(monkeypatch, tmp_path):
    assert hub.is_dflash(demo.DRAFT) and not hub.is_dflash(demo.TARGET)
    asked = []

    def fake(hub_id, allow_patterns):
        asked.append(allow_patterns)
        return str(demo.TARGET)

    monkeypatch.setattr(hub, "snapshot_download", fake)
    assert not hub.is_dflash("some/model")
    assert asked == [["config.json"]]
    with pytest.raises(FileNotFoundError, match=r"^\[load_drafter\] .* there is no folder"):
        hub.is_dflash(tmp_path / "nowhere")


def test_the_draft_models_tokenizer_has_the_same_ids():
    def tokenizer(**vocab):
        return SimpleNamespace(get_vocab=lambda: vocab)

    hub.check_draft_tokenizer(tokenizer(a=0, b=1), tokenizer(a=0, b=1, more=2))
    with pytest.raises(ValueError, match=r"expected a draft model with 'b' as id 1, .* but got 2"):
        hub.check_draft_tokenizer(tokenizer(a=0, b=1), tokenizer(a=0, b=2))
    with pytest.raises(ValueError, match="no token in common"):
        hub.check_draft_tokenizer(tokenizer(a=0), tokenizer(b=0))


@pytest.mark.parametrize("kept", [0, 5, 1000, 10_000_000, -1], ids=lambda kept: f"{kept}_bytes")
def test_truncated_weights_are_named(kept, tmp_path):
    content = (demo.TARGET / "model.safetensors").read_bytes()[:kept]
    folder = copy_target(tmp_path / "cut", **{"model.safetensors": content})
    with pytest.raises(ValueError, match=r"^\[load\] .*/cut/model.safetensors is truncated") as cut:
        hub.load(folder)
    assert "\n" not in str(cut.value)

    content = (demo.DRAFT / "model.safetensors").read_bytes()[:kept]
    (tmp_path / "draft").mkdir()
    shutil.copyfile(demo.DRAFT / "config.json", tmp_path / "draft" / "config.json")
    (tmp_path / "draft" / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=r"/draft/model.safetensors .*is truncated"):
        hub.load_drafter(tmp_path / "draft")


def test_missing_weights_a_missing_shard_and_a_missing_tensor(tmp_path, stored):
    folder = copy_target(tmp_path / "target", **{"model.safetensors": b""})
    (folder / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"expected .*/model.safetensors but there is no"):
        hub.load(folder)
    few = {name: value for name, value in stored.items() if "layers.7" not in name}
    mx.save_safetensors(str(folder / "model.safetensors"), few)
    with pytest.raises(ValueError, match=r"mlx-lm cannot load .*: Missing \d+ parameters"):
        hub.load(folder)
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(FileNotFoundError, match=r"model-00001-of-00002.safetensors but there is"):
        hub.load(folder)
    (folder / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(ValueError, match=r"index.json holds no readable weight_map"):
        hub.load(folder)


def test_an_unknown_model_type_and_a_missing_tokenizer(tmp_path):
    config = json.dumps({"model_type": "abacus"}).encode()
    with pytest.raises(ValueError, match=r"mlx-lm cannot load .*: Model type abacus not supported"):
        hub.load(copy_target(tmp_path / "unknown", **{"config.json": config}))
    # transformers makes an empty tokenizer where there is no file, so the file is asked for.
    folder = copy_target(tmp_path / "mute")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"expected a tokenizer in .*/mute but there is no"):
        hub.load(folder)
    for damaged in ("{", '{"a": 1}', "[]"):
        (folder / "tokenizer.json").write_text(damaged)
        with pytest.raises(ValueError, match=r"cannot read the tokenizer in .*/mute: ") as mute:
            hub.load(folder)
        assert "\n" not in str(mute.value)


def test_a_foreign_tokenizer_is_refused_with_both_numbers(pair):
    _, tokenizer, drafter = pair
    target = SimpleNamespace(vocab_size=drafter.config.vocab_size)
    hub.check_tokenizer(target, tokenizer)
    foreign = SimpleNamespace(get_vocab=lambda: {"a": 0, "b": 151_935})
    with pytest.raises(ValueError, match=rf"at most {target.vocab_size} entries.* got 151936: it"):
        hub.check_tokenizer(target, foreign)


def test_known_drafts_are_suggested_for_a_model_in_any_quantisation():
    draft = "z-lab/Qwen3.6-27B-DFlash"
    for name in ("Qwen/Qwen3.6-27B", "mlx-community/Qwen3.6-27B-4bit", Path("/m/Qwen3.6-27B-bf16")):
        assert hub.known_draft(name) == draft
    for name in ("Qwen/Qwen3.6-27B-Base", "Qwen/Qwen3.6-2B", str(demo.TARGET)):
        assert hub.known_draft(name) is None


# The tool that made the files.


def test_the_shipped_grid_is_finer_than_the_librarys():
    mx.random.seed(0)
    weight = mx.random.normal((96, 256)).astype(mx.bfloat16)
    weight[0, :64] = 0.5  # a group without a range
    exact = weight.astype(mx.float32)

    def error(packed, scales, biases):
        scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
        return mx.abs(mx.dequantize(packed, scales, biases, 64, 8) - exact)

    ours = error(*quantise(weight))
    steps = mx.repeat(quantise(weight)[1].astype(mx.float32), 64, axis=1)
    assert mx.all(ours <= 1.1 * steps).item()
    assert mx.all(ours[0, :64] == 0).item()
    theirs = error(*mx.quantize(weight, 64, 8))
    assert ours.square().mean().item() < 0.7 * theirs.square().mean().item()
