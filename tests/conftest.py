"""Every test starts from the same random numbers; Hypothesis explores new ones under HYPOTHESIS_PROFILE=explore.

The quick run is ``pytest -m "not slow"``. It leaves out the tests with the mark ``slow``, the contract tests of an
entry that ``varies``, and all but ``QUICK_CASES`` cases of each parametrized test. A full run takes each entry with one
dtype and one way of each test. An entry that ``varies`` takes about half of the tests.
"""

import gc
import os
import re
from collections import defaultdict
from pathlib import Path
from zlib import crc32

import pytest
import torch
from hypothesis import settings

settings.register_profile("same", deadline=None, derandomize=True, max_examples=50)
settings.register_profile("explore", deadline=None, max_examples=1000)
settings.register_profile("quick", deadline=None, derandomize=True, max_examples=10)

QUICK_CASES = int(os.environ.get("QUICK_CASES", "2"))
LONG = ("test_pretended", "test_process_group", "test_recipes", "test_examples", "test_without_fast")
SLOW_MODULE = re.compile(r"^pytestmark = .*pytest\.mark\.slow", re.MULTILINE)


if "PYTEST_XDIST_WORKER" in os.environ:  # each process has a core
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"  # for the processes that tests start


@pytest.fixture(autouse=True)
def _seed() -> None:
    if torch.cuda.is_available():
        torch.manual_seed(0)
    else:  # which would store a traceback for each kind of device that is not there: 15 s in a full run
        torch.default_generator.manual_seed(0)


@pytest.fixture(autouse=True, scope="module")
def _short_collections() -> None:
    """Garbage collections leave out what earlier modules have left: with it, each takes 2 to 7 s late in a full run.

    Trainers, other libraries and the compiler make objects by the million.
    """
    gc.collect()
    gc.freeze()


def is_quick(config: pytest.Config) -> bool:
    return "not slow" in config.option.markexpr


def pytest_configure(config: pytest.Config) -> None:
    """The quick run draws fewer examples."""
    usual = "quick" if is_quick(config) else "same"
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", usual))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """The quick run does not import modules with slow tests only, because some import trainers for seconds."""
    if collection_path.suffix == ".py" and is_quick(config) and SLOW_MODULE.search(collection_path.read_text()):
        return True
    return None


def few(items: list[pytest.Item]) -> list[pytest.Item]:
    """All tests, but each entry with one dtype and one way. One that varies another takes half of the tests."""
    chosen: dict[object, pytest.Item] = {}
    for item in sorted(items, key=lambda item: crc32(item.nodeid.encode())):
        params = item.callspec.params if hasattr(item, "callspec") else {}
        entry, test = params.get("entry"), (item.nodeid.partition("[")[0], params.get("check"))
        if not hasattr(entry, "varies"):
            chosen[item] = item
        elif not entry.varies or crc32(f"{test} {entry}".encode()) % 2:
            chosen.setdefault((*test, entry.name), item)
    kept = set(chosen.values())
    return [item for item in items if item in kept]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Cases are slow if their entry only varies another one, or if their test has enough others.

    A checksum chooses the cases, so that each test takes other entries, dtypes and layers, in every run the same ones.
    Files with tests of many seconds come first, because at the end one core would wait for the last of them.
    """
    items[:] = few(sorted(items, key=lambda item: not item.path.stem.endswith(LONG)))
    cases = defaultdict(list)
    for item in items:
        callspec = getattr(item, "callspec", None)
        if callspec is None or item.get_closest_marker("slow"):
            continue
        if getattr(callspec.params.get("entry"), "varies", False):
            item.add_marker(pytest.mark.slow)
        else:
            cases[item.nodeid.partition("[")[0]].append(item)
    for test in cases.values():
        given = test[0].get_closest_marker("quick_cases")
        count = given.args[0] if given else QUICK_CASES
        for item in sorted(test, key=lambda item: crc32(item.nodeid.encode()))[count:]:
            item.add_marker(pytest.mark.slow)
