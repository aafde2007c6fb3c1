"""Checkpoints on disk: what a killed process, a full disk or a damaged file can do to them."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import mlx.core as mx
import pytest

from chats import contents, rounds_of
from dflash_native.checkpoint import Checkpoint
from dflash_native.drafters import AutoregressiveDrafter
from dflash_native.server.checkpoint_files import CheckpointFiles, prefix_keys
from dflash_native.server.prefix_cache import PrefixCache
from dflash_native.session import Session
from dflash_native.targets import Target
from test_session import prompt_of
from test_targets import make_model

TESTS = Path(__file__).parent
ROOMY = 1 << 30


@pytest.fixture(scope="module")
def target():
    mx.set_default_device(mx.cpu)
    return Target(make_model("qwen3_5"), prefill="exact")


def filled(target, directory, texts, **options):
    """A cache to which a checkpoint of each text was added."""
    cache = PrefixCache("weights", ROOMY, directory=directory, **options)
    for text in texts:
        session = Session(target)
        session.prefill(text)
        cache.add(session)
    return cache


def known(target, cache, text):
    return cache.restore(Session(target), text)


def checkpoint_of(number, rows=50):
    """Arrays of every dtype that a cache may hold."""
    mx.random.seed(number)
    arrays = {
        "cache.0.keys": mx.random.normal((1, 2, rows, 8)).astype(mx.bfloat16),
        "cache.0.values": mx.random.normal((1, 2, rows, 8)).astype(mx.float16),
        "cache.1.state": mx.random.normal((1, 2, 4, 8)),
        "draft.length": mx.array(rows, dtype=mx.int32),
        "draft.waiting": mx.zeros((1, 0, 8)),
    }
    mx.eval(arrays)
    return Checkpoint(tuple(prompt_of(rows, seed=number)), arrays)


def key_of(checkpoint):
    [(_, key)] = prefix_keys(checkpoint.tokens, [len(checkpoint.tokens)])
    return key


def test_a_file_gives_back_every_bit(tmp_path):
    given = checkpoint_of(1)
    files = CheckpointFiles(tmp_path, "weights")
    files.write(key_of(given), given)
    for each in (files, CheckpointFiles(tmp_path, "weights")):
        found = each.read(key_of(given))
        assert found.tokens == given.tokens and contents(found) == contents(given)
        dtypes = {name: array.dtype for name, array in found.arrays.items()}
        assert dtypes == {name: array.dtype for name, array in given.arrays.items()}
    assert contents(found) != contents(checkpoint_of(2))  # the control
    assert files.read(key_of(checkpoint_of(2))) is None
    [file] = tmp_path.iterdir()
    assert file.stat().st_mode & 0o077 == 0  # a prompt is nobody else's
    assert sorted(mx.load(str(file))) == sorted([*given.arrays, "tokens"])


@pytest.mark.parametrize("kind", ["plain", "autoregressive"])
def test_warm_from_disk_equals_cold(target, tmp_path, kind):
    mx.set_default_device(mx.cpu)
    drafter = None
    if kind == "autoregressive":
        drafter = AutoregressiveDrafter(make_model("qwen3_5", seed=3), 3)
    text = prompt_of(120)
    cold = Session(target, drafter)
    cold.prefill(text[:100])
    PrefixCache("weights", 0, directory=tmp_path).add(cold)  # memory has no room for it
    cold.prefill(text[100:])
    cache = PrefixCache("weights", ROOMY, directory=tmp_path)
    assert cache.stats.recovered == cache.stats.disk_entries == 1 and cache.stats.entries == 0
    warm = Session(target, drafter)
    assert cache.restore(warm, text) == 99
    warm.prefill(text[99:])
    assert rounds_of(warm, 8) == rounds_of(cold, 8)
    assert cache.stats.entries == 1  # and from memory the next time
    shutil.rmtree(tmp_path)
    assert cache.restore(Session(target, drafter), text) == 99


def test_what_memory_evicts_stays_on_disk(target, tmp_path):
    texts = [prompt_of(20, seed=seed) for seed in range(4)]
    cache = filled(target, tmp_path, texts)
    small = PrefixCache("weights", cache.stats.nbytes // 4, directory=tmp_path)
    for text in texts * 2:
        assert known(target, small, text) == 19
    assert small.stats.entries == 1 and small.stats.evictions == 7
    assert small.stats.disk_entries == 4 and cache.stats.spilled == 4


# ---- damage


def flip(at, from_end=False):
    def damage(file):
        data = bytearray(file.read_bytes())
        data[-at if from_end else at] ^= 1
        file.write_bytes(data)

    return damage


def cut(share=None, size=None):
    def damage(file):
        whole = file.stat().st_size
        os.truncate(file, size if share is None else int(whole * share))

    return damage


DAMAGE = {
    "empty": cut(size=0),
    "inside the header's length": cut(size=5),
    "after the header's length": cut(size=8),
    "inside the header": cut(size=100),
    "inside the arrays": cut(share=0.6),
    "one byte short": lambda file: os.truncate(file, file.stat().st_size - 1),
    "one byte more": lambda file: file.open("ab").write(b"x"),
    "a bit of the header's length": flip(1),
    "a bit of the header": flip(60),
    "a bit of an array": flip(100, from_end=True),
    "noise": lambda file: file.write_bytes(random.Random(1).randbytes(5000)),
    "a huge header's length": lambda file: file.write_bytes(b"\xff" * 2000),
    "zeros": lambda file: file.write_bytes(bytes(file.stat().st_size)),
    "a folder": lambda file: (file.unlink(), file.mkdir()),
}


@pytest.mark.parametrize("restarted", [True, False], ids=["at the start", "while it runs"])
@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_file_is_a_miss_and_goes(target, tmp_path, name, restarted):
    text = prompt_of(60)
    cache = filled(target, tmp_path, [text[:20], text[:50]])
    files = sorted(tmp_path.iterdir(), key=lambda file: file.stat().st_size)
    DAMAGE[name](files[1])
    cache = PrefixCache("weights", ROOMY, directory=tmp_path) if restarted else cache
    cache._held.clear()
    session = Session(target)
    assert cache.restore(session, text) == 19  # the shorter one, which is whole
    assert session.tokens == text[:19]
    stats = cache.stats
    assert stats.refused == 1 and stats.disk_entries == 1
    assert name == "a folder" or not files[1].exists()
    DAMAGE["empty"](files[0])
    assert known(target, PrefixCache("weights", ROOMY, directory=tmp_path), text) == 0


def test_any_flipped_bit_and_any_cut_is_seen(tmp_path):
    given = checkpoint_of(1, rows=3)
    CheckpointFiles(tmp_path, "weights").write(key_of(given), given)
    [file] = tmp_path.iterdir()
    whole, source, survived = file.read_bytes(), random.Random(0), 0
    for trial in range(300):
        data = bytearray(whole)
        if trial % 3 == 0:
            del data[source.randrange(len(data)) :]
        else:
            data[source.randrange(len(data))] ^= 1 << source.randrange(8)
        file.write_bytes(data)
        found = CheckpointFiles(tmp_path, "weights").read(key_of(given))
        if found is not None:  # such as a space in the header that became another one
            survived += 1
            assert contents(found) == contents(given) and found.tokens == given.tokens
    assert survived < 5
    file.write_bytes(whole)  # the control
    assert CheckpointFiles(tmp_path, "weights").read(key_of(given)) is not None


def test_a_file_under_another_prefixs_name_is_refused(tmp_path):
    one, other = checkpoint_of(1), checkpoint_of(2)
    files = CheckpointFiles(tmp_path, "weights")
    files.write(key_of(one), one)
    [file] = tmp_path.iterdir()
    file.rename(file.with_name(file.name.replace(key_of(one), key_of(other))))
    files = CheckpointFiles(tmp_path, "weights")
    assert files.counts()["recovered"] == 1
    assert files.read(key_of(other)) is None and files.counts()["refused"] == 1


def test_other_models_files_stay_and_count_and_strangers_are_not_touched(target, tmp_path):
    text = prompt_of(30)
    other = PrefixCache("other weights", ROOMY, directory=tmp_path)
    session = Session(target)
    session.prefill(text)
    other.add(session)
    strangers = ["notes.txt", "model.safetensors", ".checkpoint-x.safetensors"]
    for name in strangers:
        (tmp_path / name).write_bytes(b"mine")
    cache = PrefixCache("weights", ROOMY, directory=tmp_path)
    assert known(target, cache, text) == 0
    assert cache.stats.refused == 1 and cache.stats.recovered == 0
    assert cache.stats.disk_entries == 1
    filled(target, tmp_path, [text])
    assert len(list(tmp_path.iterdir())) == 2 + len(strangers)
    again = PrefixCache("other weights", ROOMY, directory=tmp_path)
    assert known(target, again, text) == 29  # the control: it was left to its model
    PrefixCache("weights", 0, directory=tmp_path, disk_budget_bytes=0)
    assert sorted(file.name for file in tmp_path.iterdir()) == sorted(strangers)


def test_what_a_killed_process_left_unfinished_is_removed(target, tmp_path):
    text = prompt_of(30)
    filled(target, tmp_path, [text])
    for number in range(3):
        (tmp_path / f"checkpoint-{number}.unfinished").write_bytes(b"x" * number)
    cache = PrefixCache("weights", ROOMY, directory=tmp_path)
    assert cache.stats.recovered == 1 and cache.stats.refused == 3
    assert known(target, cache, text) == 29 and len(list(tmp_path.iterdir())) == 1


# ---- budget and a disk that refuses


def test_a_start_beside_a_write_takes_nothing_away(tmp_path, monkeypatch):
    """Bug: a starting process removed what another one was writing. Proof: the rename found no
    file, and the checkpoint counted as unwritten, "No such file or directory".
    """
    files, sync, others = CheckpointFiles(tmp_path, "f"), os.fsync, []

    def beside(descriptor):
        others.append(CheckpointFiles(tmp_path, "f"))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", beside)
    checkpoint = checkpoint_of(1)
    files.write(key_of(checkpoint), checkpoint)
    monkeypatch.undo()
    assert files.counts()["spilled"] == 1 and files.counts()["unwritten"] == 0
    assert [other.counts()["recovered"] for other in others] == [0, 1]
    assert files.read(key_of(checkpoint)).tokens == checkpoint.tokens


def test_a_file_that_goes_while_the_folder_is_read_is_not_there(tmp_path, monkeypatch):
    """Bug: the server did not start where another process removed a file between the folder's list
    and the file's size: FileNotFoundError.
    """
    first, second = checkpoint_of(1), checkpoint_of(2)
    files = CheckpointFiles(tmp_path, "f")
    for each in (first, second):
        files.write(key_of(each), each)
    (tmp_path / "checkpoint-x.unfinished").touch()
    listed = list(tmp_path.iterdir())
    files.refuse(key_of(first), ValueError("by the other process"))
    (tmp_path / "checkpoint-x.unfinished").unlink()
    monkeypatch.setattr(Path, "glob", lambda self, pattern: listed)
    assert CheckpointFiles(tmp_path, "f").lengths() == {len(second.tokens)}


@pytest.mark.parametrize("length", ["-3", "0"])
def test_a_length_that_no_prefix_has_is_refused(tmp_path, length):
    """Bug: a length below 1 in a file's metadata made every key of every prompt another one, so
    that nothing was found any more.
    """
    files, checkpoint = CheckpointFiles(tmp_path, "f"), checkpoint_of(1)
    files.write(key_of(checkpoint), checkpoint)
    (written,) = tmp_path.iterdir()
    arrays, metadata = mx.load(str(written), return_metadata=True)
    mx.eval(arrays)
    other = str(written).replace(key_of(checkpoint), 64 * "0")
    mx.save_safetensors(other, arrays, {**metadata, "length": length})
    again = CheckpointFiles(tmp_path, "f")
    assert again.lengths() == {len(checkpoint.tokens)} and again.counts()["refused"] == 1


def test_the_least_recently_used_files_go_first(target, tmp_path):
    texts = [prompt_of(20, seed=seed) for seed in range(5)]
    size = filled(target, tmp_path / "one", texts[:1]).stats.disk_nbytes
    directory, budget = tmp_path / "many", 3 * size
    cache = filled(target, directory, texts[:3], disk_budget_bytes=budget)
    assert cache.stats.disk_entries == 3 and cache.stats.disk_nbytes <= budget
    assert known(target, cache, texts[0]) == 19
    time.sleep(0.01)  # of the files' times
    cache = filled(target, directory, texts[3:4], disk_budget_bytes=budget)
    assert cache.stats.disk_entries == 3 and cache.stats.disk_nbytes <= budget
    cache = PrefixCache("weights", ROOMY, directory=directory, disk_budget_bytes=budget)
    assert [known(target, cache, text) for text in texts] == [19, 0, 19, 19, 0]
    filled(target, directory, [prompt_of(900)], disk_budget_bytes=budget // 3)
    sizes = [file.stat().st_size for file in directory.iterdir()]
    assert len(sizes) == 1 and sum(sizes) <= budget // 3  # one too large for it is not written


def test_a_folder_that_goes_is_logged_and_costs_no_answer(target, tmp_path, caplog):
    text = prompt_of(30)
    cache = filled(target, tmp_path / "sub", [text[:10]])
    shutil.rmtree(tmp_path / "sub")
    session = Session(target)
    session.prefill(text)
    cache.add(session)
    assert cache.stats.unwritten == 1 and "a checkpoint was not written" in caplog.text
    assert known(target, cache, text) == 29  # from memory
    cache._held.clear()
    assert known(target, cache, text) == 0 and cache.stats.disk_entries == 0


def test_a_full_disk_leaves_no_part_of_a_file(tmp_path):
    """In a process that may write files of at most 100 KB."""
    program = f"""
import resource, signal, sys
sys.path[:0] = [{str(TESTS)!r}]
from pathlib import Path
from test_checkpoint_files import *
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
files = CheckpointFiles(Path({str(tmp_path)!r}), "weights")
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
for rows in (50, 5000, 60):
    each = checkpoint_of(1, rows)
    files.write(key_of(each), each)
print(files.counts())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "'spilled': 2, 'unwritten': 1" in done.stdout
    files = CheckpointFiles(tmp_path, "weights")
    assert len(list(tmp_path.iterdir())) == files.counts()["recovered"] == 2
    for rows in (50, 60):
        assert files.read(key_of(checkpoint_of(1, rows))) is not None


def test_a_ctrl_c_in_a_write_leaves_no_part_of_a_file(tmp_path, monkeypatch):
    def interrupt(descriptor):
        raise KeyboardInterrupt

    given, files = checkpoint_of(1), CheckpointFiles(tmp_path, "weights")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, "fsync", interrupt)
        files.write(key_of(given), given)
    assert not list(tmp_path.iterdir()) and files.counts()["disk_entries"] == 0
    files.write(key_of(given), given)
    assert files.read(key_of(given)) is not None


def test_files_that_another_process_removed_are_misses(target, tmp_path):
    texts = [prompt_of(20, seed=seed) for seed in range(3)]
    cache = filled(target, tmp_path, texts)
    other = PrefixCache("weights", ROOMY, directory=tmp_path)
    for file in tmp_path.iterdir():
        file.unlink()
    assert [known(target, other, text) for text in texts] == [0, 0, 0]
    assert [known(target, cache, text) for text in texts] == [19, 19, 19]


# ---- kill -9

WRITER = f"""
import sys
sys.path[:0] = [{str(TESTS)!r}]
import mlx.core as mx
mx.set_default_device(mx.cpu)
from test_checkpoint_files import *
target = Target(make_model("qwen3_5"), prefill="exact")
cache = PrefixCache("weights", 2 << 20, directory=Path(sys.argv[1]))
session = Session(target)
print(cache.stats.recovered, flush=True)
text = prompt_of(6000, seed=int(sys.argv[2]))
for start in range(0, 4000, 8):
    session.prefill(text[1500 * (start > 0) + start : 1508 + start])
    cache.add(session)
    print(len(session.tokens) - 1, flush=True)
"""
TRIES = int(os.environ.get("DFLASH_KILLS", "8"))


def test_kill_9_during_a_spill_loses_nothing_but_the_newest_checkpoint(target, tmp_path):
    """Real processes that write checkpoints without a pause, killed at random moments. What
    `add` had come back from is there, whole, and gives the tokens of a cold session.
    """
    source, unfinished, written = random.Random(5), 0, 0
    for trial in range(TRIES):
        with subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path), str(trial)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as child:
            lines = [child.stdout.readline() for _ in range(1 + source.randrange(3, 30))]
            time.sleep(source.uniform(0, 0.02))
            child.send_signal(signal.SIGKILL)
            lines += child.stdout.read().splitlines()
            assert child.wait() == -signal.SIGKILL, child.stderr.read()
        added = [int(line) for line in lines[1:]]
        unfinished += sum(file.suffix == ".unfinished" for file in tmp_path.iterdir())
        text = prompt_of(6000, seed=trial)
        cache = PrefixCache("weights", ROOMY, directory=tmp_path)
        stats = cache.stats
        for length in added:  # each one, not the longest alone
            assert known(target, cache, text[: length + 1]) == length
        warm, cold = Session(target), Session(target)
        covered = cache.restore(warm, text)
        assert covered in (added[-1], added[-1] + 8)  # the newest may have been complete
        written += len(added) + (covered != added[-1])
        for each in (warm, cold):
            each.prefill(text[len(each.tokens) : covered + 9])
        assert rounds_of(warm, 4) == rounds_of(cold, 4)
        assert cache.stats.refused == stats.refused <= 1  # the unfinished one
        assert cache.stats.recovered == written
        assert not [file for file in tmp_path.iterdir() if file.suffix == ".unfinished"]
    print(f"{TRIES} kills, {unfinished} inside a write, {written} checkpoints kept")
