"""How many collectives a step takes in 256 processes: as many for 400 tensors as for 100."""

import functools

import pytest
import ranks
from contract import collectives
from contract.collectives import CHAINS

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("collectives")]  # one process has the counts

# For each transform that needs norms, an all-reduce for each dimension of the mesh, which has two: shards and tensor
# parallel. Chains with state per parameter have two more, that ask who has a gradient. With a process group, one more
# for each joint norm or statistic, and one for the metrics.
EXPECTED = {
    "Adam": (2, 2),
    "ClipNorm": (4, 6),
    "ClipNorm, each tensor": (4, 5),
    "two ClipNorm": (6, 9),
    "ClipNorm, std": (6, 8),
    "Centralize": (4, 5),
    "ClipNormByEMA": (6, 9),
    "AdaGC": (4, 6),
    "ZClip": (4, 6),
    "ClipValue": (4, 5),
    "SkipStep": (6, 7),
    "SkipStep, ClipNorm": (8, 11),
}
"""Without a process group, and with one."""


@functools.cache
def counted():
    (found,) = ranks.run(collectives.counts, 1, (100, 400))
    return found


@pytest.mark.parametrize("chain", CHAINS)
def test_collectives_of_a_step(chain):
    for number in (100, 400):
        found = [sum(counted()[chain, number, has_group].values()) for has_group in (False, True)]
        assert tuple(found) == EXPECTED[chain], number
