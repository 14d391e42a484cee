"""The checks on the pretended CUDA device, in processes of their own, because the device changes torch."""

import functools
import json
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
from pretended.checks import GROUPS
from ranks import run_program

TESTS = Path(__file__).parents[1]
needs_a_guard = pytest.mark.skipif(
    not torch.backends.cuda.is_built() and shutil.which("g++") is None,
    reason="the simulated device needs a C++ compiler, g++, for the guard that a CPU build of torch lacks",
)

needs_no_driver = pytest.mark.skipif(
    torch.backends.cuda.is_built() and not torch.cuda.is_available(),
    reason="operations of a CUDA build of torch ask for its driver: the simulated device needs a CPU build, or a GPU",
)


@pytest.fixture(scope="module")
def failures():
    """The failures of the checks of a group, from one process."""

    @functools.cache
    def of(group):
        paths = os.pathsep.join([str(TESTS), str(TESTS.parent)])
        kind = "xla" if group == "backward" else "cuda"
        command = [sys.executable, "-W", "ignore", "-m", "pretended.checks", group]
        done = run_program(command, PYTHONPATH=paths, PRETENDED=kind)
        assert done.returncode == 0, done.stderr[-3000:]
        return dict(map(json.loads, done.stdout.splitlines()))

    return of


@needs_a_guard
@needs_no_driver
@pytest.mark.slow
@pytest.mark.parametrize(
    ("group", "check"),
    [
        pytest.param(group, check, marks=pytest.mark.xdist_group(f"pretended, {group}"), id=check)
        for group, checks in GROUPS.items()
        for check in checks
    ],
)
def test_the_pretended_device(failures, group, check):
    assert failures(group)[check] == ""
