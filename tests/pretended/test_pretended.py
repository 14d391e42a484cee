"""The checks on the pretended CUDA device, each in a process of its own, because the device changes torch."""

import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
from pretended.checks import CHECKS
from ranks import run_program

TESTS = Path(__file__).parents[1]
needs_a_guard = pytest.mark.skipif(
    not torch.backends.cuda.is_built() and shutil.which("g++") is None,
    reason="the pretended device needs a C++ compiler, g++, for the guard that a CPU build of torch lacks",
)


@needs_a_guard
@pytest.mark.slow
@pytest.mark.parametrize("check", CHECKS)
def test_the_pretended_device(check):
    paths = os.pathsep.join([str(TESTS), str(TESTS.parent)])
    command = [sys.executable, "-W", "ignore", "-m", "pretended.checks", check]
    found = run_program(command, PYTHONPATH=paths)
    assert found.returncode == 0, found.stderr[-3000:]
