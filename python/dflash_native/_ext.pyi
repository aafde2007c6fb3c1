"""Types of the extension; documented in `dflash_native.ops`."""

import mlx.core as mx

MLX_VERSION: str
NANOBIND_VERSION: str

_Stream = mx.Stream | mx.Device | None
_Tape = tuple[mx.array, mx.array, mx.array, mx.array | None]

def round_trip(x: mx.array) -> mx.array: ...
def cpu_isa() -> str: ...
def cpu_threads() -> int: ...
def metal_kernel_source() -> str: ...
def shader_hash() -> str: ...
def gated_delta_gates(
    a: mx.array, b: mx.array, A_log: mx.array, dt_bias: mx.array, stream: _Stream = None
) -> tuple[mx.array, mx.array]: ...
def gated_delta_verify(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    g: mx.array,
    beta: mx.array,
    state: mx.array,
    tape: _Tape | None = None,
    keep: mx.array | None = None,
    mask: mx.array | None = None,
    stream: _Stream = None,
) -> tuple[mx.array, mx.array, mx.array]: ...
def gated_delta_step(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    g: mx.array,
    beta: mx.array,
    state: mx.array,
    mask: mx.array | None = None,
    stream: _Stream = None,
) -> tuple[mx.array, mx.array]: ...
def gated_delta_replay(
    state: mx.array, tape: _Tape, keep: mx.array, stream: _Stream = None
) -> mx.array: ...
def causal_conv1d_verify(
    x: mx.array, weight: mx.array, window: mx.array, stream: _Stream = None
) -> mx.array: ...
def conv_window(
    window: mx.array, x: mx.array, keep: mx.array, stream: _Stream = None
) -> mx.array: ...
def kv_write(
    cache: mx.array,
    new: mx.array,
    lengths: mx.array,
    starts: list[int] | None,
    after: mx.array | None,
    stream: _Stream = None,
) -> mx.array: ...
def verify_attention(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    lengths: mx.array,
    scale: float,
    window: int | None = None,
    causal: bool = True,
    mask: mx.array | None = None,
    sinks: mx.array | None = None,
    stream: _Stream = None,
) -> mx.array: ...
def rms_norm(
    x: mx.array, weight: mx.array | None, eps: float, stream: _Stream = None
) -> mx.array: ...
def rms_norm_gated(
    x: mx.array, gate: mx.array, weight: mx.array | None, eps: float, stream: _Stream = None
) -> mx.array: ...
def add_rms_norm(
    x: mx.array, residual: mx.array, weight: mx.array | None, eps: float, stream: _Stream = None
) -> tuple[mx.array, mx.array]: ...
def swiglu(gate: mx.array, up: mx.array, stream: _Stream = None) -> mx.array: ...
def sigmoid_gate(x: mx.array, gate: mx.array, stream: _Stream = None) -> mx.array: ...
def rope(
    x: mx.array,
    lengths: mx.array,
    dims: int,
    base: float | None = None,
    freqs: mx.array | None = None,
    scale: float = 1.0,
    traditional: bool = False,
    stream: _Stream = None,
) -> mx.array: ...
def pack_matmul(
    weight: mx.array,
    scales: mx.array | None,
    biases: mx.array | None,
    group_size: int,
    bits: int,
    stream: _Stream = None,
) -> tuple[mx.array, mx.array | None, mx.array | None]: ...
def verify_matmul(
    x: mx.array,
    weight: mx.array,
    scales: mx.array | None,
    biases: mx.array | None,
    bias: mx.array | None,
    group_size: int,
    bits: int,
    packed: tuple[int, int] | None,
    stream: _Stream = None,
) -> mx.array: ...
def verify_matmuls(
    x: mx.array,
    weights: list[
        tuple[
            mx.array,
            mx.array | None,
            mx.array | None,
            mx.array | None,
            int,
            int,
            tuple[int, int] | None,
        ]
    ],
    stream: _Stream = None,
) -> list[mx.array]: ...
def verify_gather_matmul(
    x: mx.array,
    weight: mx.array,
    indices: mx.array,
    scales: mx.array | None,
    biases: mx.array | None,
    bias: mx.array | None,
    group_size: int,
    bits: int,
    packed: tuple[int, int] | None,
    stream: _Stream = None,
) -> mx.array: ...
