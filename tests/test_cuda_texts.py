"""The CUDA texts on a machine without a GPU: NVRTC compiles them, and launches are recorded.

It shows that every kernel compiles for a chip of capability 9.0 and with which parameters and grid
it is launched, not what it computes: that is for the other tests, on a GPU.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest

PRETENCE = Path(__file__).parent / "cuda" / "pretence.cpp"
MLX = Path(mx.__file__).parent

PROGRAM = """
import mlx.core as mx
mx.set_default_device(mx.cpu)
from dflash_native import ops

def zeros(*shape, dtype=mx.float32):
    return mx.zeros(shape, dtype)

def products(dtype):
    for rows in (1, 32):
        x = zeros(rows, 512, dtype=dtype)
        ops.verify_matmul(x, zeros(256, 512, dtype=dtype), stream=mx.gpu)
        scales = zeros(256, 8, dtype=dtype)
        four = mx.zeros((256, 64), mx.uint32)
        parts = dict(scales=scales, biases=scales, group_size=64, bits=4)
        ops.verify_matmul(x, four, **parts, stream=mx.gpu)
    three = [{"weight": zeros(n, 512, dtype=dtype), "bias": zeros(n)} for n in (96, 8, 40)]
    assert [y.shape[-1] for y in ops.verify_matmuls(x, three, stream=mx.gpu)] == [96, 8, 40]
    assert ops.verify_matmuls(x, [], stream=mx.gpu) == []  # read past the end of none
    unlike = [dict(weight=four, **parts), *three[:1]]
    assert len(ops.verify_matmuls(x, unlike, stream=mx.gpu)) == 2
    experts, which = zeros(3, 256, 512, dtype=dtype), mx.array([2, 0, 1, 1, 0])
    ops.verify_gather_matmul(zeros(5, 512, dtype=dtype), experts, which, stream=mx.gpu)

def attention(dtype):
    for inputs, dim in ((1, 128), (16, 64)):
        q, k = zeros(2, 16, inputs, dim, dtype=dtype), zeros(2, 4, 600, dim, dtype=dtype)
        ops.verify_attention(q, k, k, [300, 5], 0.1, sinks=zeros(16), stream=mx.gpu)

def layers(dtype):
    q, v = zeros(1, 5, 2, 128, dtype=dtype), zeros(1, 5, 4, 128, dtype=dtype)
    state, rows = zeros(1, 4, 128, 128), zeros(1, 5, 4)
    _, tape, _ = ops.gated_delta_verify(q, q, v, rows, rows, state, stream=mx.gpu)
    ops.gated_delta_replay(state, tape, mx.array([3]), stream=mx.gpu)
    a, x = zeros(1, 5, 4, dtype=dtype), zeros(1, 5, 64, dtype=dtype)
    ops.gated_delta_gates(a, a, zeros(4), zeros(4, dtype=dtype), stream=mx.gpu)
    ops.causal_conv1d_verify(x, zeros(64, 4, dtype=dtype), x[:, :3], stream=mx.gpu)
    ops.conv_window(x[:, :3], x, mx.array([2]), stream=mx.gpu)

def rows(dtype):
    x, weight = zeros(2, 3, 40, dtype=dtype), zeros(40)
    for out in (
        ops.rms_norm(x, weight.astype(dtype), 1e-6, stream=mx.gpu),
        *ops.add_rms_norm(x, x, None, 1e-6, stream=mx.gpu),
        ops.rope(zeros(2, 3, 5, 8, dtype=dtype), [3, 9], 4, base=1e4, stream=mx.gpu),
    ):
        assert out.dtype == dtype
        print(*out.shape)
    try:
        ops.swiglu(x, x[:1], stream=mx.gpu)
    except ValueError as error:
        print(error)
"""

# Name, form of the code, inputs, outputs, the sizes that are passed, threads.
LAUNCHED = {
    "products": """
verify_matmul ELF 2 1 1 512 1 256 grid 512 8 1 group 32 8 1
verify_matmul ELF 4 1 1 512 1 256 grid 512 8 1 group 32 8 1
verify_matmul ELF 2 1 32 512 1 256 grid 512 8 1 group 32 8 1
verify_matmul ELF 4 1 32 512 1 256 grid 512 8 1 group 32 8 1
verify_matmul ELF 7 3 32 512 1 96 8 40 grid 320 8 1 group 32 8 1
verify_matmul ELF 4 1 32 512 1 256 grid 512 8 1 group 32 8 1
verify_matmul ELF 3 1 32 512 1 96 grid 192 8 1 group 32 8 1
verify_matmul ELF 3 1 5 512 3 256 grid 2560 8 1 group 32 8 1
""",
    "attention": """
attend_chunk ELF 4 2 1 4 4 600 grid 32 3 8 group 32 1 1
combine_chunks ELF 4 1 1 16 3 600 grid 1024 64 1 group 32 16 1
attend_chunk ELF 4 2 16 4 4 600 STAGED
combine_chunks ELF 4 1 16 16 3 600 grid 16384 32 1 group 32 16 1
""",
    "layers": """
gated_delta ELF 6 2 5 0 grid 128 32 1 group 32 4 1
gated_delta ELF 5 1 0 5 grid 128 32 1 group 32 4 1
gated_delta_gates ELF 4 2 20 4 grid 128 1 1 group 128 1 1
causal_conv1d ELF 3 1 5 grid 5 128 1 group 1 128 1
conv_window ELF 3 1 5 grid 3 128 1 group 1 128 1
""",
    "rows": """
2 3 40
2 3 40
2 3 40
2 3 5 8
[swiglu] expected gate of shape (1, 3, 40) but got (2, 3, 40).
""",  # MLX's own kernels
}
STAGED = {False: "grid 256 3 8 group 32 1 1", True: "grid 32 12 8 group 32 4 1"}


@pytest.fixture(scope="module")
def preload(tmp_path_factory: pytest.TempPathFactory) -> str:
    """NVRTC, which MLX's CUDA build would have loaded, and the pretended device."""
    if mx.cuda.is_available():
        pytest.skip("there is a real one")
    package = importlib.util.find_spec("nvidia")
    roots = package.submodule_search_locations if package else None
    nvrtc = [found for root in roots or () for found in Path(root).glob("*/lib/libnvrtc.so.13")]
    if not nvrtc or not shutil.which("g++"):
        reason = "needs g++ and NVRTC: pip install 'nvidia-cuda-nvrtc==13.*'"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    library = tmp_path_factory.mktemp("cuda") / "pretence.so"
    flags = ["-std=c++20", "-fPIC", "-shared", f"-I{MLX / 'include'}", f"-Wl,-rpath,{MLX / 'lib'}"]
    subprocess.run(
        ["g++", *flags, PRETENCE, "-o", library, f"-L{MLX / 'lib'}", "-lmlx"], check=True
    )
    return f"{nvrtc[0]} {library}"


def run(preload: str, program: str, capability: int = 90) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM + program],
        env=os.environ | {"LD_PRELOAD": preload, "PRETENDED_CAPABILITY": str(capability)},
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("kernels", LAUNCHED)
def test_texts_compile_and_are_launched(preload: str, kernels: str, dtype: str) -> None:
    done = run(preload, f"{kernels}(mx.{dtype})")
    assert done.returncode == 0, done.stderr
    staged = STAGED[dtype != "float32"]
    assert done.stdout == LAUNCHED[kernels].lstrip().replace("STAGED", staged)


def test_what_does_not_compile_is_told(preload: str) -> None:
    """The control: a chip of capability 7.5 has no matrix instruction for bfloat16."""
    done = run(preload, "products(mx.bfloat16)", capability=75)
    assert done.returncode == 1
    assert "[dflash_native] verify_matmul.cu does not compile:" in done.stderr
    assert ".bf16" in done.stderr
