"""Requests as Continue and Open WebUI send them. Each fixture names the page that documents what is
sent, and the public source that gives it its shape."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest

import running

FOLDER = Path(__file__).parent.parent / "fixtures" / "clients"
REQUESTS = [
    pytest.param(request, id=f"{file.stem}-{i}")
    for file in sorted(FOLDER.glob("*.json"))
    for i, request in enumerate(json.loads(file.read_text(encoding="utf-8")))
]


@pytest.mark.parametrize("request_of_client", REQUESTS)
def test_a_client_is_answered(url, scripted, request_of_client):
    sent = request_of_client
    server = scripted if sent.get("needs_tools") else url
    body, headers = sent["body"], sent["headers"]
    assert sent["source"].startswith("https://") and sent["shape"].startswith("https://")
    if not body["stream"]:
        answer = httpx.post(server + sent["path"], json=body, headers=headers, timeout=60)
        choice = answer.json()["choices"][0]
        assert choice["message"]["content"] and choice["finish_reason"] in ("stop", "length")
        return
    found = running.stream(server, sent["path"], body, headers=headers)
    assert found[-1] == "[DONE]"
    choices = [choice for event in found[:-1] for choice in event["choices"]]
    key = "delta" if "messages" in body else "text"
    parts = [choice[key] for choice in choices]
    text = "".join(part if key == "text" else part.get("content") or "" for part in parts)
    assert sum(choice["finish_reason"] is not None for choice in choices) == 1
    stops = body.get("stop", [])
    assert text or (any(stops) and not any(stop in text for stop in stops))
    assert ("usage" in found[-2] and found[-2]["usage"] is not None) == bool(
        body.get("stream_options", {}).get("include_usage")
    )


def test_lists_of_models_as_clients_read_them(url):
    """Open WebUI takes data[].id for its menu, Continue's AUTODETECT too."""
    found = httpx.get(f"{url}/v1/models", headers={"Authorization": "Bearer none"}).json()
    assert found["object"] == "list" and [each["id"] for each in found["data"]]
