"""Two gloo processes under FSDP2 equal one process, and resume through torch.distributed.checkpoint."""

import pytest
import ranks
from contract import sharded
from contract.entries import ENTRIES

# one process runs all, because they share a fixture
LIMIT = 1800.0  # 130 s on two free cores, 470 s on busy ones
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("sharded")]


@pytest.fixture(scope="module")
def result():
    return ranks.run(sharded.run, 2, limit=LIMIT)[0]


@pytest.mark.parametrize("check", sharded.PER_ENTRY)
@pytest.mark.parametrize("entry", ENTRIES, ids=str)
def test_entry(result, entry, check):
    name = f"{entry} {check}"
    assert name in result["ran"]
    assert name not in result["failures"], result["failures"].get(name)


@pytest.mark.parametrize("check", sharded.ONCE)
def test_once(result, check):
    assert check in result["ran"]
    assert check not in result["failures"], result["failures"].get(check)
