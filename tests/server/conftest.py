"""The servers that the tests share."""

from __future__ import annotations

import openai
import pytest

import running
import scripts

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


@pytest.fixture(scope="session")
def demo():
    """The demo pair's server; its drafter runs at a fixed block, so that blocks are wide."""
    with running.process("--block-size", 8) as server:
        yield server


@pytest.fixture(scope="session")
def url(demo):
    return demo.url


@pytest.fixture(scope="session")
def client(url):
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """The folder of a model that says SCRIPTS, and the pieces of each."""
    folder = tmp_path_factory.mktemp("models") / "scripted"
    return folder, scripts.save(folder, SCRIPTS, thinking="reason")


@pytest.fixture(scope="session")
def scripted(checkpoint):
    """A server of that model in blocks of five: it drafts for itself."""
    folder, _ = checkpoint
    with running.process("--model", folder, "--draft", folder, "--block-size", 5) as server:
        yield server.url


@pytest.fixture(scope="session")
def actor(scripted):
    """A client of `scripted`."""
    return openai.OpenAI(base_url=f"{scripted}/v1", api_key="none", max_retries=0, timeout=60)
