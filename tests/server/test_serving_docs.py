"""The client of docs/serving.md, run as it is printed but for the port."""

from __future__ import annotations

import httpx

from readme import block


def test_the_client_of_the_readme(url, capsys):
    code = block("From Python")
    assert code.count("http://127.0.0.1:8080/v1") == 1
    exec(code.replace("http://127.0.0.1:8080", url), {})
    names: dict = {}
    exec(code[code.index("prompt = ") : code.index("asked = ")], names)
    messages = [{"role": "user", "content": names["prompt"]}]
    body = {"messages": messages, "max_tokens": 64}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body).json()
    printed = capsys.readouterr().out
    assert printed.startswith(answer["choices"][0]["message"]["content"])
    assert "\n64 tokens, " in printed
