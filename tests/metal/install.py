"""`python -m tests.metal setup`: compilers by apt, build tools and the macOS wheel by pip. Safe to
repeat."""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path

from . import macos
from .tools import CACHE, BenchError, emulator_objects, missing, missing_python, run


def setup() -> None:
    """Install what is missing; raises BenchError with the command to run if that needs root.

    Python packages go to, and mlx and numpy come from, the environment that runs this.
    """
    packages = missing()
    if packages:
        command = ["apt-get", "install", "-y", "--no-install-recommends", *packages]
        if os.geteuid() != 0:
            raise BenchError(f"missing; as root: apt-get update && {' '.join(command)}")
        os.environ["DEBIAN_FRONTEND"] = "noninteractive"
        print(f"installing {' '.join(packages)}", flush=True)
        run("apt-get", "update")
        run(*command)
    if missing():
        raise BenchError(f"still missing after the installation: {' '.join(missing())}")
    requirements = missing_python()
    if requirements:
        print(f"installing {' '.join(requirements)}", flush=True)
        run(sys.executable, "-m", "pip", "install", "--quiet", *requirements)
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        raise BenchError(f"{sys.executable} has no headers: install its development package")
    macos.download()
    emulator_objects()
    print(f"ready; compiled shaders are kept in {CACHE}")
