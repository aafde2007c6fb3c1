"""Which targets and drafters share measured costs: those that are alike in all that costs."""

from __future__ import annotations

import mlx.core as mx
import pytest

from dflash_native import load_demo
from dflash_native.costs import fingerprint
from dflash_native.drafters import AutoregressiveDrafter, CombinedDrafter, LookupDrafter
from dflash_native.targets import Target
from scripted import ScriptedDrafter
from test_targets import make_model


@pytest.fixture(scope="module")
def target():
    mx.set_default_device(mx.cpu)
    return Target(make_model("qwen3_5"))


class Parts(ScriptedDrafter):
    """A user's drafter around others, in an attribute of its own."""

    def __init__(self, *parts, **options):
        super().__init__([], **options)
        self._parts = list(parts)


class Elsewhere:
    class Parts(Parts):
        """Of the same name, as another module could have it."""


def all_different(target, drafters):
    return len({fingerprint(target, drafter) for drafter in drafters}) == len(drafters)


def test_targets_are_told_apart(target):
    drafter = LookupDrafter()
    others = [Target(target.model, exact=False), Target(make_model("qwen3"))]
    prints = {fingerprint(each, drafter) for each in (target, *others)}
    assert len(prints) == 3
    assert fingerprint(Target(make_model("qwen3_5", seed=9)), drafter) in prints  # the control


def test_drafters_are_told_apart(target):
    """A combination was its class and its largest block: that with a small model and that with a
    large lookup shared a row, and so did a draft model by our operations and by MLX's.
    """
    model, small = make_model("qwen3_5"), make_model("qwen3")
    lookup = LookupDrafter()
    parts = [
        lookup,
        LookupDrafter(7),
        LookupDrafter(shortest=3),
        LookupDrafter(longest=16),
        AutoregressiveDrafter(Target(model)),
        AutoregressiveDrafter(Target(model, exact=False)),
        AutoregressiveDrafter(small),
        AutoregressiveDrafter(small, 3),
        load_demo()[2],
        load_demo(mx.bfloat16)[2],
        ScriptedDrafter([], tap_layers=()),
        ScriptedDrafter([], context=3),
    ]
    combined = [CombinedDrafter(lookup, part) for part in parts]
    combined += [
        CombinedDrafter(LookupDrafter(longest=16), parts[4]),
        CombinedDrafter(lookup, parts[4], match=8),
    ]
    around = [Parts(part) for part in parts] + [Parts(lookup, parts[4]), Elsewhere.Parts(parts[0])]
    drafters = [*parts, *combined, *around, Parts(), Elsewhere.Parts()]
    assert all_different(target, drafters)
    assert not all_different(target, [*drafters, LookupDrafter(7)])  # the controls
    again = AutoregressiveDrafter(Target(make_model("qwen3_5", seed=9)))
    assert fingerprint(target, CombinedDrafter(lookup, again)) == fingerprint(target, combined[4])


def test_what_a_request_changes_is_not_told_apart(target):
    """Or costs would be measured at every request."""
    drafter = Parts(LookupDrafter())
    before = fingerprint(target, drafter)
    drafter.answer += [1, 2, 3]
    drafter._rounds = 5
    drafter._itself = drafter
    drafter._parts[0].begin(target).observe([1, 2, 3])
    assert fingerprint(target, drafter) == before
    drafter._parts.append(LookupDrafter())  # the control
    assert fingerprint(target, drafter) != before
