"""`python -m tests.metal mutate`: do the tests of the shipped shaders notice a fault?

Every mutant meets the cheap tests of its file, in a process of its own, until one fails. A mutant
that does not compile is invalid and counts for nothing; one that crashes or hangs is killed. What
survives is listed, with its explanation (equivalents.py) or as alive. The score is the share of
killed among killed and alive.
"""

from __future__ import annotations

import multiprocessing
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

from . import launch, mutants, tools
from . import test_attention_shaders as attention
from . import test_matmul_shaders as matmul
from . import test_shaders as shaders
from .equivalents import BEYOND_THE_EMULATOR, EQUIVALENT
from .mutants import Mutant
from .tools import SHADERS, ToolError

Check = Callable[[], object]
GATED_DELTA: list[Check] = [
    lambda: shaders.test_gated_delta_width("float", 3, False, True),
    lambda: shaders.test_gated_delta_replay("float", 3, True, True),
    lambda: shaders.test_gated_delta_replay("float", 3, False, True),
    lambda: shaders.test_gated_delta_is_the_reference("float", 3, True, True),
    lambda: shaders.test_gated_delta_is_the_reference("float", 3, False, False),
    lambda: shaders.test_gated_delta_at_other_dims((96, 20)),
    lambda: shaders.test_gated_delta_poisons_a_row_that_keeps_too_much(4),
    lambda: shaders.test_gated_delta_poisons_a_row_that_keeps_too_much(-1),
]
GATES: list[Check] = [lambda: shaders.test_gated_delta_gates("float")]
CONV: list[Check] = [
    lambda: shaders.test_causal_conv1d("float", 3, 4),
    lambda: shaders.test_conv_window("half", 3),
]
KV_WRITE: list[Check] = [lambda: shaders.test_kv_write("float", 3)]
MATMUL: list[Check] = [
    lambda: matmul.test_products_are_the_reference("float", "half", (4, 64)),
    lambda: matmul.test_products_are_the_reference("half", "half", None),
    lambda: matmul.test_products_are_the_reference("float", "half", (8, 128)),
    lambda: matmul.test_small_dense_products(17, 33),
    lambda: matmul.test_gathered_rows_have_the_bits_of_their_expert("float", "half", (4, 32), 3),
    lambda: matmul.test_gathered_rows_have_the_bits_of_their_expert("float", "bfloat", None, 1),
    lambda: matmul.test_rows_of_a_product_have_the_bits_of_one("float", "bfloat", None),
    lambda: matmul.test_rows_of_a_product_have_the_bits_of_one("float", "half", (4, 32)),
]
ATTENTION: list[Check] = [
    lambda: attention.test_every_option_is_the_reference("float", "mask"),
    lambda: attention.test_every_option_is_the_reference("half", "mask and window"),
    lambda: attention.test_attention_is_the_reference("half", (192, 128)),
    lambda: attention.test_attention_is_the_reference("float", (32, 32)),
    lambda: attention.test_every_option_is_the_reference("float", "sinks"),
    lambda: attention.test_every_option_is_the_reference("float", "unrestricted"),
    lambda: attention.test_every_option_is_the_reference("half", "window 9"),
    lambda: attention.test_how_columns_are_shared_out_changes_no_bits(17),
    lambda: attention.test_lengths_out_of_range_poison_their_row("half"),
    lambda: attention.test_other_rows_do_not_reach_a_row("mask", float("nan")),
    lambda: attention.test_other_rows_do_not_reach_a_row("causal", float("inf")),
    lambda: attention.test_infinity_in_the_history_has_one_result("float", float("inf")),
    lambda: attention.test_a_row_that_sees_nothing_is_zero("float"),
    lambda: attention.test_many_chunks(None, "float"),
    lambda: attention.test_many_chunks(2, "float"),
    lambda: attention.test_many_chunks(700, "float"),
    lambda: attention.test_a_block_that_ends_with_a_chunk("unrestricted"),
    lambda: attention.test_rows_at_every_edge("float", 256),
    lambda: attention.test_every_window(18),
    lambda: attention.test_every_window(52),
]
CHECKS: dict[str, list[Check]] = {
    "arithmetic": [*GATED_DELTA, *GATES, *CONV, *KV_WRITE, *MATMUL, *ATTENTION],
    "matrix": [*MATMUL, *ATTENTION],
    "gated_delta": GATED_DELTA,
    "gated_delta_gates": GATES,
    "causal_conv1d": CONV,
    "kv_write": KV_WRITE,
    "verify_matmul": MATMUL,
    "verify_attention": ATTENTION,
}
OF_EACH_KIND = {"gated_delta.h": 3, "matrix.h": 2, "verify_matmul.h": 3, "verify_attention.h": 4}
# what takes long to import; not this module, which pytest knows by another name
PRELOADED = ["numpy", "mlx.core", "pytest", "dflash_native.reference"]
SECONDS = 120  # after which a mutant hangs
FLOOR = 95  # per cent


class Verdict(NamedTuple):
    """'killed', 'survived' or 'invalid', and by what."""

    outcome: str
    why: str = ""


def files() -> list[str]:
    return sorted(path.name for path in SHADERS.iterdir())


def sample(quick: bool = False, only: Iterable[str] = ()) -> list[Mutant]:
    """The mutants of a run: the same ones every time."""
    if unknown := {*only} - {*files()}:
        raise tools.BenchError(f"mutate: no {', '.join(sorted(unknown))} in metal/")
    names = [name for name in files() if not only or name in only]
    chosen = [m for name in names for m in mutants.sample(name, OF_EACH_KIND.get(name, 1))]
    return chosen[::6] if quick else chosen


def try_checks(mutant: Mutant | None) -> Verdict:
    """The verdict on a mutant, or on the shaders as they are; in a process of its own."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tools.use_cache(folder / "cache")
        shutil.copytree(SHADERS, folder / "metal")
        launch.SHADERS = folder / "metal"
        checks = [check for found in CHECKS.values() for check in found]
        if mutant:
            (folder / "metal" / mutant.file).write_text(mutant.text())
            checks = CHECKS[Path(mutant.file).stem]
        for i, check in enumerate(checks):
            try:
                check()
            except ToolError as error:
                return Verdict("invalid", str(error)[-200:])
            except Exception as error:
                return Verdict("killed", f"check {i}: {type(error).__name__}")
    return Verdict("survived")


def _worker(mutant: Mutant | None, answer: Connection) -> None:
    answer.send(try_checks(mutant))


def judge(mutant: Mutant | None) -> Verdict:
    """`try_checks` in a process that may crash or hang."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_worker, args=(mutant, sender))
    process.start()
    sender.close()
    try:
        if not receiver.poll(SECONDS):
            return Verdict("killed", "hangs")
        verdict: Verdict = receiver.recv()
        return verdict
    except EOFError:
        return Verdict("killed", "crashes")
    finally:
        process.kill()
        process.join()


def judge_all(chosen: list[Mutant], jobs: int = 1) -> Iterator[tuple[Mutant, Verdict]]:
    """Every mutant with its verdict, in order; raises if the checks fail without a fault."""
    sound = judge(None)
    if sound.outcome != "survived":
        raise tools.BenchError(f"the shaders as they are: {sound.outcome} {sound.why}")
    with ThreadPoolExecutor(jobs) as pool:
        yield from zip(chosen, pool.map(judge, chosen), strict=True)


def classify(mutant: Mutant, verdict: Verdict) -> tuple[str, str]:
    """'killed', 'invalid', 'explained' or 'alive', and what is known of a survivor."""
    if verdict.outcome != "survived":
        return verdict.outcome, verdict.why
    if why := EQUIVALENT.get((mutant.file, mutant.new.strip())):
        return "explained", why
    return "alive", BEYOND_THE_EMULATOR.get((mutant.file, mutant.kind, mutant.old.strip()), "")


def score(counts: Counter[str]) -> float:
    """Per cent of killed among killed and alive."""
    return 100 * counts["killed"] / max(1, counts["killed"] + counts["alive"])


def main(quick: bool, only: list[str], jobs: int) -> int:
    """Run, print, and 1 if the score is below the floor."""
    total: Counter[str] = Counter()
    by: dict[str, Counter[str]] = {}
    for mutant, verdict in judge_all(sample(quick, only), jobs):
        outcome, why = classify(mutant, verdict)
        if outcome in ("alive", "explained"):
            print(f"{outcome.upper()} {mutant}" + (f"\n    {why}" if why else ""), flush=True)
        of_file, of_kind = (by.setdefault(key, Counter()) for key in (mutant.file, mutant.kind))
        for counts in (total, of_file, of_kind):
            counts[outcome] += 1
    for name, counts in [*by.items(), ("all", total)]:
        rest = ", ".join(f"{counts[k]} {k}" for k in ("killed", "alive", "explained", "invalid"))
        print(f"{name}: {score(counts):.1f} % ({rest})")
    return int(score(total) < FLOOR)
