"""Transforms before an optimizer of torch in two gloo processes: FSDP2, checkpoints, stages of a pipeline."""

import pytest
import ranks
from other_optimizer import sharded_before_step as programs

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    "program",
    [programs.sharded_is_one_process, programs.stages_are_one_process, programs.a_model_that_is_sharded_afterwards],
)
def test_two_processes_are_one(program):
    ranks.run(program, 2)


@pytest.mark.parametrize("way", ["flattened", "broadcast"])  # `contract/test_sharded` resumes chains in all four
def test_it_resumes_through_checkpoints(way):
    ranks.run(programs.sharded_resumes, 2, way)
