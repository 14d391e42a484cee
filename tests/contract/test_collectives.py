"""How many collectives a step takes in 256 processes: as many for 100 tensors as for 25."""

import functools

import pytest
import ranks
from contract import collectives

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("collectives")]  # one process has the counts

# For each transform that needs norms, an all-reduce for each dimension of the mesh, which has two: shards and tensor
# parallel. Joint deviations, means and norms of averages need two more, that ask who has a gradient. With a process
# group, one more for each joint norm or statistic, and one for the metrics. A joint clip behind a gate uses its norm.
# A function that raises if the norm is not finite needs an all-reduce more for each dimension of the mesh.
NUMBERS = (25, 100)
CHAINS = {
    "Adam": (0, 0),
    "ClipNorm global + Adam": (2, 4),
    "ClipNorm + Adam": (2, 3),
    "ClipNorm global, of 2 + ClipNorm l1 global + Adam": (4, 7),
    "ClipNorm std global + Adam": (6, 8),
    "Centralize global + Adam": (4, 5),
    "ClipNormByEMA joint + Adam": (6, 9),
    "AdaGC + Adam": (2, 4),
    "ZClip + Adam": (2, 4),
    "ClipValue + Adam": (2, 3),
    "SkipStep + Adam": (4, 5),
    "SkipStep + ClipNorm global + Adam": (4, 6),
}
FUNCTIONS = {
    "clip_grad_norm_": (2, 3),
    "clip_grad_norm_, judged": (4, 5),
    "get_total_norm": (2, 3),
    "get_total_norm, judged": (4, 5),
}
EXPECTED = {**CHAINS, **FUNCTIONS}
"""Without a process group, and with one."""


@functools.cache
def counted():
    (found,) = ranks.run(collectives.counts, 1, NUMBERS, list(CHAINS))
    return found


@pytest.mark.parametrize("name", EXPECTED)
def test_collectives_of_a_step(name):
    for number in NUMBERS:
        found = [sum(counted()[name, number, has_group].values()) for has_group in (False, True)]
        assert tuple(found) == EXPECTED[name], number
