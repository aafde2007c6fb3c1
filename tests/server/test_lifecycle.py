"""The command itself: start, logs, a graceful stop, and what it says when it cannot start."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import httpx
import pytest
from typer.testing import CliRunner

import running
from dflash_native.cli import app

BODY = {"prompt": "import os\n", "max_tokens": 3000}
LONG = {"prompt": [(7 * i) % 8000 for i in range(300)], "max_tokens": 3700, "stream": True}


def in_background(function, *arguments):
    found = []
    thread = threading.Thread(target=lambda: found.append(function(*arguments)))
    thread.start()
    return thread, found


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_a_graceful_stop_drains(sent):
    with running.process("--block-size", 1) as server:
        body = {**BODY, "max_tokens": 600}
        thread, found = in_background(running.stream, server.url, "/v1/completions", body)
        running.until(lambda: not running.idle(server.url))
        with httpx.Client(base_url=server.url) as kept:
            assert kept.get("/health").status_code == 200
            server.process.send_signal(sent)
            time.sleep(0.3)
            with pytest.raises(httpx.TransportError):
                httpx.get(f"{server.url}/health")  # no new connections
        thread.join(60)
        assert server.process.wait(20) == 0
    (events,) = found
    assert events[-1] == "[DONE]" and events[-2]["choices"][0]["finish_reason"] in (
        "stop",
        "length",
    )
    assert "Traceback" not in "".join(server.lines["err"])


def test_a_stop_does_not_wait_for_ever():
    with running.process("--drain", 0.5, "--block-size", 1) as server:
        thread, found = in_background(running.stream, server.url, "/v1/completions", BODY)
        running.until(lambda: not running.idle(server.url))
        start = time.monotonic()
        server.process.terminate()
        assert server.process.wait(20) == 0 and time.monotonic() - start < 5
        thread.join(10)
    assert found[0][-1]["error"]["code"] == "shutting_down"


def test_one_line_a_request():
    with running.process() as server:
        httpx.get(f"{server.url}/health", params={"a": "b\nforged 200"})
        running.stream(server.url, "/v1/completions", {"prompt": "import os", "max_tokens": 5})
        httpx.post(f"{server.url}/v1/completions", json={"prompt": ""})
        forged = {"x-forwarded-for": "6.6.6.6 GET /forged 200", "x-forwarded-proto": "wss"}
        httpx.get(f"{server.url}/v1/models", headers=forged)
    lines = server.lines["out"]
    assert len(lines) == 4
    assert re.match(r"\S+ 127\.0\.0\.1 GET /health 200 seconds=[\d.]+$", lines[0])
    assert "POST /v1/completions 200" in lines[1] and "completion_tokens=5" in lines[1]
    assert "first_token_seconds=" in lines[1] and "complete=True" in lines[1]
    assert "POST /v1/completions 400" in lines[2]
    # Bug: the client's own X-Forwarded-For stood in the place of its address. Proof: this line
    # began "6.6.6.6 GET /forged 200 GET /v1/models 200".
    assert re.match(r"\S+ 127\.0\.0\.1 GET /v1/models 200 seconds=[\d.]+$", lines[3])


def test_logs_in_json():
    with running.process("--log-json") as server:
        answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": "x", "max_tokens": 3})
        with httpx.Client(timeout=httpx.Timeout(5, read=0.3)) as client:
            with pytest.raises(httpx.ReadTimeout):
                client.post(f"{server.url}/v1/completions", json=BODY)
        running.until(lambda: running.idle(server.url))
    found = [json.loads(line) for line in server.lines["out"]]
    first = next(line for line in found if line["path"] == "/v1/completions")
    assert first["id"] == answer.json()["id"] == answer.headers["x-request-id"]
    assert first["status"] == 200 and first["completion_tokens"] == 3 and first["complete"] is True
    left = [line for line in found if line["status"] == 499]
    assert len(left) == 1 and left[0]["complete"] is False


def test_without_its_packages():
    code = "import sys; sys.modules['fastapi'] = None; from dflash_native.cli import app; app()"
    done = subprocess.run([sys.executable, "-c", code, "serve"], capture_output=True, text=True)
    assert done.returncode == 1 and "pip install fastapi uvicorn" in done.stderr
    assert "Traceback" not in done.stderr


def start(*arguments):
    command = [sys.executable, "-m", "dflash_native", "serve", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_a_port_that_is_taken():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = start("--port", taken.getsockname()[1])
    assert done.returncode == 1 and "Address already in use" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_model_that_is_not_there():
    """The process ended by an abort (-6): the worker's thread was not waited for."""
    done = start("--port", 0, "--model", "/no/such")
    assert done.returncode == 1 and "there is no folder '/no/such'" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (["--draft", "/no/such"], 2, "only with --model"),
        (["--parallel", 0], 2, "--parallel of at least 1"),
        (["--queue", -1], 2, "--queue of at least 0"),
        (["--temperature", 3], 2, "--temperature in 0 … 2"),
        (["--max-context", 1], 2, "--max-context of at least 2"),
        # inf and nan were an OverflowError once all was loaded, or each request's 504.
        (["--drain", "inf"], 2, "--drain of at least 0"),
        (["--drain", "nan"], 2, "--drain of at least 0"),
        (["--timeout", "inf"], 2, "--timeout of at least 1"),
        (["--timeout", "nan"], 2, "--timeout of at least 1"),
        (["--api-key", ""], 2, "--api-key"),
        (["--api-key", "key "], 2, "--api-key"),  # no header could have matched it
        (["--block-size", 99], 2, "--block-size"),
        (["--host", "256.1.1.1"], 1, ""),
    ],
)
def test_what_it_cannot_start_with(arguments, code, sentence):
    done = CliRunner().invoke(app, ["serve", "--port", "0", *map(str, arguments)])
    assert done.exit_code == code, done.stderr
    assert sentence in " ".join(done.stderr.split()) and "Traceback" not in done.stderr


def test_flags_are_seen(tmp_path):
    arguments = ["--name", "mine", "--max-context", 64, "--temperature", 1.0, "--no-exact"]
    arguments += ["--block-size", 3]
    with running.process(*arguments, "--dtype", "bfloat16", "--host", "0.0.0.0") as server:
        url = server.url.replace("0.0.0.0", "127.0.0.1")
        (model,) = httpx.get(f"{url}/v1/models").json()["data"]
        assert model["id"] == "mine" and model["context_length"] == 64
        body = {"prompt": "import os\n", "max_tokens": 20}
        answers = [httpx.post(f"{url}/v1/completions", json=body).json() for _ in range(3)]
        assert len({answer["choices"][0]["text"] for answer in answers}) > 1
        assert answers[0]["usage"]["speculation"]["exact"] is False
        assert len(answers[0]["usage"]["speculation"]["drafted_at"]) == 2
        long = httpx.post(f"{url}/v1/completions", json={"prompt": "import os\n"}).json()
        assert long["usage"]["total_tokens"] <= 64
    assert any("--api-key closes it" in line for line in server.lines["err"])


def test_limits_are_seen():
    limits = ["--timeout", 1.5, "--parallel", 1, "--queue", 0, "--prefill-step-size", 100]
    with running.process(*limits, "--block-size", 1) as server:
        with httpx.stream(
            "POST", f"{server.url}/v1/completions", json=LONG, timeout=60
        ) as response:
            refused = httpx.post(f"{server.url}/v1/completions", json=BODY)
            lines = [line for line in response.iter_lines() if line]
        assert refused.status_code == 503 and refused.headers["retry-after"]
        read = [int(line.split()[1]) for line in lines if line.endswith("prompt tokens")]
        assert read == [0, 101, 201, 300]  # one token stays pending
        assert json.loads(lines[-1].removeprefix("data: "))["error"]["code"] == "timeout"
        worker = httpx.get(f"{server.url}/status").json()["worker"]
        assert worker["parallel"] == 1 and worker["queue"] == 0


def test_another_draft_gives_the_same_text(url):
    body = {"prompt": "a = 1\na = 1\na = 1\na", "max_tokens": 32}
    with running.process("--draft", "lookup", "--block-size", 4) as server:
        ours = httpx.post(f"{server.url}/v1/completions", json=body).json()
        assert httpx.get(f"{server.url}/status").json()["draft"] == "lookup"
    theirs = httpx.post(f"{url}/v1/completions", json=body).json()
    assert ours["choices"] == theirs["choices"]
    assert ours["usage"]["speculation"] != theirs["usage"]["speculation"]
