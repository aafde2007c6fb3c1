"""Times of the kernels themselves on an NVIDIA GPU, by CUPTI through PyTorch's profiler.

    python bench/profile_gpu.py COMMAND.py ARGUMENTS

Runs a benchmark in this process and prints, for each kernel and launch size, how often it ran and
the median, 10th and 90th percentile of its time on the device: without the host's share, which the
benchmark's own figures include. Needs PyTorch for the same CUDA version.
"""

from __future__ import annotations

import collections
import json
import runpy
import statistics
import sys
import tempfile
from pathlib import Path

import torch


def main() -> None:
    torch.cuda.init()
    sys.argv = sys.argv[1:]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        runpy.run_path(sys.argv[0], run_name="__main__")
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    times: dict[tuple[str, str], list[float]] = collections.defaultdict(list)
    for event in events:
        if event.get("cat") == "kernel":
            grid = event["args"].get("grid")
            times[event["name"][:110], str(grid)].append(event["dur"])
    print(f"{'median us':>10} {'(10..90 %)':>18} {'count':>6}  kernel, grid")
    for (name, grid), found in sorted(times.items(), key=lambda item: -sum(item[1])):
        deciles = statistics.quantiles(found, n=10) if len(found) > 1 else found * 9
        print(
            f"{statistics.median(found):10.2f} {f'({deciles[0]:.2f}..{deciles[-1]:.2f})':>18} "
            f"{len(found):6d}  {name} {grid}"
        )


if __name__ == "__main__":
    main()
