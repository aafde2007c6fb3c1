"""A client that does not read its stream."""

from __future__ import annotations

import asyncio

import pytest

from dflash_native.server import streams
from dflash_native.server.jobs import Done, Progress


@pytest.mark.parametrize("reads", [0, 1, 2])
def test_a_stream_that_nobody_reads_ends_with_its_time(monkeypatch, caplog, reads):
    """Bug: a stream waited for its reader without end, with all that the worker had brought for it.

    Proof: with a `send` that never returns it was still open after 10 s, at a timeout of 0.1 s.
    """
    monkeypatch.setattr(streams, "_LAST_WORD", 0.1)
    sent = []

    async def send(message):
        if len(sent) == reads:
            await asyncio.Event().wait()
        sent.append(message["type"])

    async def receive():
        await asyncio.Event().wait()

    async def stream():
        exchange = streams.Exchange([], timeout=0.1)
        exchange.watch(receive)
        for _ in range(3):
            exchange.job.send(Progress(0, 1))
        exchange.job.send(Done())
        first = await exchange.next()
        response = streams.EventStream(exchange, None, first, include_usage=False)
        await asyncio.wait_for(response({}, receive, send), 10)
        return exchange.job

    job = asyncio.run(stream())
    assert len(sent) == reads and job.cancelled
    assert "reads too slowly" in caplog.text
