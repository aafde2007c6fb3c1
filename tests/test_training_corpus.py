"""The corpus's licence check, filters and split, and its tokenizer, on wheels made here."""

from __future__ import annotations

import json
import lzma
import random
import subprocess
import sys
import zipfile

import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast
from transformers.models.qwen3_5.tokenization_qwen3_5 import PRETOKENIZE_REGEX
from typer.testing import CliRunner

from dflash_native.training import corpus, licences, tokenizer
from dflash_native.training.__main__ import app
from dflash_native.training.corpus import Builder, Source
from dflash_native.training.documents import Document, Wheel, chats, clean, html_text, is_ordinary

MIT = "MIT License\n\nPermission is hereby granted, free of charge, to any person obtaining a copy"
GPL = "GNU GENERAL PUBLIC LICENSE\nVersion 3, 29 June 2007"
PYTHON = (
    "A. HISTORY OF THE SOFTWARE\nAll releases are GPL-compatible.\nB. TERMS AND CONDITIONS\n"
    "PYTHON SOFTWARE FOUNDATION LICENSE VERSION 2\nPython Software Foundation License\n"
)


def module(number: int, words: int = 12) -> str:
    """An ordinary module unlike any other number's."""
    draw = random.Random(number)
    lines = [f'"""Module {number}."""', ""]
    for index in range(words):
        name = "".join(draw.choice("abcdefghijklmnop") for _ in range(8))
        lines += [f"def {name}(first, second):", f'    """Add {name} to the {name} of all."""']
        lines += [
            f"    {name}_of_{name} = first + second * {index % 7}",
            f"    return {name}_of_{name}",
        ]
        lines += ["", ""]
    return "\n".join(lines)


def wheel(folder, files, licence=MIT, metadata="License-Expression: MIT\n", name="thing"):
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for inside, text in files.items():
            archive.writestr(inside, text)
        head = f"Metadata-Version: 2.4\nName: {name}\nVersion: 1.0\n{metadata}\n"
        archive.writestr(f"{name}-1.0.dist-info/METADATA", head)
        if licence is not None:
            archive.writestr(f"{name}-1.0.dist-info/licenses/LICENSE", licence)
    return path


def test_a_permissive_wheel_is_accepted(tmp_path):
    assert Wheel(wheel(tmp_path, {})).licence() == {"MIT"}
    text = "Classifier: License :: OSI Approved :: MIT License\n"
    assert Wheel(wheel(tmp_path, {}, metadata=text)).licence() == {"MIT"}
    text = "License: Apache License 2.0\n"
    assert Wheel(wheel(tmp_path, {}, metadata=text)).licence() == {"Apache-2.0"}
    assert Wheel(wheel(tmp_path, {}, licence=PYTHON)).licence() == {"MIT"}


@pytest.mark.parametrize(
    "licence, metadata",
    [
        (GPL, "License-Expression: MIT\n"),
        (PYTHON + GPL, "License-Expression: MIT\n"),
        (MIT, "License-Expression: GPL-3.0-or-later\n"),
        (MIT, "License-Expression: MIT AND MPL-2.0\n"),
        (MIT, "Classifier: License :: OSI Approved :: GNU General Public License (GPL)\n"),
        (MIT, "License: GPL\n"),
        (MIT, "License: ask us\n"),
        (MIT, ""),
        ("All rights reserved.", "License-Expression: MIT\n"),
        (None, "License-Expression: MIT\n"),
    ],
)
def test_a_wheel_is_refused_for_its_metadata_and_for_its_licence_file(licence, metadata, tmp_path):
    path = wheel(tmp_path, {}, licence, metadata)
    with pytest.raises(licences.LicenceError, match=r"^\[licences\] expected "):
        Wheel(path).licence()


@pytest.mark.parametrize(
    "line",
    [
        "# This file is distributed under the GNU General Public License",
        "# SPDX-License-Identifier: GPL-2.0-only",
        "# SPDX-License-Identifier: LicenseRef-Proprietary",
        "# licensed under LGPLv3",
        "# This Source Code Form is subject to the Mozilla Public License, v. 2.0",
        "# MPL 2.0",
        "text = 'CC-BY-SA 4.0'",
    ],
)
def test_a_file_that_names_another_licence_is_dropped(line):
    text = module(0)
    assert licences.refusal(text) is None
    assert licences.refusal("import matplotlib as mpl\n# SPDX-License-Identifier: MIT\n") is None
    builder = Builder()
    builder.add([Document("a/b.py", "code", f"{text}\n{line}\n")], 1e9)
    assert builder.counts["names another licence"] == 1 and not builder.train + builder.held
    builder.add([Document("a/b.py", "code", text)], 1e9)
    assert len(builder.train + builder.held) == 1


def test_texts_are_cleaned_and_odd_ones_are_left_out():
    body = module(1)
    header = "# Copyright 2020 Somebody\n# Licensed under the Apache License\n\n"
    assert clean(header + body) == clean(body) == body.strip("\n") + "\n"
    assert clean("# just a comment\nx = 1\n") == "# just a comment\nx = 1\n"
    assert clean("if x:\r\n\ty\n") == "if x:\n    y\n"
    assert is_ordinary(body)
    for odd in (
        "x = 1\n",
        body + "y" * 401,
        body + "1234567890\n" * 400,
        body + "\u4e2d\u6587\n" * 200,
        body + "<|im_start|>",
        "z" * 95 + "\n" + ("w" * 95 + "\n") * 9,
    ):
        assert not is_ordinary(odd)
    html = "<p>Creates a <code>stack</code>.</p><ul><li>One</li><li>Two\n parts</li></ul>"
    assert html_text(html) == "Creates a stack.\n- One\n- Two parts"


def test_near_duplicates_and_long_sources_are_cut_and_tests_come_last():
    builder = Builder()
    same = module(2).replace("Module 2", "Module two")
    documents = [Document(f"s/{i}.py", "code", module(i)) for i in range(1, 8)]
    kept = builder.add([*documents, Document("s/copy.py", "code", same)], 1e9)
    assert builder.counts["near-duplicates"] == 1
    assert kept == sum(len(d.text) for d in builder.train + builder.held)
    builder = Builder()
    test = Document("s/tests/test_a.py", "code", module(9))
    builder.add([test, *documents], sum(len(d.text) for d in documents) - 10)
    assert builder.counts["over the source's limit"] == 1
    assert all(not d.is_test for d in builder.train + builder.held)
    assert test.is_test and not Document("s/latest.py", "code", "").is_test


def test_held_out_texts_share_few_lines_with_training_texts():
    builder = Builder()
    builder.add([Document(f"s/{i}.py", "code", module(i)) for i in range(300)], 1e9)
    held = len(builder.held)
    assert 2 <= held <= 12
    lines = module(1000).split("\n")
    builder.train.append(Document("t.py", "code", "\n".join(lines[:30])))
    builder.held.append(Document("h.py", "code", "\n".join(lines)))
    builder.finish()
    assert len(builder.held) == held
    assert builder.counts["held-out texts like training texts"] == 1
    assert {d.kind for d in builder.train} == {"code", "chat"}


def test_chats_are_made_of_documented_functions():
    document = Document("a.py", "code", module(3))
    found = list(chats(document, random.Random(0)))
    assert len(found) == 12
    for text in found:
        assert text.startswith("<|im_start|>user\n")
        assert text.count("<|im_end|>\n") == 2 and "<|im_start|>assistant\n" in text
    assert sum("```python\ndef " in t.partition("assistant")[2] for t in found) > 5
    assert list(chats(Document("a.py", "code", "def broken(:"), random.Random(0))) == []


def make_sources(folder, files):
    path = wheel(folder / "wheels", files)
    return Source("thing", "1.0", "MIT", path.name, corpus.sha256(path), 5.0)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run's folder with corpus and tokenizer of a wheel of 400 modules."""
    folder = tmp_path_factory.mktemp("run")
    files = {f"thing/m{i}.py": module(i) for i in range(400)}
    files |= {f"thing/doc{i}.rst": module(1000 + i).replace("def ", "The ") for i in range(60)}
    source = make_sources(folder, files)
    corpus.build([source], folder / "wheels", None, folder)
    tokenizer.build(folder, 300 + len(tokenizer.SPECIAL), 10**7)
    return folder


def test_the_built_corpus_can_be_read_and_its_figures_add_up(run):
    train = list(corpus.read_documents(run / "train.jsonl.xz"))
    held = list(corpus.read_documents(run / "held.jsonl.xz"))
    figures = json.loads((run / "corpus.json").read_text())
    assert (len(train), len(held)) == (figures["train_documents"], figures["held_documents"])
    assert not {d.path for d in train} & {d.path for d in held}
    assert figures["sources"][0]["source"] == "thing-1.0"


def test_a_source_whose_file_or_licence_is_another_is_refused(tmp_path):
    source = make_sources(tmp_path, {"thing/a.py": module(0)})
    corpus.open_source(source, tmp_path / "wheels", None)
    other = Source(**{**vars(source), "sha256": "0" * 64})
    with pytest.raises(ValueError, match="expected SHA-256 0000"):
        corpus.open_source(other, tmp_path / "wheels", None)
    other = Source(**{**vars(source), "licence": "Apache-2.0"})
    with pytest.raises(licences.LicenceError, match=r"thing-1.0 under Apache-2.0 but got MIT"):
        corpus.open_source(other, tmp_path / "wheels", None)


def test_a_list_is_made_of_wheels_and_says_which_are_refused(tmp_path):
    good = wheel(tmp_path / "wheels", {})
    wheel(tmp_path / "wheels", {}, licence=GPL, name="other")
    out = tmp_path / "sources.json"
    arguments = ["sources", "--wheels", str(tmp_path / "wheels"), "--out", str(out)]
    found = CliRunner().invoke(app, arguments)
    assert "1 sources, 1 wheels refused" in found.output
    assert "other-1.0-py3-none-any.whl: [licences] expected a permissive text" in found.output
    listed = corpus.read_sources(out)
    assert listed == [Source("thing", "1.0", "MIT", good.name, corpus.sha256(good), 4.0)]


def test_the_list_of_sources_names_permissive_licences_only():
    sources = corpus.read_sources()
    assert len({s.name for s in sources}) == len(sources) > 40
    for source in sources:
        licences.check_expression(source.licence, source.label)
        assert (len(source.sha256) == 64 and source.file) or source.name == "cpython"


def test_tokens_decode_to_the_texts_and_end_each(run):
    coder = Tokenizer.from_file(str(run / "tokenizer" / "tokenizer.json"))
    texts = [d.text for d in corpus.read_documents(run / "train.jsonl.xz")]
    tokens = tokenizer.read_tokens(run / "train.tokens.xz")
    figures = json.loads((run / "tokens.json").read_text())
    assert len(tokens) == figures["train"]["tokens"]
    texts.sort(key=lambda text: not text.startswith("<|im_start|>") and "\ndef " in text)
    decoded = coder.decode(tokens.tolist(), skip_special_tokens=False).split("<|endoftext|>")
    assert decoded[:-1] == texts and decoded[-1] == ""
    few, _ = tokenizer.encode(coder, texts, len(tokens) // 2)
    assert (
        len(tokens) // 3 < len(few) <= len(tokens) // 2
        and few.tolist() == tokens[: len(few)].tolist()
    )
    raw = lzma.decompress((run / "train.tokens.xz").read_bytes())
    assert len(raw) == 2 * len(tokens)


def test_special_tokens_are_the_last_ids_and_the_chat_template_is_that_of_the_training_text(run):
    loaded = PreTrainedTokenizerFast.from_pretrained(run / "tokenizer")
    assert [loaded.convert_tokens_to_ids(s) for s in tokenizer.SPECIAL] == list(range(300, 316))
    assert loaded.eos_token == "<|endoftext|>" and loaded.mask_token_id == 303
    messages = [{"role": "user", "content": "def a"}, {"role": "assistant", "content": "b\n"}]
    ids = loaded.apply_chat_template(messages, tokenize=True, return_dict=False)
    text = "<|im_start|>user\ndef a<|im_end|>\n<|im_start|>assistant\nb\n<|im_end|>\n"
    assert ids == loaded.encode(text)
    assert ids.count(301) == ids.count(302) == 2
    start = loaded.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
    assert text.startswith(start) and start.endswith("assistant\n")


def test_the_core_imports_nothing_of_the_training():
    script = (
        "import sys, dflash_native.cli, dflash_native.generation, dflash_native.hub\n"
        "print(*(name for name in sys.modules if 'training' in name and 'dflash' in name), sep=',')"
    )
    command = [sys.executable, "-c", script]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "\n"
    script += "\nimport dflash_native.training"
    command = [sys.executable, "-c", script + "; print(sys.modules['dflash_native.training'])"]
    assert "training" in subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_the_splitting_rule_is_qwens():
    assert tokenizer.SPLIT == PRETOKENIZE_REGEX
