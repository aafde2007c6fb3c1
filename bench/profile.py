"""`python -m bench profile COMMAND ARGUMENTS`: times of kernels by CUPTI, through PyTorch.

Runs a command of these benchmarks in this process and prints, for each kernel and launch size, how
often it ran and the median, 10th and 90th percentile of its time on the device: without the host's
share, which the command's own figures include. Needs an NVIDIA GPU, and PyTorch for its CUDA.
"""

from __future__ import annotations

import argparse
import collections
import json
import statistics
import tempfile
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="COMMAND ARGUMENTS")


def run(options: argparse.Namespace) -> int:
    """Prints a line for each kernel, the costly ones first; what the command returned."""
    import torch  # no dependency of ours

    from .__main__ import main

    torch.cuda.init()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        code = main(options.arguments)
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

    return code
