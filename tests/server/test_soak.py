"""A short soak; `python -m bench soak` is the long one, with the limit of 3 % for memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read from /proc")
def test_answers_stay_right_and_every_stream_ends_once():
    sizes = ["--sequential", "20", "--mixed", "36", "--growth", "0.15"]
    command = [sys.executable, "-m", "bench", "soak", *sizes]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["wrong"] == [] and found["left"] == 12
    asked = 12 + 20 + 36 + 24
    assert asked - found["left"] <= sum(found["ended"].values()) <= asked
    assert set(found["ended"]) <= {"done", "cancelled"}
