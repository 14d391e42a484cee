"""Every test starts from the same random numbers; Hypothesis explores new ones under HYPOTHESIS_PROFILE=explore."""

import os

import pytest
import torch
from hypothesis import settings

settings.register_profile("same", deadline=None, derandomize=True)
settings.register_profile("explore", deadline=None, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))


if "PYTEST_XDIST_WORKER" in os.environ:  # each process has a core
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"  # for the processes that tests start


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Contract tests of entries that only vary another one are slow."""
    for item in items:
        callspec = getattr(item, "callspec", None)
        if callspec is not None and getattr(callspec.params.get("entry"), "varies", False):
            item.add_marker(pytest.mark.slow)
