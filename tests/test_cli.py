"""The command line: what goes to which stream, what is counted, and Ctrl-C."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys

import mlx.core as mx
import pytest
from rich.console import Console
from typer.testing import CliRunner

import dflash_native
from dflash_native import demo as demo_files
from dflash_native import doctor, hub, ops
from dflash_native.cli import app, console, measure
from dflash_native.cli import demo as demo_command
from dflash_native.cli import generate as generate_command
from dflash_native.cli.demo import DraftMarks
from dflash_native.generation import stream_generate
from dflash_native.session import Stats
from dflash_native.targets import Target

PROMPT = "def add(a, b):\n"
PROMPTS = demo_files.prompts()


@pytest.fixture(autouse=True, scope="module")
def on_cpu():
    """A GPU may multiply fp32 in TF32, and then tokens depend on the block."""
    before = mx.default_device()
    mx.set_default_device(mx.cpu)
    yield
    mx.set_default_device(before)


@pytest.fixture(scope="module")
def pair():
    model, tokenizer, drafter = hub.load_demo()
    return Target(model), tokenizer, drafter


@pytest.fixture
def loaded(pair, monkeypatch):
    """The commands get the pair that is loaded already, and the demo's prompts are a line long."""
    for command in (demo_command, generate_command):
        monkeypatch.setattr(command, "demo_pair", lambda dtype, exact: pair)
    short = [each._replace(text=each.text.partition("\n")[0] + "\n") for each in PROMPTS]
    monkeypatch.setattr(demo_command, "demo_prompts", lambda: short)


def run(*arguments, stdin=None):
    return CliRunner().invoke(app, [str(argument) for argument in arguments], input=stdin)


def text_of(pair, prompt, **options):
    target, tokenizer, drafter = pair
    responses = stream_generate(target, tokenizer, prompt, drafter=drafter, **options)
    return "".join(response.text for response in responses)


# Starting.


def test_version_and_help():
    assert run("--version").stdout == f"dflash-native {dflash_native.__version__}\n"
    shown = run("--help")
    assert shown.exit_code == 0
    assert all(name in shown.stdout for name in ("doctor", "demo", "generate", "--version"))
    assert run("nothing").exit_code == 2


def test_help_imports_no_models():
    code = (
        "import sys; from dflash_native.cli import app; app(['generate', '--help'], "
        "standalone_mode=False); print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    modules = set(done.stdout.splitlines()[-1].split())
    assert "dflash_native.cli" in modules
    assert not modules & {"mlx_lm", "transformers", "dflash_native.hub", "dflash_native.session"}


# doctor.


def test_doctor_says_what_runs_and_passes():
    shown = run("doctor")
    assert shown.exit_code == 0
    report = json.loads(run("doctor", "--json").stdout)
    count = len(report["checks"])
    assert report["passed"] and count > 3 * len(doctor.OPERATIONS)
    for words in ("libmlx", "gated_delta_verify", "cpu", mx.__version__):
        assert words in shown.stdout
    assert f"all {count} checks passed" in shown.stdout
    packed, weights = report["demo_packed_bytes"], report["demo_weights_bytes"]
    assert 0.9 * weights < packed <= weights
    assert f"{packed / 1e6:.1f} MB beside {weights / 1e6:.1f} MB" in shown.stdout
    assert report["libmlx"] in shown.stdout
    assert {"backend", "device", "kernels", "versions"} <= report.keys()


def test_doctor_exits_with_1_on_a_wrong_operation(monkeypatch):
    real = ops.causal_conv1d_verify
    monkeypatch.setattr(ops, "causal_conv1d_verify", lambda *args: real(*args) * 1.5)
    shown = run("doctor")
    assert shown.exit_code == 1
    assert shown.stdout.count("FAIL") == 3 and "\n3 of " in shown.stdout
    failed = run("doctor", "--json")
    assert failed.exit_code == 1
    assert not json.loads(failed.stdout)["passed"]


# demo.


def test_demo_json_is_one_object(loaded):
    shown = run("demo", "--json", "--prompts", 1, "--max-tokens", 8)
    assert shown.exit_code == 0, shown.stderr
    found = json.loads(shown.stdout)
    assert found["backend"] == "cpu" and found["prompts"] == found["identical"] == 1
    assert found["tokens"] == 8 and 1 <= found["rounds"] <= 8
    assert found["tokens_per_round"] == pytest.approx(8 / found["rounds"])
    assert found["speedup"] == pytest.approx(found["dflash_tok_s"] / found["plain_tok_s"])
    assert found["dtype"] == "float32"
    assert found["block_size"] == demo_files.BLOCK_SIZES["cpu"]
    assert shown.stderr == ""


def test_demo_shows_text_and_table(loaded, pair):
    shown = run("demo", "--prompts", 1, "--max-tokens", 8, "--block-size", 4)
    assert shown.exit_code == 0, shown.stderr
    prompt = demo_command.demo_prompts()[0]
    after = shown.stdout.partition(prompt.text)[2]
    streamed = after.partition("\nPlain decoding against DFlash")[0]
    text = text_of(pair, prompt.text, max_tokens=8, block_size=4)
    assert "⟦" in streamed
    assert streamed.replace("⟦", "").replace("⟧", "") == f"{text}\n"
    for words in ("1 of 1", "blocks of 4", "ratio", "Drafts accepted", "A round takes"):
        assert words in after


def decoded(tokens, seconds=1.0, rounds=1, accepted=(), drafted=()):
    stats = Stats(
        rounds=rounds,
        tokens=len(tokens),
        drafted=sum(drafted),
        accepted=sum(accepted),
        drafted_at=list(drafted),
        accepted_at=list(accepted),
    )
    return measure.Decoded(tokens, seconds, stats)


def test_identical_counts_equal_tokens():
    def compare(plain, dflash):
        return measure.Comparison("", [1], decoded(plain), decoded(dflash))

    tokens = [5, 6, 7]
    assert measure.summarise([compare(tokens, tokens)] * 3)["identical"] == 3
    for other in ([5, 6, 8], [9, 6, 7], [5, 6], [5, 6, 7, 8]):
        found = measure.summarise([compare(tokens, tokens), compare(tokens, other)])
        assert (found["identical"], found["prompts"]) == (1, 2)
    differences = [compare(tokens, other).difference for other in ([5, 6, 7], [5, 9, 7], [5, 6])]
    assert differences == [None, 1, 2]


def test_rates_are_over_all_tokens_and_all_seconds():
    first = measure.Comparison(
        "", [1], decoded([1] * 10, 2.0, 10), decoded([1] * 10, 1.0, 4, [3, 2], [4, 3])
    )
    second = measure.Comparison(
        "", [1], decoded([1] * 30, 3.0, 30), decoded([1] * 30, 4.0, 6, [6], [6])
    )
    found = measure.summarise([first, second])
    assert (found["plain_tok_s"], found["dflash_tok_s"]) == (8.0, 8.0)
    assert found["speedup"] == 1.0 != (10 / 5 + 7.5 / 10) / 2  # no mean of ratios
    assert (found["rounds"], found["tokens_per_round"]) == (10, 4.0)
    assert found["acceptance_by_position"] == [0.9, pytest.approx(2 / 3)]
    assert found["acceptance"] == pytest.approx(11 / 13)
    assert found["round_in_plain_steps"] == pytest.approx((5 / 10) / (5 / 40))


def test_a_difference_is_told_with_its_gap(pair):
    target, tokenizer, _ = pair
    prompt = list(tokenizer.encode(PROMPT))
    plain = measure.decode(target, tokenizer, prompt, 3)
    assert len(plain.tokens) == 3
    altered = [plain.tokens[0], (plain.tokens[1] + 1) % 100, plain.tokens[2]]
    gap = measure.logit_gap(target, measure.Comparison("", prompt, plain, decoded(altered)))
    assert gap > 0
    same = measure.Comparison("", prompt, plain, decoded(plain.tokens))
    shorter = measure.Comparison("", prompt, plain, decoded(plain.tokens[:2]))
    assert measure.logit_gap(target, same) is measure.logit_gap(target, shorter) is None


@pytest.mark.parametrize(
    ("speedup", "cost", "words"),
    [
        (0.5, 14.0, "slower because the matrix product on this backend (cpu) takes 14.0 times"),
        (0.5, 1.5, "slower although the matrix product on this backend (cpu) takes 1.5 times"),
        (1.5, 14.0, "A round takes as long as 2.00 plain steps and gives 3.00 tokens"),
    ],
    ids=["matmul", "drafting", "faster"],
)
def test_a_loss_is_admitted_with_its_reason(speedup, cost, words, monkeypatch):
    monkeypatch.setattr(measure, "matmul_cost", lambda target, rows: cost)
    monkeypatch.setattr(measure, "logit_gap", lambda target, comparison: 0.001)
    summary = {"speedup": speedup, "tokens_per_round": 3.0, "backend": "cpu", "block_size": 16}
    summary |= {"round_in_plain_steps": 3.0 / speedup, "exact": False}
    same = measure.Comparison("one", [1], decoded([5, 6]), decoded([5, 6]))
    said = " ".join(demo_command._remarks(None, [same], summary))
    assert words in said
    assert ("It is slower" in said) == (speedup < 1)
    assert "not identical" not in said
    other = measure.Comparison("two", [1], decoded([5, 6]), decoded([5, 7]))
    said = " ".join(demo_command._remarks(None, [same, other], summary))
    assert "two is not identical: token 2 differs" in said and "0.001" in said
    assert "MLX's own" in said
    summary["exact"] = True
    said = " ".join(demo_command._remarks(None, [other], summary))
    assert "That is an error" in said and "MLX's own" not in said


SEGMENTS = [("a", True), ("b", True), ("", False), ("[c]", False), (" d\n", True)]


def marked(encoding="utf-8", **options):
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding=encoding, newline="")
    marks = DraftMarks(Console(file=stream, markup=False, **options))
    for text, from_draft in SEGMENTS:
        marks.write(text, from_draft)
    marks.end()
    stream.flush()
    return raw.getvalue().decode(encoding)


def test_accepted_drafts_are_marked():
    assert marked() == "⟦ab⟧[c]⟦ d\n⟧\n"
    assert marked("ascii") == "[[ab]][c][[ d\n]]\n"
    styled = marked(force_terminal=True, color_system="standard")
    assert "\x1b[4;32ma\x1b[0m" in styled and "[c]" in styled
    assert "⟦" not in styled and "\x1b[4;32m[c]" not in styled


# generate.


def test_stdout_is_the_text_alone(loaded, pair):
    shown = run("generate", "--prompt", PROMPT, "--max-tokens", 8)
    assert shown.exit_code == 0, shown.stderr
    assert shown.stdout == text_of(pair, PROMPT, max_tokens=8) != ""
    assert "8 tokens at" in shown.stderr and "drafts accepted" in shown.stderr
    piped = run("generate", "--prompt", "-", "--max-tokens", 4, "--block-size", 4, stdin=PROMPT)
    assert piped.stdout == text_of(pair, PROMPT, max_tokens=4)
    assert piped.stdout != shown.stdout


def test_json_and_stop(loaded, pair):
    whole = text_of(pair, PROMPT, max_tokens=8)
    stop = whole[len(whole) // 2 :][:3]
    shown = run(
        "generate", "--prompt", PROMPT, "--max-tokens", 8, "--json", "--stop", "§", "--stop", stop
    )
    found = json.loads(shown.stdout)
    assert found["text"] == whole[: whole.index(stop)] != whole
    assert found["finish_reason"] == "stop" and found["tokens"] <= 8
    assert shown.stderr == ""


def test_the_chat_template_unless_raw(pair):
    tokenizer = hub.load(demo_files.TARGET)[1]
    prompt_ids = generate_command._prompt_ids
    assert prompt_ids(tokenizer, "x", False) == tokenizer.encode("x")  # the demo has no template
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"
    )
    tokenizer._tokenizer.chat_template = template + "{% if add_generation_prompt %}!{% endif %}"
    chat = type(tokenizer)(tokenizer._tokenizer)
    assert chat.decode(prompt_ids(chat, "x", False)) == "<|im_start|>user\nx<|im_end|>!"
    assert prompt_ids(chat, "x", True) == tokenizer.encode("x")


def test_a_folder_decodes_plainly_and_a_published_draft_is_named(tmp_path):
    folder = tmp_path / "Qwen3-8B-4bit"
    folder.symlink_to(demo_files.TARGET)
    shown = run("generate", "--model", folder, "--prompt", PROMPT, "--max-tokens", 2)
    assert shown.exit_code == 0, shown.stderr
    assert "plain decoding" in shown.stderr and "z-lab/Qwen3-8B-DFlash-b16" in shown.stderr
    both = run(
        *("generate", "--model", demo_files.TARGET, "--draft", demo_files.DRAFT),
        *("--prompt", PROMPT, "--max-tokens", 2, "--dtype", "float16"),
    )
    assert both.exit_code == 0, both.stderr
    assert "drafts accepted" in both.stderr and "plain decoding" not in both.stderr


@pytest.mark.parametrize("model", [[], ["--model", demo_files.TARGET, "--dtype", "float32"]])
def test_a_lookup_needs_no_draft(loaded, pair, model):
    prompt = "[1, 2], [1, 2], [1, "
    options = ("generate", "--prompt", prompt, "--max-tokens", 12, "--draft", "lookup")
    shown = run(*options, *model)
    assert shown.exit_code == 0, shown.stderr
    assert shown.stdout == text_of((*pair[:2], None), prompt, max_tokens=12) != ""
    assert "drafts accepted" in shown.stderr and "plain decoding" not in shown.stderr
    fixed = ("--json", "--block-size", 8)
    drafted = json.loads(run(*options, *model, *fixed).stdout)
    dflash = json.loads(run(*options[:-2], *fixed).stdout)
    assert 0 < drafted["drafted"] != dflash["drafted"]  # the control: not the pair's own draft
    assert run(*options, *model, "--block-size", 17).exit_code == 2


@pytest.mark.parametrize("model", [[], ["--model", demo_files.TARGET, "--dtype", "float32"]])
def test_a_lookup_beside_another_draft(loaded, pair, model):
    """The demo's draft, named by its folder or without a word."""
    prompt = "[1, 2], [1, 2], [1, "
    options = ("generate", "--prompt", prompt, "--max-tokens", 24, "--json", "--block-size", 8)
    draft = f"combined:{demo_files.DRAFT}" if model else "combined"
    found = {}
    for each in (draft, "lookup", draft.removeprefix("combined:") if model else None):
        shown = run(*options, *model, *(["--draft", each] if each else []))
        assert shown.exit_code == 0, shown.stderr
        found[each] = json.loads(shown.stdout)
        assert found[each]["text"] == text_of((*pair[:2], None), prompt, max_tokens=24)
    drafted = [each["drafted"] for each in found.values()]
    assert drafted[0] not in drafted[1:]  # the control: it is neither of the two alone


def test_a_language_model_drafts(pair):
    """The demo target for itself: every draft is right, four a round."""
    shown = run(
        *("generate", "--model", demo_files.TARGET, "--draft", demo_files.TARGET),
        *("--prompt", PROMPT, "--max-tokens", 10, "--dtype", "float32", "--json"),
        *("--block-size", 5),
    )
    assert shown.exit_code == 0, shown.stderr
    found = json.loads(shown.stdout)
    assert (found["rounds"], found["drafted"], found["accepted"]) == (2, 8, 8)
    assert found["text"] == text_of((*pair[:2], None), PROMPT, max_tokens=10)


# Ctrl-C.


def test_ctrl_c_keeps_what_was_generated(pair):
    code = (
        "import mlx.core as mx; mx.set_default_device(mx.cpu); "
        "from dflash_native.cli import app; app()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, "generate", "--prompt", PROMPT, "--max-tokens", "4000"],
        bufsize=0,  # communicate() would not see what a buffer read ahead
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # A shell's background jobs ignore SIGINT, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    first = process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    rest, errors = process.communicate(timeout=60)
    text, errors = (first + rest).decode(), errors.decode()
    assert process.returncode == console.INTERRUPTED == 130
    assert "(interrupted)" in errors and "Traceback" not in errors
    tokens = int(errors.split(" token")[0])
    assert 1 <= tokens < 4000
    assert text == text_of(pair, PROMPT, max_tokens=tokens)[: len(text)] != ""


def test_ctrl_c_before_the_first_token(monkeypatch):
    def interrupted(dtype, exact):
        raise KeyboardInterrupt

    monkeypatch.setattr(generate_command, "demo_pair", interrupted)
    shown = run("generate", "--prompt", PROMPT)
    assert shown.exit_code == 130
    assert (shown.stdout, shown.stderr) == ("", "dflash-native: interrupted\n")


def test_costs_are_measured_kept_and_shown(tmp_path, monkeypatch):
    """`--measure` with the demo pair; then the report names what was kept."""
    monkeypatch.setenv("DFLASH_NATIVE_CACHE", str(tmp_path))
    run = CliRunner().invoke(app, ["doctor", "--measure", "--context", "16", "--json"])
    assert run.exit_code == 0, run.output
    rows = json.loads(run.stdout)["seconds"]
    assert [row["width"] for row in rows] == [1, 2, 3, 4, 6, 8, 12, 16]
    assert all(row["context"] == 16 and row["exact"] > 0 and row["stock"] > 0 for row in rows)
    shown = CliRunner().invoke(app, ["doctor"]).stdout
    assert str(tmp_path) in shown and " at 16 " in shown and "16: " in shown
    for wrong in (["--context", "1"], ["--model", "x"]):
        refused = CliRunner().invoke(app, ["doctor", "--measure", *wrong])
        assert refused.exit_code == 2, refused.output


def test_a_seed_draws_the_same_text_and_none_another():
    def text(*options):
        drawn = ["--temperature", "0.8", "--top-p", "0.95", "--max-tokens", "40", *options]
        run = CliRunner().invoke(app, ["generate", "--prompt", "def add(", "--json", *drawn])
        assert run.exit_code == 0, run.output
        return json.loads(run.stdout)["text"]

    seeded = text("--seed", "1")
    assert text("--seed", "1") == seeded
    assert text("--seed", "1", "--block-size", "3") == seeded
    assert len({seeded, text("--seed", "2"), text(), text()}) == 4


@pytest.mark.parametrize(
    "options, message",
    [
        (["--top-p", "7"], "expected top_p in 0 … 1 but got 7"),
        (["--temperature", "-1"], "expected temperature of at least 0"),
        (["--repetition-penalty", "-1"], "expected repetition_penalty of at least 0"),
    ],
)
def test_sampling_out_of_range_is_a_bad_option(options, message):
    run = CliRunner().invoke(app, ["generate", "--prompt", "x", *options])
    assert run.exit_code == 2 and message in run.stderr
