"""The benchmarks on tiny models: what a document holds, and what makes a command fail.

No figure is looked at: these are tests of the commands, not of speed.
"""

from __future__ import annotations

import argparse
import gc
import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from bench import cycle, e2e, forwards, kernels, machine, memory, shapes
from bench.__main__ import COMMANDS, main
from bench.cases import OPERATIONS, Point
from bench.peers import Peer, Unavailable
from bench.rounds import Rounds, check
from bench.timing import bootstrap, interleave
from dflash_native import Target, ops
from dflash_native.drafters.dflash import DFlashModel

ROOT = Path(__file__).parents[1]
RUNS = {
    "kernels": ["--shape", "tiny"],
    "kernels of experts": ["--shape", "tiny-moe", "--operations", "verify_gather_matmul", "swiglu"],
    "cycle": ["--shape", "tiny"],
    "kernels of attention alone": ["--shape", "tiny-dense", "--operations", "rope", "swiglu"],
    "cycle of attention alone": ["--shape", "tiny-dense", "--dtype", "float16"],
    "cycle of experts": ["--shape", "tiny-moe", "--no-forwards", "--context", "32", "48"],
    "e2e": ["--peers", "--max-tokens", "6"],
    "memory": ["--shape", "tiny"],
}


@pytest.fixture(autouse=True)
def on_the_default_device(cpu):
    """As a user runs them here; on a GPU the commands are run by hand."""


@pytest.fixture(scope="module")
def documents():
    """Of each run, made when it is first asked for."""
    found: dict[str, dict] = {}

    def document(name, capsys):
        if name not in found:
            command = name.split()[0]
            assert main([command, "--quick", "--json", *RUNS[name]]) == 0
            printed = capsys.readouterr()
            found[name] = json.loads(printed.out)
            assert f"[{command}" in printed.err  # progress is no part of the document
        return found[name]

    return document


def row_names(value, inside=False):
    """The keys of every object in a document's tables."""
    if isinstance(value, list):
        return {name for each in value for name in row_names(each, True)}
    return set(value) if inside and isinstance(value, dict) else set()


def test_what_the_process_held_before_is_not_the_chats(capsys):
    """The bound of a turn was compared with all that the process holds: among other tests, which
    keep their models, each turn held 1.5 GB of at most 5.6 MB.
    """
    before = mx.ones((100, 1_000_000))
    mx.eval(before)
    assert main(["memory", "--quick", "--json", *RUNS["memory"]]) == 0
    assert json.loads(capsys.readouterr().out)["chat"][0]["active"] > before.nbytes


@pytest.mark.parametrize("name", RUNS)
def test_a_quick_run_gives_a_document_whose_fields_are_documented(name, documents, capsys):
    document = documents(name, capsys)
    text = (ROOT / "bench" / "README.md").read_text("utf-8")
    known = set(re.findall(r"`(\w+)`", text))
    assert document["benchmark"] == name.split()[0] and document["schema"] == 1
    assert not set(document) - known and not set(document["machine"]) - known
    tables = {key: value for key, value in document.items() if isinstance(value, list)}
    for table, rows in tables.items():
        assert rows or table in ("failures", "forwards", "one_more_row"), table
        assert not row_names(rows) - known, table
    assert "no_such_field" not in known  # the control
    assert document["machine"]["libmlx"].endswith((".so", ".dylib"))
    assert document["command"].startswith(f"python -m bench {name.split()[0]} --quick")


@pytest.mark.parametrize("name", RUNS)
def test_the_tables_say_what_the_document_holds(name, documents, capsys):
    document = documents(name, capsys)
    module = {"kernels": kernels, "cycle": cycle, "e2e": e2e, "memory": memory}[name.split()[0]]
    lines = [*module.text(document)]
    assert len(lines) > 4 and all("nan" not in line for line in lines)


def test_every_operation_has_a_row(documents, capsys):
    rows = documents("kernels", capsys)["results"]
    timed = {row["operation"].split(" +")[0] for row in rows if "us" in row}
    assert timed == set(OPERATIONS) - {"verify_gather_matmul"}
    assert set(OPERATIONS) == set(ops.__all__) - {
        "PackedWeight",
        "Tape",
        "pack_matmul",
        "verify_matmuls",  # `verify_matmul` for several weights
    }
    assert {row["variant"] for row in rows} == {"ours", "mlx", "mx.compile", "mx.fast", "mlx-lm"}
    assert all(0 < row["of_limit"] and row["gb_s"] > 0 for row in rows if "us" in row)


WRONG = {
    "swiglu": lambda y: y * 1.02,
    "verify_matmul": lambda y: mx.concatenate([y[:-1], y[-1:] + 0.5]),
    "verify_attention": lambda y: mx.concatenate([y[:, :-1], y[:, -1:] * 1.1], axis=1),
    "rms_norm": lambda y: mx.concatenate([y[:, :-1], mx.full(y[:, -1:].shape, mx.nan)], axis=1),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_kernel_fails_and_is_not_timed(name, monkeypatch, capsys):
    right = getattr(ops, name)
    monkeypatch.setattr(ops, name, lambda *given, **named: WRONG[name](right(*given, **named)))
    assert main(["kernels", "--quick", "--json", "--operations", name]) == 1
    printed = capsys.readouterr()
    rows = json.loads(printed.out)["results"]
    assert rows and all("us" not in row and "expected results within" in row["why"] for row in rows)
    assert f"FAILED: [{name}]" in printed.err


def test_a_wrong_tape_fails(monkeypatch, capsys):
    right = ops.gated_delta_verify

    def wrong(*given):
        y, tape, checkpoint = right(*given)
        return y, tape._replace(delta=tape.delta * 1.001), checkpoint

    monkeypatch.setattr(ops, "gated_delta_verify", wrong)
    assert main(["kernels", "--quick", "--json", "--operations", "gated_delta_verify"]) == 1
    capsys.readouterr()


def test_a_baseline_that_calculates_something_else_is_not_timed(monkeypatch, capsys):
    monkeypatch.setattr(mx.fast, "rms_norm", lambda x, weight, eps: x)
    assert main(["kernels", "--quick", "--json", "--operations", "rms_norm"]) == 0
    rows = {row["variant"]: row for row in json.loads(capsys.readouterr().out)["results"]}
    assert "away from the reference's" in rows["mx.fast"]["why"] and "us" in rows["ours"]


def test_an_operation_is_not_varied_by_what_it_does_not_depend_on():
    options = argparse.Namespace(
        shape="tiny", rows=[1, 4], batch=[1], context=[8, 64], dtypes=["bfloat16"], bits=[16, 4]
    )
    counts = {name: len([*kernels.points(name, options)]) for name in OPERATIONS}
    assert counts["swiglu"] == 2 and counts["verify_attention"] == 4
    assert counts["verify_matmul"] == 4


def test_bytes_of_a_case_are_those_of_its_arrays():
    config = SimpleNamespace(**shapes.config_of("tiny"))
    at = Point(config, 4, 1, 60, "bfloat16", 16)
    (case,) = OPERATIONS["verify_attention"].cases(at)
    q, k, v, _ = case.make()
    seen = 2 * k[:, :, :64].nbytes
    assert case.bytes == 2 * q.nbytes + seen and v.shape == k.shape
    (step,) = OPERATIONS["gated_delta_step"].cases(at)
    inputs = step.make()
    results = step.variants[0].function(*inputs)
    assert step.bytes == sum(x.nbytes for x in (*inputs, *results))


# ---- shapes


def parameters(module):
    return sum(value.size for _, value in tree_flatten(module.parameters()))


@pytest.mark.parametrize(
    ("shape", "billions"),
    [
        ("qwen3.5-4b", 4.2),
        ("qwen3.5-9b", 9.0),
        ("qwen3.5-27b", 26.9),
        ("qwen3.5-35b-a3b", 34.7),
        ("qwen3.8-27b", 26.9),
        ("qwen3-8b", 8.19),
    ],
)
def test_a_shape_has_the_published_size(shape, billions):
    assert parameters(shapes.lazy_model(shape)) / 1e9 == pytest.approx(billions, rel=0.01)


def test_the_draft_of_a_shape_is_the_published_one():
    """1,924,404,480 parameters in 81 tensors: z-lab/Qwen3.8-27B-DFlash2."""
    model = DFlashModel(shapes.draft_config("qwen3.8-27b"))
    assert len(tree_flatten(model.parameters())) == 81 and parameters(model) == 1_924_404_480
    assert shapes.draft_config("qwen3.8-27b").target_layer_ids == (5, 19, 33, 47, 61)


# ---- rounds


@pytest.fixture(scope="module")
def pair():
    mx.set_default_device(mx.cpu)
    mx.random.seed(3)
    model = shapes.make_model("tiny", 16, mx.float32)
    return Target(model), shapes.make_drafter("tiny", mx.float32)


def test_rounds_by_hand_are_held_to_a_session(pair, monkeypatch, capsys):
    check(*pair, width=4)
    right = Rounds.round

    def one_less(self, width, accepted=None, after=None):
        return right(self, width, accepted, after)[:-1]

    monkeypatch.setattr(Rounds, "round", one_less)
    with pytest.raises(AssertionError, match="a whole round of"):
        check(*pair, width=4)
    assert main(["cycle", "--quick", "--json"]) == 1
    printed = capsys.readouterr()
    assert not printed.out and "FAILED: [rounds] expected a whole round" in printed.err


def test_forwards_are_held_to_single_steps(monkeypatch, capsys):
    right = forwards.run

    def wide_differs(target, tokens, cache):
        logits = right(target, tokens, cache)
        return logits + 1e-6 * (tokens.shape[1] > 1)

    monkeypatch.setattr(forwards, "run", wide_differs)
    assert main(["cycle", "--quick", "--json"]) == 1
    assert "FAILED: [forwards]" in capsys.readouterr().err


def test_acceptance_is_forced(pair):
    target, drafter = pair
    rounds = Rounds(target, drafter, target.make_cache())
    rounds.prefill([1, 2, 3, 4])
    for accepted in (0, 2, 3):
        before = rounds.cache.lengths[0]
        assert len(rounds.round(4, accepted)) == accepted + 1
        assert rounds.cache.lengths[0] == before + accepted + 1


def test_expected_speedups_are_of_the_rounds_times():
    row = {
        "context": 1,
        "width": 4,
        "plain_ms": 1.0,
        "round_ms": 2.0,
        "round_ms_all_accepted": 2.6,
    }
    found = {each["accepted"]: each["speedup"] for each in cycle.expected(row)}
    assert found == pytest.approx({0: 0.5, 1: 2 / 2.2, 2: 3 / 2.4, 3: 4 / 2.6})
    assert cycle.at_chance(row, 0.5) == pytest.approx(1.875 / 2)


# ---- texts


def test_a_draft_that_changes_a_token_fails(monkeypatch, capsys):
    right = e2e.own_runs

    def wrong(pair, block_size):
        runs = right(pair, block_size)
        good = runs[e2e.OURS]

        def last_token_changed(prompt, max_tokens):
            text = good(prompt, max_tokens)
            return text | {"tokens": [*text["tokens"][:-1], text["tokens"][-1] ^ 1]}

        return runs | {e2e.OURS: last_token_changed}

    monkeypatch.setattr(e2e, "own_runs", wrong)
    given = ["e2e", "--quick", "--json", "--peers", "--kinds", "json", "--repeats", "1"]
    assert main([*given, "--max-tokens", "4"]) == 1
    printed = capsys.readouterr()
    rows = {row["contender"]: row for row in json.loads(printed.out)["results"]}
    assert rows[e2e.OURS]["equal_to_plain"] == 0 and rows[e2e.PLAIN]["equal_to_plain"] == 1
    assert rows[e2e.OURS]["sha256"] != rows[e2e.PLAIN]["sha256"]
    assert "0 of 1 texts equal plain decoding" in printed.err


def test_a_peer_that_does_not_run_says_why():
    for name in ("dflash", "dflash-mlx"):
        with pytest.raises(Unavailable, match=r"\w+Error.*\(\w+\.py:\d+\)"):
            Peer(name, "/no/such/target", "/no/such/draft")


def test_the_authors_implementation_runs_in_its_own_process(capsys):
    pytest.importorskip("dflash", reason="pip install --no-deps dflash==0.1.0")
    given = ["e2e", "--quick", "--json", "--peers", "dflash", "--kinds", "json", "--repeats", "1"]
    assert main([*given, "--max-tokens", "6"]) == 0
    rows = {row["contender"]: row for row in json.loads(capsys.readouterr().out)["results"]}
    theirs = rows["dflash"]
    assert theirs["versions"]["dflash"] == "0.1.0" and theirs["sha256"] == rows["mlx-lm"]["sha256"]
    assert theirs["rounds"] > 0 and 0 <= theirs["accepted"] <= theirs["drafted"]


def test_a_rate_leaves_the_first_delivery_out():
    text = {"deliveries": [(4, 1.0), (5, 1.5), (10, 3.0)]}
    assert e2e.rate(text) == 3.0 and e2e.rate({"deliveries": [(4, 1.0)]}) is None


def test_the_interval_holds_the_mean_and_narrows():
    wide = bootstrap([[1.0, 1.1], [4.0, 4.4], [2.0, 2.2]])
    narrow = bootstrap([[2.0, 2.01], [2.0, 2.02], [2.0, 1.99]])
    for low, mean, high in (wide, narrow):
        assert low <= mean <= high
    assert narrow[2] - narrow[0] < 0.1 < wide[2] - wide[0]
    assert bootstrap([[2.0], [0.5]])[1] == pytest.approx(1)  # geometric


# ---- memory


def test_what_grows_is_named():
    flat = {"tokens": 1, "active": 100e6, "arrays": 50, "keys_values": 1e6}
    flat |= {"recurrent": 1e6, "draft": 1e6}
    longer = [flat | {"active": 100e6 + 1e6 * i, "keys_values": 1e6 + 1e6 * i} for i in range(4)]
    assert memory.grown([flat] * 4) == memory.grown(longer) == []
    (message,) = memory.grown([flat | {"active": 100e6 + 5e6 * i} for i in range(4)])
    assert "memory beside the caches grew" in message
    (message,) = memory.grown([flat | {"arrays": 50 + 40 * i} for i in range(4)])
    assert message == "arrays grew from 90 to 170"


def test_a_chat_that_holds_more_than_its_bound_is_named(pair):
    target, drafter = pair
    watched = memory.WatchedDrafter(drafter.config, drafter.model)
    options = argparse.Namespace(turns=2, turn_tokens=6)
    weights = mx.get_active_memory()
    assert memory.chat(target, watched, options, weights)[1] == []
    gc.collect()
    assert watched.last() is None  # what watches holds nothing
    ballast = mx.zeros((8_000_000,))
    mx.eval(ballast)
    wrong = memory.chat(target, watched, options, weights)[1]
    assert len(wrong) == 2 and wrong[0].startswith("turn 1 holds")
    del ballast


# ---- the command line


def test_a_process_prints_the_document_alone_and_saves_it(tmp_path):
    command = [sys.executable, "-m", "bench", "kernels", "--quick", "--json"]
    command += ["--operations", "swiglu", "--save", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    (path,) = tmp_path.glob("kernels-*.json")
    assert json.loads(done.stdout) == json.loads(path.read_text("utf-8"))
    assert "[kernels" in done.stderr


def test_of_two_measurements_of_a_limit_the_better_counts():
    first = {"copy_gb_s": 1, "matmul_gflop_s": {"float32": 9}, "launch_us": 5, "evaluation_us": 7}
    second = {"copy_gb_s": 2, "matmul_gflop_s": {"float32": 8}, "launch_us": 4, "evaluation_us": 8}
    best = {"copy_gb_s": 2, "matmul_gflop_s": {"float32": 9}, "launch_us": 4, "evaluation_us": 7}
    assert machine.better(first, second) == machine.better(second, first) == best


def test_files_of_different_models_have_different_names():
    def of(benchmark, **settings):
        return machine.subject({"benchmark": benchmark, "settings": {"quick": False, **settings}})

    cycle_ = {"shape": "qwen3.5-4b", "bits": 16, "layers": None, "dtype": "bfloat16"}
    assert machine.slug(of("cycle", **cycle_)) == "qwen3.5-4b-bfloat16"
    names = {of("cycle", **cycle_ | more) for more in ({"bits": 4}, {"layers": 8}, {"quick": True})}
    assert len(names | {of("cycle", **cycle_)}) == 4
    assert of("e2e", model="/a/Some-9B", dtype="stored") == "Some-9B stored"
    assert of("e2e", model=None, dtype="float32") == "demo pair float32"
    about = {"backend": "cpu", "cpu": "Intel(R) Xeon(R) Processor @ 2.20GHz", "cores": 2}
    assert machine.name(about) == "cpu-intel-xeon-2core"
    assert machine.name({"backend": "cuda", "device": "NVIDIA H200"}) == "nvidia-h200"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command, capsys):
    with pytest.raises(SystemExit) as end:
        main([command, "--help"])
    assert end.value.code == 0 and COMMANDS[command][:20] in capsys.readouterr().out


def test_rounds_end_when_the_time_is_up():
    calls = []
    times = interleave({"a": lambda n: calls.append(n)}, repeats=50, queue=2, most_seconds=0.0)
    assert len(times["a"]) == 3 and calls == [2] * 5
