"""The machine of a run: what it is, how busy it was, and what it can do at best."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from dflash_native import _native
from dflash_native.doctor import build_info

from .timing import on_all_threads, on_cpu, percentiles, seconds

ROOT = Path(__file__).parents[1]


def header() -> dict[str, Any]:
    """Machine, backend, chip, system, versions, libmlx, commit, and how busy it is now."""
    info = build_info()
    extension = _native.extension
    return {
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "commit": commit(),
        "backend": info["backend"],
        "device": info["device"],
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "cpu_isa": extension.cpu_isa(),
        "cpu_threads": extension.cpu_threads(),
        "memory_gb": round(_memory_bytes() / 1e9, 1),
        "system": platform.platform(),
        "versions": info["versions"],
        "libmlx": info["libmlx"],
        "built_for_mlx": info["built_for_mlx"],
        "shaders": info["shader_hash"],
        "environment": info["environment"]
        | {key: value for key, value in os.environ.items() if key.startswith("MLX_")},
        "load": load(),
    }


def load() -> dict[str, Any]:
    """Runnable processes (1, 5, 15 minutes) and what the system says of heat and clocks."""
    busy: dict[str, Any] = {"average": [round(value, 2) for value in os.getloadavg()]}
    if shutil.which("nvidia-smi"):
        fields = "temperature.gpu,clocks.sm,clocks.max.sm,clocks_event_reasons.active"
        busy["gpu"] = _output("nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader")
    if platform.system() == "Darwin":
        busy["thermal"] = _output("pmset", "-g", "therm")
    zones = sorted(Path("/sys/class/thermal").glob("thermal_zone*/temp"))
    if zones:
        busy["celsius"] = [round(int(zone.read_text()) / 1000, 1) for zone in zones]
    return busy


def commit() -> str:
    """The commit of this clone, with "+" where files were changed since."""
    found = _output("git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD")
    changed = _output("git", "-C", str(ROOT), "status", "--porcelain", "--untracked-files=no")
    return f"{found or 'unknown'}{'+' if changed else ''}"


def name(header: dict[str, Any]) -> str:
    """A machine's name for files, as in cpu-intel-xeon-2core or nvidia-h200."""
    device = header["cpu"] if header["backend"] == "cpu" else header["device"]
    found = slug(re.sub(r"\(\w+\)|processor|cpu|@.*", " ", device.lower()))
    return f"cpu-{found}-{header['cores']}core" if header["backend"] == "cpu" else found


def slug(text: str) -> str:
    """Lower case, with hyphens for what is no letter, digit or dot."""
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-.")


def subject(document: dict[str, Any]) -> str:
    """What a run was about, in a few words: model and format."""
    settings = document["settings"]
    model = settings.get("shape") or settings.get("model")
    words = [Path(model).name if model else "demo pair"]
    if settings.get("layers"):
        words.append(f"{settings['layers']} layers")
    if settings.get("bits") in (4, 8):
        words.append(f"{settings['bits']} bits")
    words.append(settings.get("dtype") or " ".join(settings["dtypes"]))
    return " ".join([*words, "quick"] if settings["quick"] else words)


def limits(dtypes: list[str], quick: bool = False) -> dict[str, Any]:
    """What the machine does at best: GB/s of a copy, GFLOP/s of MLX's matmul, us of a launch.

    A copy counts the bytes it reads and those it writes. On a CPU it runs on the kernels' threads
    and the peak is the faster of MLX's and NumPy's fp32 product, whatever the operands' dtype:
    the kernels calculate in fp32. `launch_us` is one of many queued additions of a few numbers,
    `evaluation_us` one of them evaluated by itself.
    """
    repeats = 20
    copy = _copy(8_000_000 if quick else 400_000_000)
    found: dict[str, Any] = {"copy_gb_s": _best(copy, repeats) / 1e9}
    kinds = ["float32"] if on_cpu else dtypes
    size = 1024 if on_cpu else 256 if quick else 4096
    peaks = {kind: _peak(kind, size, repeats) / 1e9 for kind in kinds}
    found["matmul_gflop_s"] = {dtype: peaks.get(dtype, peaks[kinds[0]]) for dtype in dtypes}
    small = [mx.zeros((8,)) for _ in range(256)]
    mx.eval(small)

    def launches(count: int) -> list[mx.array]:
        return [x + 1 for x in small[:count]]

    found["launch_us"] = percentiles([seconds(launches, 256) for _ in range(20)])[1] * 1e6
    found["evaluation_us"] = percentiles([seconds(launches, 1) for _ in range(20)])[1] * 1e6
    return found


def better(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """The limits of two measurements, of each the better one."""
    peaks, others = first["matmul_gflop_s"], second["matmul_gflop_s"]
    return {
        "copy_gb_s": max(first["copy_gb_s"], second["copy_gb_s"]),
        "matmul_gflop_s": {dtype: max(peaks[dtype], others[dtype]) for dtype in peaks},
        **{name: min(first[name], second[name]) for name in ("launch_us", "evaluation_us")},
    }


def _best(rate: Callable[[], float], repeats: int) -> float:
    """The best of so many after one to warm up, or of as many as take two seconds."""
    end, found = time.perf_counter() + 2.0, [rate(), rate()]
    while len(found) <= repeats and time.perf_counter() < end:
        found.append(rate())
    return max(found)


def _copy(size: int) -> Callable[[], float]:
    """A function that copies `size` bytes and returns bytes a second, read and written."""
    if on_cpu:
        source, target = np.ones(size // 4, np.int32), np.zeros(size // 4, np.int32)

        def copy() -> float:
            start = time.perf_counter()
            on_all_threads(np.copyto, target, source)
            return 2 * size / (time.perf_counter() - start)

        return copy
    blocks = [mx.ones((size // 2,), dtype=mx.float16) for _ in range(4)]
    mx.eval(blocks)
    return lambda: 2 * size / seconds(lambda count: [x + 0 for x in blocks[:count]], 4)


def _peak(dtype: str, size: int, repeats: int) -> float:
    a = mx.random.normal((size, size)).astype(getattr(mx, dtype))
    mx.eval(a)
    best = _best(lambda: 2 * size**3 / seconds(lambda n: [a @ a for _ in range(n)], 2), repeats)
    if not on_cpu:
        return best
    b = np.ones((size, size), np.float32)

    def numpy_rate() -> float:
        start = time.perf_counter()
        b @ b
        return 2 * size**3 / (time.perf_counter() - start)

    return max(best, _best(numpy_rate, repeats))


def _cpu_name() -> str:
    if platform.system() == "Darwin":
        return _output("sysctl", "-n", "machdep.cpu.brand_string") or platform.machine()
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or platform.machine()
    found = re.search(r"^model name\s*: (.+)$", text, re.MULTILINE)
    return found[1] if found else platform.machine()


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _output(*command: str) -> str:
    """What a command prints; nothing where it fails or is not there."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
