"""What a session tells of its rounds."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import mlx.core as mx


@dataclass(frozen=True)
class Round:
    """What one round did."""

    tokens: list[int]
    """Emitted, in order: the accepted drafts and the target's own token after them."""

    drafts: list[int]
    """What the drafter proposed; empty in plain decoding."""

    accepted: int
    """How many drafts agreed with the target, counted from the first."""

    logits: mx.array
    """`[len(tokens), V]`, lazy: row i, after penalties and before filters, is what `tokens[i]` was
    chosen from."""


@dataclass(frozen=True)
class Stats:
    """Sums over a session's rounds; each round makes a new one."""

    rounds: int = 0
    tokens: int = 0
    """Emitted, the target's own included, less those that `rewind` took back."""
    drafted: int = 0
    accepted: int = 0
    rejections: int = 0
    """Rounds in which the target refused a draft."""
    drafted_at: list[int] = field(default_factory=list)
    """Drafts made at position 1, 2, … of a block."""
    accepted_at: list[int] = field(default_factory=list)
    """Drafts accepted at position 1, 2, … of a block."""
    choices: dict[str, int] = field(default_factory=dict)
    """Rounds by width and the reason for it, as in {"8 rate": 12, "1 budget": 3}. "fixed": nothing
    was chosen; "rate": most tokens a second; "attempt": drafts tried again after plain steps;
    "budget": plain because earlier attempts have cost enough; "empty": plain because the drafter,
    in this round or a few before it, was asked and had nothing."""
    synchronisations: int = 0
    """Times that the host waited for the device in a round."""

    @property
    def tokens_per_round(self) -> float:
        """The target's own token included."""
        return self.tokens / self.rounds if self.rounds else 0.0

    @property
    def acceptance(self) -> float:
        """Accepted ÷ drafted."""
        return self.accepted / self.drafted if self.drafted else 0.0

    def counted(self, drafted: int, accepted: int, reason: str = "fixed") -> Stats:
        """These sums and one round more."""
        key = f"{drafted + 1} {reason}"
        missing = [0] * (drafted - len(self.drafted_at))
        return replace(
            self,
            rounds=self.rounds + 1,
            tokens=self.tokens + accepted + 1,
            drafted=self.drafted + drafted,
            accepted=self.accepted + accepted,
            rejections=self.rejections + (accepted < drafted),
            choices={**self.choices, key: self.choices.get(key, 0) + 1},
            drafted_at=[n + (i < drafted) for i, n in enumerate(self.drafted_at + missing)],
            accepted_at=[n + (i < accepted) for i, n in enumerate(self.accepted_at + missing)],
        )
