"""schemathesis against the running server and its own OpenAPI description: no 500."""

from __future__ import annotations

import subprocess
import sys

import httpx

import running


def test_no_500(tmp_path):
    with running.process("--max-tokens", 8, "--max-context", 256, "--block-size", 4) as server:
        command = [sys.executable, "-m", "schemathesis.cli", "run", f"{server.url}/openapi.json"]
        options = ["--checks", "not_a_server_error", "--phases", "examples,coverage,fuzzing"]
        options += ["--max-time", "30", "--seed", "1", "--request-timeout", "20"]
        options += ["--suppress-health-check", "all", "--generation-deterministic"]
        done = subprocess.run(
            [*command, *options], capture_output=True, text=True, timeout=170, cwd=tmp_path
        )
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
        assert "not_a_server_error" in done.stdout or "passed" in done.stdout.lower()
        # And it is alive and does its work.
        answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": "x", "max_tokens": 2})
        assert answer.json()["usage"]["completion_tokens"] == 2
    assert not any(" 500 " in line for line in server.lines["out"])
    assert len(server.lines["out"]) > 300
    assert "Traceback" not in "".join(server.lines["err"])
