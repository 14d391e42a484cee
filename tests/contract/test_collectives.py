"""How many collectives a step takes in 256 processes: as many for 400 tensors as for 100."""

import functools

import pytest
import ranks
from contract import collectives
from contract.collectives import CHAINS, FUNCTIONS

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("collectives")]  # one process has the counts

# For each transform that needs norms, an all-reduce for each dimension of the mesh, which has two: shards and tensor
# parallel. Joint deviations, means and norms of averages need two more, that ask who has a gradient. With a process
# group, one more for each joint norm or statistic, and one for the metrics. A joint clip behind a gate uses its norm.
# A function that raises if the norm is not finite needs an all-reduce more for each dimension of the mesh.
EXPECTED = {
    "Adam": (0, 0),
    "ClipNorm": (2, 4),
    "ClipNorm, each tensor": (2, 3),
    "two ClipNorm": (4, 7),
    "ClipNorm, std": (6, 8),
    "Centralize": (4, 5),
    "ClipNormByEMA": (6, 9),
    "AdaGC": (2, 4),
    "ZClip": (2, 4),
    "ClipValue": (2, 3),
    "SkipStep": (4, 5),
    "SkipStep, ClipNorm": (4, 6),
    "clip_grad_norm_": (2, 3),
    "clip_grad_norm_, judged": (4, 5),
    "get_total_norm": (2, 3),
    "get_total_norm, judged": (4, 5),
}
"""Without a process group, and with one."""


@functools.cache
def counted():
    (found,) = ranks.run(collectives.counts, 1, (100, 400))
    return found


@pytest.mark.parametrize("name", [*CHAINS, *FUNCTIONS])
def test_collectives_of_a_step(name):
    for number in (100, 400):
        found = [sum(counted()[name, number, has_group].values()) for has_group in (False, True)]
        assert tuple(found) == EXPECTED[name], number
