"""One thread, many requests: turns, the queue, departures, death and the end."""

from __future__ import annotations

import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

import running
from dflash_native import load_demo
from dflash_native.sampling import Sampling
from dflash_native.server.choices import Engine
from dflash_native.server.jobs import Choice, Done, Failed, Job, Piece, Progress
from dflash_native.server.prompts import Prompt
from dflash_native.server.worker import Refused, Worker
from dflash_native.session import Session
from dflash_native.targets import Target


def load():
    model, tokenizer, drafter = load_demo()
    return Engine(target=Target(model), tokenizer=tokenizer, drafter=drafter, block_size=4)


@pytest.fixture
def worker(request):
    """A started worker of two turns and a queue of two; it is stopped at the end."""
    worker = Worker(load, **{"parallel": 2, "queue": 2, **getattr(request, "param", {})})
    worker.start()
    yield worker
    worker.stop()
    worker.join(20)
    assert not worker._thread.is_alive()


class Listener:
    """A job, and its events as they come."""

    def __init__(self, length=8, max_tokens=32, timeout=60.0, tokens=None, count=1):
        prompt = Prompt(tokens or [(7 * i) % 8000 for i in range(length)], [])
        choices = [
            Choice(index=i, prompt=prompt, sampling=Sampling(), max_tokens=max_tokens)
            for i in range(count)
        ]
        self.events, self.seen = [], threading.Condition()
        self.job = Job(choices, timeout, self.deliver)

    def deliver(self, event):
        with self.seen:
            self.events.append((time.monotonic(), event))
            self.seen.notify_all()

    def wait(self, kind, count=1, timeout=30):
        with self.seen:
            enough = self.seen.wait_for(lambda: len(self.of(kind)) >= count, timeout)
        assert enough, self.events
        return self.of(kind)

    def of(self, kind):
        return [event for _, event in self.events if isinstance(event, kind)]

    def times(self, kind):
        return [at for at, event in self.events if isinstance(event, kind)]


def test_two_have_their_turns_and_the_third_waits(worker):
    first, second, third = (Listener(max_tokens=n) for n in (60, 60, 5))
    for listener in (first, second, third):
        worker.submit(listener.job)
    for listener in (first, second, third):
        listener.wait(Done)
    # Round by round: neither is ever more than a few ahead.
    merged = sorted(
        [(at, 0) for at in first.times(Piece)] + [(at, 1) for at in second.times(Piece)]
    )
    ahead = 0
    for _, which in merged:
        ahead += 1 if which == 0 else -1
        assert abs(ahead) <= 3
    assert third.times(Progress)[0] > min(first.times(Done)[0], second.times(Done)[0])
    for listener in (first, second, third):
        assert len(listener.of(Done)) == 1 and isinstance(listener.events[-1][1], Done)


def test_a_long_prompt_does_not_stop_the_others(worker):
    """One piece of a prompt, one round, one piece ...: nobody waits for all of it."""
    talker, reader = Listener(max_tokens=400), Listener(length=3000, max_tokens=2)
    worker.submit(talker.job)
    talker.wait(Piece, 3)
    worker.submit(reader.job)
    reader.wait(Done)
    begin, end = reader.times(Progress)[0], reader.times(Progress)[-1]
    assert len(reader.of(Progress)) == 7  # 3000 tokens in pieces of 512
    assert sum(begin < at < end for at in talker.times(Piece)) >= 4
    talker.job.cancel()


def test_the_queue_is_full(worker):
    listeners = [Listener(max_tokens=2000) for _ in range(4)]
    for listener in listeners:
        worker.submit(listener.job)
    running.until(lambda: worker.active == 2 and worker.waiting == 2)
    with pytest.raises(Refused) as refused:
        worker.submit(Listener().job)
    assert refused.value.code == "queue_full"
    listeners[3].job.cancel()  # a place in the queue is free as soon as somebody leaves
    late = Listener(max_tokens=3)
    worker.submit(late.job)
    for listener in listeners:
        listener.job.cancel()
    late.wait(Done)
    assert not listeners[2].of(Piece)  # left before its turn
    assert worker.totals.requests == {"cancelled": 4, "done": 1}


def test_many_at_once_find_the_free_places(worker):
    """As many as turns and queue together, although the worker has begun none of them."""
    listeners = [Listener(max_tokens=3) for _ in range(4)]
    worker._changed.acquire()  # the worker cannot begin
    try:
        for listener in listeners:
            worker.submit(listener.job)
        with pytest.raises(Refused):
            worker.submit(Listener().job)
    finally:
        worker._changed.release()
    for listener in listeners:
        listener.wait(Done)


def test_a_departure_in_the_prompt_ends_it_after_its_piece(worker):
    reader = Listener(length=4000)
    worker.submit(reader.job)
    reader.wait(Progress, 3)
    reader.job.cancel()
    running.until(lambda: worker.active == 0)
    assert worker.totals.prompt_tokens <= 4 * 512 and not reader.of(Done)


def test_a_departure_ends_it_within_a_round(worker):
    talker = Listener(max_tokens=1000)
    worker.submit(talker.job)
    talker.wait(Piece, 5)
    rounds = worker.totals.rounds
    talker.job.cancel()
    running.until(lambda: worker.active == 0)
    assert worker.totals.rounds <= rounds + 2
    assert worker.totals.requests == {"cancelled": 1}


def test_a_request_has_its_time(worker):
    slow = Listener(max_tokens=100_000, timeout=0.3)
    worker.submit(slow.job)
    (failed,) = slow.wait(Failed)
    assert failed.status == 504 and failed.code == "timeout"
    assert 0.2 < time.monotonic() - slow.job.arrived < 3


def test_a_request_that_waits_has_its_time_too(worker):
    """It was looked at only once it had its turn, behind requests that took minutes."""
    talkers = [Listener(max_tokens=100_000) for _ in range(2)]
    waiting = Listener(timeout=0.3)
    for listener in (*talkers, waiting):
        worker.submit(listener.job)
    assert waiting.wait(Failed, timeout=3)[0].code == "timeout"
    assert worker.active == 2 and worker.waiting == 0
    for talker in talkers:
        talker.job.cancel()


def test_a_failing_request_ends_alone(worker, monkeypatch):
    begun = Session.prefill

    def prefill(self, tokens, progress=None):
        if len(tokens) == 5:
            raise ValueError("broken")
        begun(self, tokens, progress)

    monkeypatch.setattr(Session, "prefill", prefill)
    good, bad = Listener(max_tokens=20), Listener(length=5)
    worker.submit(good.job)
    worker.submit(bad.job)
    assert bad.wait(Failed)[0].status == 500 and good.wait(Done)
    assert worker.fault() is None and "broken" not in bad.of(Failed)[0].message


def test_the_worker_dies_and_its_streams_end(worker, monkeypatch):
    """Each open stream gets an error event, and /health says so: it was HTTP's pulse only."""
    rounds, die = Session.round, threading.Event()

    def dying(self, limit=None):
        if die.is_set():
            raise SystemExit("the device is gone")
        return rounds(self, limit)

    with running.thread(worker, parallel=2) as url:
        assert httpx.get(f"{url}/health").json()["status"] == "ok"
        monkeypatch.setattr(Session, "round", dying)
        body = {"prompt": "import os\n", "max_tokens": 4000}
        with ThreadPoolExecutor(4) as pool:
            streams = [pool.submit(running.stream, url, "/v1/completions", body) for _ in range(2)]
            running.until(lambda: worker.active == 2 and worker.totals.generated_tokens > 20)
            queued = [pool.submit(httpx.post, f"{url}/v1/completions", json=body) for _ in range(2)]
            running.until(lambda: worker.waiting == 2)
            die.set()
            for found in (stream.result() for stream in streams):
                errors = [event for event in found if "error" in event]
                assert len(errors) == 1 and found[-1] is errors[0]  # and no [DONE]
                assert errors[0]["error"]["code"] == "worker_dead"
            for answer in (each.result() for each in queued):
                assert answer.status_code == 503
        health = httpx.get(f"{url}/health")
        assert health.status_code == 503 and "ended" in health.json()["reason"]
        refused = httpx.post(f"{url}/v1/completions", json=body)
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "worker_dead"
        assert "dflash_native_worker_alive 0.0" in httpx.get(f"{url}/metrics").text


def test_a_worker_that_hangs_shows(worker, monkeypatch):
    hold, rounds = threading.Event(), Session.round

    def hanging(self, limit=None):
        hold.wait(20)
        return rounds(self, limit)

    monkeypatch.setattr("dflash_native.server.worker.STALLED", 1.5)
    monkeypatch.setattr(Session, "round", hanging)
    with running.thread(worker) as url:
        time.sleep(2.5)  # an idle worker gives signs
        assert httpx.get(f"{url}/health").status_code == 200
        listener = Listener(max_tokens=2)
        worker.submit(listener.job)
        running.until(lambda: httpx.get(f"{url}/health").status_code == 503)
        assert "no sign" in httpx.get(f"{url}/health").json()["reason"]
        hold.set()
        listener.wait(Done)
        assert httpx.get(f"{url}/health").status_code == 200


def test_what_cannot_be_loaded_is_told_to_the_caller():
    def fail():
        raise FileNotFoundError("no such model")

    with pytest.raises(FileNotFoundError, match="no such model"):
        Worker(fail).start()


def test_a_stop_lets_the_open_ones_end(worker):
    first, second, waiting = (Listener(max_tokens=40) for _ in range(3))
    for listener in (first, second, waiting):
        worker.submit(listener.job)
    first.wait(Piece)
    worker.stop(drain=30)
    with pytest.raises(Refused, match="shutting down"):
        worker.submit(Listener().job)
    for listener in (first, second, waiting):
        listener.wait(Done)
    worker.join(10)
    assert worker.fault() is None


def test_a_stop_has_its_limit(worker):
    endless = Listener(max_tokens=1_000_000)
    worker.submit(endless.job)
    endless.wait(Piece)
    worker.stop(drain=0.3)
    (failed,) = endless.wait(Failed)
    assert failed.status == 503 and failed.code == "shutting_down"
    assert not endless.of(Done)


# Over HTTP.


@pytest.mark.parametrize("worker", [{"parallel": 1, "queue": 1}], indirect=True)
def test_503_with_retry_after(worker):
    with running.thread(worker) as url, ThreadPoolExecutor(2) as pool:
        body = {"prompt": "import os\n", "max_tokens": 2000}
        streams = []
        for _ in range(2):
            streams.append(pool.submit(running.stream, url, "/v1/completions", body))
            running.until(lambda: worker.active + worker.waiting == len(streams))
        refused = httpx.post(f"{url}/v1/completions", json=body)
        assert refused.status_code == 503 and int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["code"] == "queue_full"
        assert httpx.get(f"{url}/health").status_code == 200  # full is not ill
        worker.stop()
        assert streams[0].result()[-1]["error"]["code"] == "shutting_down"
        with pytest.raises(AssertionError, match="shutting down"):  # 503: it had not begun
            streams[1].result()


@pytest.mark.parametrize("streaming", [False, True])
def test_a_client_that_leaves_while_its_prompt_is_read(worker, streaming):
    with running.thread(worker) as url:
        body = {"prompt": [(7 * i) % 8000 for i in range(4000)], "stream": streaming}
        if streaming:  # the first line tells of the prompt's first piece
            with httpx.stream("POST", f"{url}/v1/completions", json=body) as response:
                assert next(response.iter_lines()).startswith(": ")
        else:
            with pytest.raises(httpx.ReadTimeout):
                timeout = httpx.Timeout(5, read=0.25)
                httpx.post(f"{url}/v1/completions", json=body, timeout=timeout)
        assert running.until(lambda: worker.active == 0) < 1.5
        assert worker.totals.prompt_tokens < 4000 and not worker.totals.generated_tokens


def test_a_silent_stream_is_kept_alive(worker, monkeypatch):
    rounds = Session.round

    def slow(self, limit=None):
        time.sleep(0.5)
        return rounds(self, limit)

    monkeypatch.setattr("dflash_native.server.streams._KEEPALIVE", 0.1)
    monkeypatch.setattr(Session, "round", slow)
    with running.thread(worker) as url:
        body = {"prompt": "def f(", "max_tokens": 1, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body) as response:
            lines = list(response.iter_lines())
    assert lines.count(": waiting") >= 2 and lines.count("data: [DONE]") == 1


def test_a_body_has_its_time(worker, monkeypatch):
    monkeypatch.setattr("dflash_native.server.limits.BODY_SECONDS", 0.3)
    with running.thread(worker) as url:
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=10) as connection:
            head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: 100\r\n"
            connection.sendall(f"{head}Content-Type: application/json\r\n\r\n{{".encode())
            assert connection.recv(4096).startswith(b"HTTP/1.1 408")


def test_the_events_of_speculation_are_the_text(worker):
    with running.thread(worker) as url:
        body = {"prompt": "def quicksort(", "max_tokens": 40}
        options = {"stream_options": {"include_speculation": True}}
        found = running.stream(url, "/v1/completions", body | options)[:-1]
        text = "".join(event["choices"][0]["text"] for event in found)
        tokens = [token for event in found for token in event["speculation"]["tokens"]]
        assert "".join(token["text"] for token in tokens) == text and len(tokens) == 40
        accepted = sum(event["speculation"]["accepted"] for event in found)
        assert accepted - 4 <= sum(token["draft"] for token in tokens) <= accepted
        assert all(
            "speculation" not in event for event in running.stream(url, "/v1/completions", body)
        )


def test_metrics_agree_with_the_answers(worker):
    with running.thread(worker) as url:
        usages = []
        for prompt in ("import os\n", "def f(x):\n"):
            answer = httpx.post(f"{url}/v1/completions", json={"prompt": prompt, "max_tokens": 30})
            usages.append(answer.json()["usage"])
        lines = httpx.get(f"{url}/metrics").text.splitlines()
        found = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))

        def value(name):
            return float(found[f"dflash_native_{name}"])

        for name in ("prompt", "generated"):
            key = {"prompt": "prompt_tokens", "generated": "completion_tokens"}[name]
            assert value(f"{name}_tokens_total") == sum(usage[key] for usage in usages)
        speculation = [usage["speculation"] for usage in usages]
        assert value("rounds_total") == sum(each["rounds"] for each in speculation)
        for position in (1, 2, 3):
            for name in ("drafted", "accepted"):
                counted = sum(each[f"{name}_at"][position - 1] for each in speculation)
                assert value(f'{name}_total{{position="{position}"}}') == counted
        assert value("memory_bytes" + '{kind="active"}') > 1e6
        assert value('requests_total{how="done"}') == 2
        assert value("first_token_seconds_count") == 2
        assert value('request_seconds_count{path="/v1/completions",status="200"}') == 2
        status = httpx.get(f"{url}/status").json()
        assert json.dumps(status["totals"]["accepted_at"]) and status["worker"]["active"] == 0
