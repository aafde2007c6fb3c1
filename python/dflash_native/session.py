"""One request: prefill, rounds of draft and verify, and a rollback that is right after every stop.

    with Session(target, drafter) as session:
        session.prefill(prompt)
        while not done:
            tokens = session.round().tokens

The *pending* token is the newest committed one. It is in no cache yet and is input 0 of the next
round. A round verifies it with K drafts after it; of the 1 + K inputs as many are kept as tokens
were emitted, so whoever stops inside a block calls `rewind` and everything ends just before the
last emitted token, which is pending.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import TracebackType
from typing import Literal, cast

import mlx.core as mx

from ._arguments import integer, token_ids
from .block import Drafts, Verify, accept, drafts_of
from .cache import Cache
from .checkpoint import Checkpoint, load_checkpoint, take_checkpoint
from .drafters.protocol import Drafter, Resumable
from .policy import Choice, Costs, WidthPolicy
from .rounds import Round, Stats
from .sampling import Sampler, Sampling
from .targets import Target


class Session:
    """One request on a target, with a drafter or without one (plain decoding).

    Args:
        target: what decides about every token.
        drafter: proposes; None decodes plainly, through the same operations.
        block_size: inputs of a verify, 1 … the drafter's `max_drafts` + 1 (the default), or "auto":
            each round as many as should pay, plain steps included. The drafter runs at its own
            block in any case and its proposals are cut.
        costs: of a round by width, for "auto"; None takes what is cached for this target, drafter
            and machine, and measures it where nothing is, which takes some seconds.
        sampling: how tokens are chosen; None takes the argmax, the lowest id where two are equal.
        prefill_step_size: most inputs of one prefill call, as in mlx-lm.

    Every emitted token is the target's own choice: the same as in plain decoding, but for drafters
    that give a `Proposal`, with which it has the target's distribution. Not for two threads at
    once. Raises ValueError where drafter and target do not fit.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None = None,
        *,
        block_size: int | Literal["auto"] | None = None,
        costs: Costs | None = None,
        sampling: Sampling | None = None,
        prefill_step_size: int = 2048,
    ) -> None:
        if not isinstance(target, Target):
            raise TypeError(f"[Session] expected a Target but got {type(target).__name__}.")
        if drafter is not None and not isinstance(drafter, Drafter):
            raise TypeError(f"[Session] expected a drafter but got {type(drafter).__name__}.")
        largest = 1
        if drafter is not None:
            largest += integer("Session", "the drafter's max_drafts", drafter.max_drafts, 1)
        auto = isinstance(block_size, str) and block_size == "auto"
        if isinstance(block_size, str) and not auto:
            raise ValueError(
                f'[Session] expected block_size "auto" or a number but got {block_size!r}.'
            )
        if block_size is None or isinstance(block_size, str):
            block_size = largest
        block_size = integer("Session", "block_size", block_size)
        if not 1 <= block_size <= largest:
            raise ValueError(
                f"[Session] expected block_size in 1 … {largest} "
                f"({'no drafter' if drafter is None else 'the block of the drafter'}) "
                f"but got {block_size}."
            )
        if costs is not None and not isinstance(costs, Costs):
            raise TypeError(
                f"[Session] expected costs of type Costs but got {type(costs).__name__}."
            )
        self.target = target
        self.drafter = drafter
        self.block_size = block_size
        self.tokens: list[int] = []
        """Committed, the pending one last."""
        self.stats = Stats()
        self._prefill_step = integer("Session", "prefill_step_size", prefill_step_size, 1)
        draft = None if drafter is None else drafter.begin(target)
        self._draft = draft if block_size > 1 else None  # blocks of one are plain decoding
        self._tap_layers = () if self._draft is None or drafter is None else drafter.tap_layers
        self._cache = target.make_cache(1)
        self._round_start: int | None = None
        """Length of `tokens` before the last round, while it can be rewound."""
        self._unfed: list[tuple[mx.array, int]] = []
        """Taps of rounds and their positions, until the draft gets those that were kept."""
        self._told = 0
        """Of `tokens`, those that the draft has observed."""
        self._in_flight: list[Verify] = []
        self._finishing: tuple[Verify, list[int], list[int], Stats] | None = None
        """A round that was read: its verify, its tokens, `tokens` before it, `stats` after it."""
        self._closed = False
        self._broken: str | None = None
        self.sampling = sampling
        self._policy: WidthPolicy | None = None
        if auto and self._draft is not None and drafter is not None:
            self._policy = WidthPolicy(costs or _measured(target, drafter), block_size)

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def sampling(self) -> Sampling | None:
        """How tokens are chosen; another one may be set between rounds."""
        return self._sampling

    @sampling.setter
    def sampling(self, sampling: Sampling | None) -> None:
        if sampling is not None and not isinstance(sampling, Sampling):
            raise TypeError(f"[Session] expected a Sampling but got {type(sampling).__name__}.")
        sampler = None
        if sampling is not None and not sampling.is_argmax:
            sampler = Sampler(sampling, self.target.vocab_size)
        self._drop_in_flight()
        self._sampling, self._sampler = sampling, sampler

    @property
    def pending(self) -> int | None:
        """The newest committed token; None before the first prefill, also after a restore."""
        covered = self._in_flight[0].position if self._in_flight else self._cache.lengths[0]
        return self.tokens[covered] if covered < len(self.tokens) else None

    @property
    def cache(self) -> Cache:
        """The target's cache: it covers `tokens` except the pending one. To be read only."""
        self._drop_in_flight()
        return self._cache

    def prefill(
        self, tokens: Sequence[int] | mx.array, progress: Callable[[int, int], None] | None = None
    ) -> None:
        """Commit `tokens` after what there is; the last one stays pending.

        A second prefill (a chat's next turn) feeds the pending token and then the new ones.
        `progress(done, total)` is called before the first chunk and after each. Raises ValueError
        for an empty prompt and for ids outside the vocabulary. After an exception from `progress`
        the session holds the part that was done.
        """
        self._check_open()
        new = token_ids("prefill", tokens, self.target.vocab_size)
        self._settle()
        start = self._cache.lengths[0]
        feed = self.tokens[start:] + new
        kept = self.tokens[:start]
        total, done = len(feed) - 1, 0
        try:
            self._cache.flush()
            if progress is not None:
                progress(0, total)
            while done < total:
                self._prefill_chunk(feed, start, done)
                done = self._cache.lengths[0] - start
                if progress is not None:
                    progress(done, total)
        finally:  # whatever was interrupted, as many tokens are committed as the cache covers
            self.tokens = kept + feed[: self._cache.lengths[0] - start + 1]

    def _prefill_chunk(self, feed: list[int], start: int, done: int) -> None:
        left = len(feed) - 1 - done
        count = min(self._prefill_step, left)
        chunk = mx.array(feed[done : done + count], dtype=mx.int32)[None]
        rows = self._context_rows(left, count)
        try:
            _, taps = self.target.forward(
                chunk, self._cache, commit=True, tap_layers=self._tap_layers if rows else ()
            )
            if self._draft is not None and taps is not None:
                self._feed(taps[:, count - rows :], start + done + count - rows)
        except BaseException as error:
            if rows and self._cache.lengths[0] != start + done:  # committed, but not fed
                self._lose_context(error)
            raise
        self._evaluate(self._cache.arrays() + ([] if self._draft is None else self._draft.arrays()))
        mx.clear_cache()

    def round(self, limit: int | None = None) -> Round:
        """Draft, verify, accept. Emits 1 … block_size tokens, at most `limit`.

        The host waits for the device once. If anything raises, the round is taken back: the session
        is as before the call. Only after a failed evaluation it refuses to go on.
        """
        self._check_open()
        if self.pending is None:
            raise ValueError("[Session] expected a prefill before the first round.")
        if limit is not None:
            limit = integer("Session", "limit", limit, 1)
        if not self._in_flight:
            choice = self._choose(limit)
            self._settle(feed=choice.width > 1)
            pending = mx.array([[self.tokens[-1]]], dtype=mx.int32)
            self._in_flight.append(self._launch(pending, choice))
        verify = self._in_flight[0]
        try:
            goes_on = self._draft is None or verify.choice.plain_steps > 1
            if goes_on and limit != 1 and verify.take_back is None:
                self._queue_after(verify)
            result = verify.outcome(self._read(verify.read))
        except BaseException:
            self._drop_in_flight()
            raise
        stats = self.stats.counted(verify.drafted, result.accepted, verify.choice.reason)
        if self._policy is not None:
            self._policy.record(
                verify.position, verify.drafted, result.accepted, verify.choice.reason
            )
        self._finishing = verify, result.tokens, self.tokens, stats
        try:
            self._finish()
        except BaseException:  # Ctrl-C: the round is over, so it is finished all the same
            self._finish()
            raise
        return result

    def _finish(self) -> None:
        """Commit the round that the host has read. What was done already is not done again."""
        if self._finishing is None:
            return
        verify, tokens, before, stats = self._finishing
        if self._cache.lengths[0] == verify.position:
            self._cache.commit([len(tokens)])
        if self._in_flight and self._in_flight[0] is verify:
            del self._in_flight[0]
        unfed = [] if verify.taps is None else [(verify.taps, verify.position)]
        self._round_start = len(before)
        # No call in these lines: a Ctrl-C finds all of it done or none.
        self.tokens, self.stats, self._finishing = before + tokens, stats, None
        self._unfed = self._unfed + unfed

    def rewind(self, count: int) -> None:
        """Keep only the first `count` tokens of the last round, before anything else is called.

        The caches then end just before the last kept token, which is pending. Raises ValueError
        unless `count` is 1 … the tokens that the last round emitted.
        """
        count = integer("Session", "rewind's count", count)
        emitted = 0 if self._round_start is None else len(self.tokens) - self._round_start
        if not 1 <= count <= emitted:
            raise ValueError(
                f"[Session] expected rewind to keep 1 … {emitted} tokens of the last round "
                f"but got {count}."
            )
        if count == emitted:
            return
        less = emitted - count
        tokens, stats = self.tokens[:-less], replace(self.stats, tokens=self.stats.tokens - less)
        try:
            self._cache.amend([count])
        except BaseException:  # Ctrl-C: as in a round
            self._cache.amend([count])
            raise
        finally:
            self.tokens, self.stats = tokens, stats

    def flush(self) -> None:
        """Make the logical state real: every cache array then belongs to the same position."""
        self._settle()
        self._cache.flush()
        self._evaluate(self._cache.arrays())

    def checkpoint(self) -> Checkpoint:
        """What a fresh session needs to go on from here; the last round is final after it.

        Raises ValueError where nothing is covered yet, and for a closed or broken session.
        """
        self._check_open()
        self.flush()
        if isinstance(self._draft, Resumable):
            self._tell_draft()
        covered = self.tokens[: self._cache.lengths[0]]
        checkpoint = take_checkpoint(covered, self._cache, self._draft)
        self._evaluate(list(checkpoint.arrays.values()))
        return checkpoint

    def restore(self, checkpoint: Checkpoint) -> None:
        """Take a checkpoint's place: a `prefill` of what follows its tokens goes on from there.

        Of a session on the same target with the same drafter; of another's settings nothing comes
        along. Raises ValueError unless this session is fresh, and for arrays that do not fit target
        or drafter; it is then still fresh.
        """
        self._check_open()
        if self.tokens:
            raise ValueError(
                f"[Session] expected restore on a fresh session but it has {len(self.tokens)} "
                "tokens."
            )
        draft = None
        if self._draft is not None and self.drafter is not None:
            draft = self.drafter.begin(self.target)
        cache = load_checkpoint(checkpoint, self.target, draft)
        tokens = list(checkpoint.tokens)
        told = len(tokens) if isinstance(draft, Resumable) else 0
        # No call in this line: a Ctrl-C finds all of it done or none.
        self._cache, self._draft, self.tokens, self._told = cache, draft, tokens, told

    def close(self) -> None:
        """Flush, and end the session; `tokens`, `stats` and `cache` stay readable.

        Safe to repeat.
        """
        if not self._closed:
            self._closed = True
            try:
                if self._broken is None:
                    self.flush()
            finally:
                self._draft = None

    def _choose(self, limit: int | None) -> Choice:
        if self._policy is not None:
            return self._policy.choose(self._cache.lengths[0], limit)
        return Choice(self.block_size if limit is None else min(self.block_size, limit), "fixed")

    def _launch(self, pending: mx.array, choice: Choice) -> Verify:
        """Build one verify, lazily: `pending [1, 1]` and drafts after it."""
        asked = 0 if self._draft is None else choice.width - 1
        position = self._cache.lengths[0]
        sampler = self._sampler
        drafts = self._drafts(pending, position, asked) if asked else None
        if drafts is not None:
            self._start([drafts.tokens])  # the device drafts while the host builds the verify
            block = mx.concatenate([pending, drafts.inputs], axis=1)
            parts, drafted = [drafts.sound], [drafts.tokens[0]]
        else:
            block, parts, drafted = pending, [mx.array([1, 1])], []
            if self._draft is not None and (self._policy is None or asked):
                self._start(self._draft.arrays())  # no proposal reaches its context
            if self._policy is not None and asked:
                choice = self._policy.unanswered()
        try:
            hidden, taps = self.target.forward(
                block, self._cache, commit=False, tap_layers=self._tap_layers
            )
            logits = self.target.logits(hidden)[0]
            if sampler is not None:
                logits = sampler.processed(logits, self._tokens_before(position, block))
            accepted, drawn = accept(logits, drafts, sampler, position + 1)
            read = mx.concatenate([*parts, accepted, *drafted, drawn])
        except BaseException:
            self._take_back()
            raise
        return Verify(position, block.shape[1] - 1, read, drawn, logits, taps, choice)

    def _drafts(self, pending: mx.array, position: int, count: int) -> Drafts | None:
        """What the draft proposes, at most `count`; None for a plain step."""
        assert self._draft is not None
        self._tell_draft()
        draws = self._sampler is not None and self._sampler.sampling.temperature > 0
        answer = self._draft.propose(pending, position, count, self._sampler if draws else None)
        return drafts_of(self._draft, answer, count, self.target.vocab_size, draws)

    def _tokens_before(self, position: int, block: mx.array) -> mx.array | None:
        """int32 `[position + n]`: the committed tokens up to `position`, and `block [1, n]`."""
        if self._sampler is None or not self._sampler.reads_tokens:
            return None
        known = mx.array(self.tokens[:position], dtype=mx.int32)
        return mx.concatenate([known, block[0].astype(mx.int32)])

    def _queue_after(self, verify: Verify) -> None:
        """In plain decoding, hand the device its next step before the host reads this one."""
        verify.take_back = self._cache.snapshot()
        self._cache.commit([1])
        steps = max(0, verify.choice.plain_steps - 1)
        queued = self._launch(verify.drawn[None], Choice(1, verify.choice.reason, steps))
        self._in_flight.append(queued)
        self._start([queued.read])

    def _read(self, array: mx.array) -> list[int]:
        """The one place of a round where the host waits for the device."""
        self.stats = replace(self.stats, synchronisations=self.stats.synchronisations + 1)
        with self._watched():
            return cast("list[int]", array.tolist())

    def _start(self, arrays: list[mx.array]) -> None:
        """Queue the evaluation of `arrays` and do not wait."""
        with self._watched():
            mx.async_eval(arrays)

    def _evaluate(self, arrays: list[mx.array]) -> None:
        with self._watched():
            mx.eval(arrays)

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """After an error of the device the caches hold nothing that can be trusted."""
        try:
            yield
        except Exception as error:
            self._broken = str(error)
            raise

    def _settle(self, feed: bool = True) -> None:
        """From here on the last round cannot be rewound. With `feed` the draft gets what was kept:
        plain steps wait for the next block that is drafted.
        """
        self._drop_in_flight()
        self._round_start = None
        if self._unfed and feed:
            ends = [position for _, position in self._unfed[1:]] + self._cache.lengths
            kept = [
                taps[:, : end - position]
                for (taps, position), end in zip(self._unfed, ends, strict=True)
            ]
            taps = kept[0] if len(kept) == 1 else mx.concatenate(kept, axis=1)
            self._feed(taps, self._unfed[0][1])

    def _feed(self, taps: mx.array, position: int) -> None:
        """Extend the draft's context. A draft that was interrupted in it is no longer trusted."""
        assert self._draft is not None
        try:
            self._draft.extend(taps, position)
            self._unfed = []
        except BaseException as error:
            self._lose_context(error)
            raise

    def _tell_draft(self) -> None:
        assert self._draft is not None
        new, self._told = self.tokens[self._told :], len(self.tokens)
        try:
            self._draft.observe(new)
        except BaseException as error:
            self._lose_context(error)
            raise

    def _lose_context(self, error: BaseException) -> None:
        self._broken = f"the draft lost its context, {error!r}"

    def _drop_in_flight(self) -> None:
        """Take back what the host has not read."""
        unread = self._in_flight[0] if self._in_flight else None
        self._in_flight.clear()
        if unread is not None and unread.take_back is not None:
            unread.take_back()
        self._take_back()

    def _take_back(self) -> None:
        if self._cache.uncommitted is not None:
            self._cache.commit([0])

    def _context_rows(self, left: int, count: int) -> int:
        """Of a chunk of `count` with `left` inputs to go, the newest rows that the draft can
        use.
        """
        if self.drafter is None or self._draft is None:
            return 0
        window = self.drafter.context_rows
        return count if window is None else max(0, min(count, window - (left - count)))

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError("[Session] the session is closed.")
        if self._broken is not None:
            raise ValueError(
                f"[Session] expected a sound state but an earlier call failed: {self._broken}."
            )


def _measured(target: Target, drafter: Drafter) -> Costs:
    from .costs import cached_or_measured  # it measures sessions

    return cached_or_measured(target, drafter)
