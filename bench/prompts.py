"""Prompts of six kinds, for texts end to end and for recorded acceptance."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from dflash_native import demo

CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
QUESTIONS = (
    "How do I sort a list in Python?",
    "What is a hash map?",
    "Write a haiku about rain.",
    "Explain recursion to a child.",
)
PROSE = (
    "Once upon a time there was a small village at the edge of a",
    "The history of the lighthouse begins in the year when",
    "In this chapter we describe how the measurements were",
    "She opened the letter, read it twice, and",
)
JSON = (
    '[{"id": 1, "name": "a", "ok": true}, {"id": 2, "name": "b", "ok": true}, {"id": 3,',
    '{"users": [{"id": 1, "email": "a@example.com", "roles": ["admin"]}, {"id": 2,',
    '{"x": 0, "y": 0}\n{"x": 1, "y": 1}\n{"x": 2, "y": 4}\n{"x": 3,',
    '{"key_1": "value_1", "key_2": "value_2", "key_3":',
)
TEXTS = {"prose": PROSE, "chat": tuple(CHAT.format(each) for each in QUESTIONS), "json": JSON}
"""As they are, without a model's own chat template."""
KINDS = ("code", *TEXTS, "long", "agent")
LONG_TOKENS = 1800
"""Of a long prompt, about."""

_TOOL = "<tool_call>\n{}\n</tool_call>"
_FILES = ("parser.py", "lexer.py", "errors.py", "cli.py", "tests/test_parser.py")


class Prompt(NamedTuple):
    """Token ids and what they are."""

    kind: str
    name: str
    ids: list[int]


def agent(steps: int, task: str) -> str:
    """A transcript of an agent that reads files and runs tests, up to its next call."""
    turns = [f"user: {task}\n"]
    for step in range(steps):
        path = _FILES[step % len(_FILES)]
        call = {"name": "read_file", "arguments": {"path": f"src/{path}", "start": 40 * step}}
        turns.append(f"assistant: I will look at {path} next.\n{_TOOL.format(json.dumps(call))}\n")
        body = "\n".join(f"{line}: value_{line} = parse(tokens[{line}])" for line in range(6))
        turns.append(f"tool: {json.dumps({'path': path, 'lines': 6})}\n{body}\n")
    return "".join(turns) + "assistant: I will look at"


def prompts(tokenizer: Any, kinds: list[str], each: int) -> list[Prompt]:
    """`each` prompts of every kind, in a fixed order; chats by the tokenizer's own template."""
    code = [(prompt.name, prompt.text) for prompt in demo.prompts()]
    found: dict[str, list[tuple[str, list[int]]]] = {
        "code": [(name, tokenizer.encode(text)) for name, text in code],
        "long": [(f"long {i}", _long(tokenizer, code[i:] + code[:i])) for i in range(len(code))],
        "agent": [
            (f"agent {i}", tokenizer.encode(agent(4 + i, f"Make test {i} of the parser pass.")))
            for i in range(8)
        ],
    }
    for kind, texts in TEXTS.items():
        found[kind] = [(f"{kind} {i}", tokenizer.encode(text)) for i, text in enumerate(texts)]
    if getattr(tokenizer, "chat_template", None):
        found["chat"] = [
            (f"chat {i}", _templated(tokenizer, question)) for i, question in enumerate(QUESTIONS)
        ]
    return [Prompt(kind, name, list(ids)) for kind in kinds for name, ids in found[kind][:each]]


def _long(tokenizer: Any, code: list[tuple[str, str]]) -> list[int]:
    ids: list[int] = []
    for _, text in code:
        if len(ids) >= LONG_TOKENS:
            break
        ids += tokenizer.encode(text)
    return ids


def _templated(tokenizer: Any, question: str) -> list[int]:
    messages = [{"role": "user", "content": question}]
    ids: list[int] = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    return ids
