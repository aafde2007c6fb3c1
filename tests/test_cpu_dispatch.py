"""The CPU kernels' instruction sets and threads change the speed, never the bits."""

from __future__ import annotations

import subprocess
import sys

import pytest

from dispatch import check_same_bits, run

PROGRAM = """
import hashlib
import mlx.core as mx
mx.set_default_device(mx.cpu)
from dflash_native import _native, ops
mx.random.seed(3)
digest = hashlib.sha256()
for dtype in (mx.float32, mx.float16, mx.bfloat16):
    for Dk, Dv in ((32, 13), (128, 40), (256, 5)):
        q, k = (mx.random.normal((2, 5, 2, Dk)).astype(dtype) * 0.1 for _ in range(2))
        v, beta = mx.random.normal((2, 5, 4, Dv)).astype(dtype), mx.random.uniform(0, 1, (2, 5, 4))
        g, state = mx.random.uniform(0.7, 1, (2, 5, 4)), mx.random.normal((2, 4, Dv, Dk)) * SCALE
        y, tape, _ = ops.gated_delta_verify(q, k, v, g, beta, state)
        after = ops.gated_delta_replay(state, tape, [3, 5])
        x, w = mx.random.normal((2, 5, 300)).astype(dtype), mx.random.normal((300, 4)).astype(dtype)
        conv = ops.causal_conv1d_verify(x, w, x[:, :3])
        for out in (y, tape.delta, after, conv):
            digest.update(bytes(memoryview(out.view(mx.uint8))))
print(_native.extension.cpu_isa(), _native.extension.cpu_threads(), digest.hexdigest())
"""


def test_instruction_sets_and_thread_counts_give_the_same_bits():
    check_same_bits(PROGRAM, "0.1", "0.1001")


def test_an_instruction_set_that_is_not_there_is_refused():
    with pytest.raises(AssertionError, match=r"\[DFLASH_NATIVE_ISA\] expected an instruction set"):
        run(PROGRAM, "0.1", DFLASH_NATIVE_ISA="sparc")
    for threads in ("0", "-3", "two", "99999", ""):
        with pytest.raises(
            AssertionError, match=r"\[DFLASH_NATIVE_NUM_THREADS\] expected a number"
        ):
            run(PROGRAM, "0.1", DFLASH_NATIVE_NUM_THREADS=threads)


FAILURES = """
import time
import mlx.core as mx
mx.set_default_device(mx.cpu)
from dflash_native import ops
window, x, ones = mx.zeros((1, 3, 64)), mx.zeros((1, 4, 64)), mx.ones((64, 64))
failures = 0
for i in range(150):
    try:
        mx.async_eval(ops.conv_window(window, x, mx.array([99])))
        time.sleep(0.001)  # the error is there when the next operations are queued
        for _ in range(i % 7):
            mx.eval(ones + 1)
        y = ones
        for _ in range(40):
            y = y @ ones
        mx.eval(y)
    except RuntimeError as error:
        assert "expected keep[0]" in str(error)
        failures += 1
print(failures)
"""


def test_evaluations_that_fail_do_not_add_up_to_a_deadlock() -> None:
    """MLX miscounts its tasks when an error surfaces in the middle of an evaluation, and waits for
    ever from the eleventh time on. Before, this program hung after 55 failures.
    """
    done = subprocess.run(
        [sys.executable, "-c", FAILURES], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 150
