"""Sessions on the demo pair with every drafter, and what two of them must have in common."""

from __future__ import annotations

import mlx.core as mx

from dflash_native import load_demo
from dflash_native.drafters import AutoregressiveDrafter, CombinedDrafter, LookupDrafter
from dflash_native.targets import Target
from test_autoregressive import near
from test_exact import dflash2_of

TEXT = '''def get_name(self):
    """Return the name of the item."""
    return self._name


def get_price(self):
    """Return the price of the item."""
    return self._price


def get_size(self):
'''
NEXT = '''

def set_name(self, name):
    """Set the name of the item."""
'''


def demo_drafters():
    """The demo's target, drafters by name, a prompt and what may follow it."""
    mx.set_default_device(mx.cpu)
    model, tokenizer, dflash = load_demo()
    autoregressive = AutoregressiveDrafter(near(load_demo()[0]), 4)
    drafters = {
        "plain": None,
        "dflash": dflash,
        "dflash2": dflash2_of(dflash),
        "lookup": LookupDrafter(),
        "autoregressive": autoregressive,
        "lookup+dflash": CombinedDrafter(LookupDrafter(), dflash),
        "lookup+autoregressive": CombinedDrafter(LookupDrafter(), autoregressive),
    }
    target = Target(model, prefill="exact")
    return target, drafters, tokenizer.encode(TEXT), tokenizer.encode(NEXT)


def rounds_of(session, count):
    """What so many rounds emit, propose and accept, and the bits they are chosen from."""
    found = []
    for _ in range(count):
        result = session.round()
        bits = bytes(memoryview(mx.contiguous(result.logits).view(mx.uint8)))
        found.append((result.tokens, result.drafts, result.accepted, bits))
    return found


def contents(checkpoint):
    return {
        name: bytes(memoryview(array.reshape(-1).view(mx.uint8)))
        for name, array in checkpoint.arrays.items()
    }
