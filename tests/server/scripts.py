"""A tiny model that says what a script says: real weights, a real checkpoint, known text.

A Llama whose layers add nothing and whose head maps each token to the next one of its script. So
the token after a script's name is the script's first piece, and so on to the end token. The pieces
are cut from the script's bytes wherever chance has it: inside of characters, marks and words.
"""

from __future__ import annotations

import itertools
import json
import random

import mlx.core as mx
import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers.convert_slow_tokenizer import bytes_to_unicode

SCRIPTS = {
    "emoji": "a 😀 é e\u0301 漢字 👩‍👩‍👧 żółć \u2028 नमस्ते 🇪🇺 end",
    "tool": 'See: <tool_call>\n{"name": "weather", "arguments": {"city": "Zürich 😀", "days": 3}}\n'
    "</tool_call>",
    "two": '<tool_call>{"name": "first", "arguments": {}}</tool_call> and '
    '<tool_call>{"name": "second", "arguments": {"x": [1, null]}}</tool_call>!',
    "broken": "I call <tool_call>{not JSON, alas}</tool_call> nothing.",
    "reason": "Let me think: 2 < 3 and </thinking is no mark.\n</think>\n\nTherefore <b>yes</b>.",
    "plain": "Nothing here needs any <mark> at all, STOP would be one.",
}
END = "<|end|>"
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for message in messages %}"
    "{% if message.role == 'system' and message.content == 'refused' %}"
    "{{ raise_exception('no such system message') }}{% endif %}"
    "{% for call in message.tool_calls or [] %}{% set tool_call = call.function %}"
    "<tool_call>{{ tool_call.name }}{{ tool_call.arguments | tojson }}</tool_call>{% endfor %}"
    "{{ message.content }}{% if not loop.last %}<|end|>{% endif %}"
    "{% endfor %}"
    "{% if reason %}<think>{% endif %}"
)
_HIDDEN = 512


def name(script):
    """The text that starts a script, as the last of a prompt."""
    return f"<|{script}|>"


def cut(data, used, rng):
    """Pieces of `data`, none of them twice or in `used`; None where that cannot be."""
    if not data:
        return []
    for size in rng.sample(range(1, 5), 4) + list(range(5, 13)):
        piece = data[:size]
        if size <= len(data) and piece not in used:
            rest = cut(data[size:], used | {piece}, rng)
            if rest is not None:
                return [piece, *rest]
    return None


def save(folder, scripts, *, thinking=None, seed=0):
    """Write the checkpoint; `thinking` is the script after an opened <think>."""
    rng, alphabet, used = random.Random(seed), bytes_to_unicode(), set()
    pieces = {}
    for script, text in scripts.items():
        pieces[script] = cut(text.encode(), used, rng)
        used |= set(pieces[script])
    vocabulary = {character: i for i, character in enumerate(alphabet.values())}
    ids = {}
    for piece in sorted(used):
        text = "".join(alphabet[byte] for byte in piece)
        ids[piece] = vocabulary.setdefault(text, len(vocabulary))
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [END, "<think>", "</think>", *map(name, scripts)]
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in special])
    end = tokenizer.token_to_id(END)
    follows = {}
    for script, parts in pieces.items():
        chain = [tokenizer.token_to_id(name(script)), *(ids[part] for part in parts), end]
        follows |= dict(itertools.pairwise(chain))
    if thinking is not None:
        follows[tokenizer.token_to_id("<think>")] = ids[pieces[thinking][0]]
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    _write(folder, "tokenizer_config.json", _tokenizer_config())
    size = -(-tokenizer.get_vocab_size() // 64) * 64
    _write(folder, "config.json", _config(size, end))
    mx.save_safetensors(str(folder / "model.safetensors"), _weights(size, follows, seed))
    return pieces


def _tokenizer_config():
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "clean_up_tokenization_spaces": False,
        "chat_template": TEMPLATE,
    }


def _config(size, end):
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": _HIDDEN,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "intermediate_size": 64,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "vocab_size": size,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "eos_token_id": end,
    }


def _weights(size, follows, seed):
    signs = np.random.default_rng(seed).choice([-1.0, 1.0], (size, _HIDDEN)).astype(np.float32)
    head = np.zeros_like(signs)
    for token, following in follows.items():
        head[following] += signs[token]
    layer = "model.layers.0."
    zeros = {
        layer + "self_attn.q_proj": (256, _HIDDEN),
        layer + "self_attn.k_proj": (128, _HIDDEN),
        layer + "self_attn.v_proj": (128, _HIDDEN),
        layer + "self_attn.o_proj": (_HIDDEN, 256),
        layer + "mlp.gate_proj": (64, _HIDDEN),
        layer + "mlp.up_proj": (64, _HIDDEN),
        layer + "mlp.down_proj": (_HIDDEN, 64),
    }
    norms = ("model.norm", layer + "input_layernorm", layer + "post_attention_layernorm")
    return (
        {f"{place}.weight": mx.zeros(shape) for place, shape in zeros.items()}
        | {f"{place}.weight": mx.ones(_HIDDEN) for place in norms}
        | {"model.embed_tokens.weight": mx.array(signs), "lm_head.weight": mx.array(head)}
    )


def _write(folder, file, value):
    (folder / file).write_text(json.dumps(value), encoding="utf-8")
