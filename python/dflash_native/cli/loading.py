"""Options to models: the built-in pair, or what `--model` and `--draft` name."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from .console import OptionError, err

if TYPE_CHECKING:
    from ..drafters import DFlashDrafter, Drafter
    from ..targets import Target

LOOKUP, COMBINED = "lookup", "combined"
"""What `--draft` says for no model at all, and for the lookup beside the built-in pair's draft.
With `--model` the other draft is named, `combined:PATH`. A folder of such a name is `./lookup`."""

_DTYPES = {
    "float32": mx.float32,
    "bfloat16": mx.bfloat16,
    "float16": mx.float16,
    "stored": None,
}


def demo_pair(dtype: str, exact: bool = True) -> tuple[Target, Any, DFlashDrafter]:
    """The pair that ships in the package: target, tokenizer, drafter."""
    with err().status("loading the demo pair"):
        _quiet()
        from .. import hub
        from ..targets import Target

        model, tokenizer, drafter = hub.load_demo(_DTYPES[dtype])
        return Target(model, exact=exact), tokenizer, drafter


def check_draft(model: str | None, draft: str | None) -> None:
    """Refuse, before anything is loaded, a `--draft` that does not go with its `--model`."""
    if draft is None:
        return
    if model is None and draft not in (LOOKUP, COMBINED):
        raise OptionError(
            f"expected --draft only with --model (or {LOOKUP}, or {COMBINED}): without --model the "
            f"built-in pair runs, which has its own draft, but got {draft}"
        )
    word, _, other = draft.partition(":")
    if model is not None and word == COMBINED and other in ("", LOOKUP, COMBINED):
        raise OptionError(
            f"expected --draft {COMBINED}:PATH with --model, the draft beside the lookup, "
            f"but got {draft}"
        )


def own_drafter(draft: str | None, drafter: Drafter) -> Drafter:
    """The built-in pair's drafter, or what `--draft` says in its place."""
    from ..drafters import CombinedDrafter, LookupDrafter

    if draft == LOOKUP:
        return LookupDrafter()
    return CombinedDrafter(LookupDrafter(), drafter) if draft == COMBINED else drafter


def named_pair(
    model: str, draft: str | None, dtype: str, exact: bool = True
) -> tuple[Target, Any, Drafter | None]:
    """A target and, if one is named, its draft: a DFlash draft, a language model, `lookup` or
    `combined:` and one of the first two.

    Raises what `hub`, `Target` and the drafters raise.
    """
    wanted = _DTYPES[dtype]
    with err().status("") as status:
        status.update("importing mlx-lm")
        _quiet()
        from .. import hub
        from ..targets import Target

        drafter, drafts = None, None
        if draft is not None:  # the small one first: a wrong path shows at once
            status.update(f"loading {draft}")
            drafter, drafts = _named_draft(draft, dtype, exact)
        status.update(f"loading {model}")
        weights, tokenizer = hub.load(model, wanted)
        target = Target(weights, exact=exact)
        hub.check_tokenizer(target, tokenizer)
        if drafts is not None:
            hub.check_draft_tokenizer(tokenizer, drafts)
        if drafter is not None:
            drafter.begin(target)
        return target, tokenizer, drafter


def _named_draft(draft: str, dtype: str, exact: bool) -> tuple[Drafter, Any | None]:
    """A drafter, and the tokenizer of one that has its own."""
    from .. import hub
    from ..drafters import AutoregressiveDrafter, CombinedDrafter, LookupDrafter
    from ..targets import Target

    if draft == LOOKUP:
        return LookupDrafter(), None
    if draft.startswith(f"{COMBINED}:"):
        other, tokenizer = _named_draft(draft.removeprefix(f"{COMBINED}:"), dtype, exact)
        return CombinedDrafter(LookupDrafter(), other), tokenizer
    if hub.is_dflash(draft):
        # A draft's residuals overflow fp16: it runs in fp32 beside such a target.
        return hub.load_drafter(draft, mx.float32 if dtype == "float16" else _DTYPES[dtype]), None
    weights, tokenizer = hub.load(draft, _DTYPES[dtype])
    return AutoregressiveDrafter(weights if exact else Target(weights, exact=False)), tokenizer


def known_draft(model: str) -> str | None:
    """The hub id of a draft published for this target, or None."""
    from .. import hub

    return hub.known_draft(model)


def _quiet() -> None:
    """Keep transformers' advice (no PyTorch found) out of a command's standard error."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
