"""The servers that the tests share."""

from __future__ import annotations

import openai
import pytest

import running
import scripts


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
    return folder, scripts.save(folder, scripts.SCRIPTS, thinking="reason")


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
