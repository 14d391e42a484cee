"""Clipping in two and three gloo processes equals one process, and an error in one process is an error in all."""

import pytest
import ranks
from per_sample import several

QUICK = ["backward_equals_one_process gpt unequal mean", "classic_equals_one_process frozen unequal mean"]
KINDS = [*((kind, 2) for kind in several.WRAPS), ("replicated", 3), ("sharded", 3)]
"""Three processes hold shards of different sizes; blocks that are sharded by themselves have them in no other way."""


@pytest.fixture(scope="module")
def results():
    return {}


@pytest.mark.slow
@pytest.mark.xdist_group("several")
@pytest.mark.parametrize(
    ("kind", "count", "name"), [(kind, count, name) for kind, count in KINDS for name in several.cases(count, kind)]
)
def test_several_processes(results, kind, count, name):
    if (kind, count) not in results:  # the same processes make all checks, because it takes seconds to start them
        try:
            results[kind, count] = ranks.run(several.run, count, kind, list(several.cases(count, kind)))
        except AssertionError as error:
            results[kind, count] = error
    found = results[kind, count]
    assert isinstance(found, list), found
    assert [failures.get(name) for failures in found] == [None] * count


def test_two_processes_equal_one():
    assert ranks.run(several.run, 2, "sharded", QUICK) == [{}, {}]
