"""`dflash-native doctor`: prints what `dflash_native.doctor` finds, or what rounds cost here."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import typer

from .. import costs, doctor
from .console import OptionError, err, out
from .loading import check_draft, demo_pair, named_pair, own_drafter


def run(*, as_json: bool) -> None:
    """Print the report; exits with 1 if a check fails."""
    info = doctor.build_info()
    if as_json:
        with err().status("testing every operation"):
            checks = list(doctor.self_test())
        passed = all(check.passed for check in checks)
        tests = [asdict(check) | {"passed": check.passed} for check in checks]
        weights, packed = doctor.packed_weights()
        info |= {"demo_weights_bytes": weights, "demo_packed_bytes": packed}
        info |= {"round_costs": costs.kept()}
        print(json.dumps(info | {"checks": tests, "passed": passed}, indent=2))
    else:
        _print_info(info)
        passed = _print_checks()
    if not passed:
        raise typer.Exit(1)


def _print_info(info: dict[str, Any]) -> None:
    environment = " ".join(f"{name}={value}" for name, value in info["environment"].items())
    _section("Versions", info["versions"])
    _section(
        "Build",
        {
            "backend": f"{info['backend']} ({info['device']})",
            "libmlx": info["libmlx"],
            "extension": info["extension"],
            "built for": f"mlx {info['built_for_mlx']}, nanobind {info['built_with_nanobind']}",
            "environment": environment or "none of our variables is set",
        },
    )
    _section("Kernels", info["kernels"])
    weights, packed = doctor.packed_weights()
    _section(
        "Memory",
        {
            "weights packed for the CPU": "at most the model's size; for the demo pair "
            f"{packed / 1e6:.1f} MB beside {weights / 1e6:.1f} MB"
            if packed
            else "none on this backend",
        },
    )
    rows = {"file": str(costs.cache_file())}
    for key, contexts in costs.kept().items():
        for context, row in contexts.items():
            steps = ", ".join(f"{width}: {s / row[1]:.2f}" for width, s in row.items() if width > 1)
            rows[f"{key[:8]} at {context}"] = f"{1e3 * row[1]:.2f} ms; in plain steps {steps}"
    _section("Costs of a round by width, as measured here", rows)


def _section(title: str, rows: dict[str, str]) -> None:
    console = out()
    console.print(title, style="bold")
    width = max(map(len, rows))
    for name, value in rows.items():
        console.print(f"  {name:<{width}}  {value}", soft_wrap=True)
    console.print()


def _print_checks() -> bool:
    console = out()
    console.print("Self-test against the references", style="bold")
    console.print(f"  {'operation':<21} {'dtype':<9} {'error':>9} {'allowed':>9}")
    failed = total = 0
    for check in doctor.self_test():
        total += 1
        failed += not check.passed
        error = "none" if check.error is None else _number(check.error)
        console.print(
            f"  {check.operation:<21} {check.dtype:<9} {error:>9} {_number(check.tolerance):>9} ",
            end="",
        )
        console.print("PASS" if check.passed else "FAIL", style="green" if check.passed else "red")
        if check.detail:
            console.print(f"    {check.detail}", soft_wrap=True)
    console.print()
    console.print(f"{failed} of {total} checks failed" if failed else f"all {total} checks passed")
    return not failed


def _number(value: float) -> str:
    return f"{value:.1e}" if value else "0"


def run_measurement(
    *, as_json: bool, model: str | None, draft: str | None, contexts: Sequence[int]
) -> None:
    """Print and keep what a round costs by width, and what exactness adds to it."""
    check_draft(model, draft)
    if model is not None and draft is None:
        raise OptionError("expected --draft with --model but got none")
    if any(context < 2 for context in contexts):
        raise OptionError(f"expected --context of at least 2 but got {min(contexts)}")
    target, _, drafter = (
        demo_pair("float32") if model is None else named_pair(model, draft, "stored")
    )
    assert drafter is not None
    if model is None:
        drafter = own_drafter(draft, drafter)
    tables = []
    for context in contexts:
        with err().status(f"measuring at {context} tokens"):
            found = costs.price_of_exactness(target, drafter, context)
        costs.keep(target, drafter, context, {row.width: row.exact for row in found})
        tables.append((context, found))
    if as_json:
        rows = [{"context": c} | asdict(row) for c, found in tables for row in found]
        print(json.dumps({"backend": doctor.backend(), "seconds": rows}, indent=2))
        return
    console = out()
    for context, found in tables:
        console.print(f"A round after {context} tokens, drafting and all", style="bold")
        console.print("  width      ms  plain steps  with MLX's operations  exact / MLX's")
        for row in found:
            console.print(
                f"  {row.width:>5} {1e3 * row.exact:>7.2f} {row.exact / found[0].exact:>12.2f} "
                f"{1e3 * row.stock:>22.2f} {row.exact / row.stock:>14.2f}"
            )
        console.print()
    console.print(f"kept in {costs.cache_file()}", soft_wrap=True)
