"""A checkpoint under FSDP2 loads into a run of another number of processes, and training goes on as in one process."""

import functools

import pytest
import ranks
from contract import resharding
from contract.resharding import JOBS, SAVED, STEPS, WAYS, assert_near, joined, training_of

EACH = list(zip(JOBS, WAYS, strict=True))
"""Each job and each way once."""
OTHERS = list(zip(JOBS, (*WAYS[1:], *WAYS[:1]), strict=True))
"""Each job in another way."""


@functools.cache
def unbroken(name, way):
    """One process without sharding: at the step of the checkpoint, and at the end."""
    training = training_of(name, way, is_sharded=False)
    training.steps(0, SAVED)
    saved = training.found()
    training.steps(SAVED, STEPS)
    return saved, training.found()


def without_metrics(found):
    return {key: value for key, value in found.items() if " metric " not in key}


def assert_went_on(saved, resumed, job):
    """``saved`` and ``resumed`` are what each rank of the two runs found."""
    half, end = unbroken(*job)
    saved = joined([found[job] for found in saved])
    assert_near(saved, half, 1e-9)
    assert_near(without_metrics(joined([found[job][0] for found in resumed])), without_metrics(saved), 0.0)
    assert_near(joined([found[job][1] for found in resumed]), end, 1e-9)


@pytest.mark.parametrize("name", JOBS)
def test_jobs_skip_steps_before_and_after_the_checkpoint(name):
    counts = [found.get("0 metric skipped_steps", 0) for found in unbroken(name, "nested")]
    assert tuple(map(int, counts)) == JOBS[name].skipped


def test_a_checkpoint_of_two_processes_loads_into_one_without_sharding(tmp_path):
    jobs = [("joint", "flattened")]
    saved = ranks.run(resharding.save, 2, tmp_path, jobs)
    resumed = ranks.run(resharding.resume, 1, tmp_path, jobs, is_sharded=False)
    assert_went_on(saved, resumed, *jobs)


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after", "jobs"), [(4, 2, EACH), (1, 4, OTHERS)], ids=["4 to 2", "1 to 4"])
def test_a_checkpoint_loads_into_another_number_of_processes(tmp_path, before, after, jobs):
    saved = ranks.run(resharding.save, before, tmp_path, jobs)
    resumed = ranks.run(resharding.resume, after, tmp_path, jobs)
    for job in jobs:
        assert_went_on(saved, resumed, job)


@pytest.mark.slow
def test_a_checkpoint_that_is_written_during_training_has_the_state_of_its_step(tmp_path):
    during = ranks.run(resharding.save_during_training, 4, tmp_path, EACH[1:])
    resumed = ranks.run(resharding.resume, 2, tmp_path, EACH[1:])
    for job in EACH[1:]:
        assert_near(joined([found[job][1] for found in during]), unbroken(*job)[1], 1e-9)
        assert_went_on([{job: found[job][0]} for found in during], resumed, job)
