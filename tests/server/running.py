"""Servers for the tests: the command itself in a process, or its parts in this one."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from types import SimpleNamespace

import httpx
import uvicorn

from dflash_native.server.app import create_app
from dflash_native.server.serving import bind
from dflash_native.server.settings import Settings


@contextmanager
def process(*arguments, log=None):
    """`dflash-native serve` at a free port: its url, its process and, once it ends, its output."""
    command = [sys.executable, "-m", "dflash_native", "serve", "--port", "0", *map(str, arguments)]
    running = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, encoding="utf-8"
    )
    lines = {"out": [], "err": []}
    threads = [
        threading.Thread(target=lines[name].extend, args=[stream], daemon=True)
        for name, stream in (("out", running.stdout), ("err", running.stderr))
    ]
    for thread in threads:
        thread.start()
    try:
        server = SimpleNamespace(
            url=_announced(running, lines["err"]), process=running, lines=lines
        )
        yield server
    finally:
        if running.poll() is None:
            running.terminate()
        try:
            running.wait(20)
        except subprocess.TimeoutExpired:
            running.kill()
            raise
        for thread in threads:
            thread.join(5)


def _announced(running, lines):
    end = time.monotonic() + 60
    while time.monotonic() < end:
        for line in list(lines):
            if found := re.search(r"at (http://\S+)/v1", line):
                return found[1]
        if running.poll() is not None:
            break
        time.sleep(0.02)
    raise AssertionError(f"the server did not start: {''.join(lines)}")


@contextmanager
def thread(worker, **settings):
    """The application over a worker of this process; gives its url."""
    listener = bind("127.0.0.1", 0)
    chosen = Settings(**{"name": "test", **settings})
    config = uvicorn.Config(create_app(worker, chosen), lifespan="off", log_level="critical")
    server = uvicorn.Server(config)
    serving = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    serving.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = server.force_exit = True
        serving.join(10)
        assert not serving.is_alive()


def until(condition, seconds=10.0):
    """Wait for what has to come true; says how long it took."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < seconds, "it did not come true"
        time.sleep(0.01)
    return time.monotonic() - start


def health(url):
    return httpx.get(f"{url}/health").json()


def idle(url):
    """Whether the worker has nothing to do."""
    worker = health(url)["worker"]
    return worker["active"] == worker["waiting"] == 0


def events(response):
    """The data of server-sent events, "[DONE]" as it stands."""
    found = []
    for line in response.iter_lines():
        if line.startswith("data: "):
            text = line.removeprefix("data: ")
            found.append(text if text == "[DONE]" else json.loads(text))
    return found


def stream(url, path, body, **options):
    """All events of a streamed request."""
    body = {**body, "stream": True}
    with httpx.stream("POST", url + path, json=body, timeout=60, **options) as response:
        assert response.status_code == 200, response.read()
        return events(response)
