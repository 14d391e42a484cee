"""A checkpoint under FSDP2 loads into a run of another number of processes, and training goes on as in one process."""

import functools

import pytest
import ranks
from contract import resharding
from contract.resharding import JOBS, SAVED, STEPS, WAYS, assert_near, joined, training_of

ALL = [(name, way) for name in JOBS for way in WAYS]
EACH = list(zip(JOBS, WAYS, strict=True))
"""Each job and each way once."""
slow = [pytest.mark.slow, pytest.mark.xdist_group("resharding")]  # one process has the checkpoints


@functools.cache
def unbroken(name, way):
    """One process without sharding: at the step of the checkpoint, and at the end."""
    training = training_of(name, way, is_sharded=False)
    training.steps(0, SAVED)
    saved = training.found()
    training.steps(SAVED, STEPS)
    return saved, training.found()


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """The checkpoints of runs of ``count`` processes: their folder, and what was saved."""

    @functools.cache
    def written(count):
        folder = tmp_path_factory.mktemp(f"of_{count}")
        return folder, ranks.run(resharding.save, count, folder, ALL)

    return written


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


@pytest.mark.parametrize(
    ("before", "after", "jobs"),
    [pytest.param(*case, marks=slow, id=f"{case[0]} to {case[1]}") for case in [(4, 2, ALL), (1, 4, EACH)]],
)
def test_a_checkpoint_loads_into_another_number_of_processes(checkpoints, before, after, jobs):
    folder, saved = checkpoints(before)
    resumed = ranks.run(resharding.resume, after, folder, jobs)
    for job in jobs:
        assert_went_on(saved, resumed, job)


@pytest.mark.slow
def test_a_checkpoint_that_is_written_during_training_has_the_state_of_its_step(tmp_path):
    during = ranks.run(resharding.save_during_training, 4, tmp_path, EACH)
    resumed = ranks.run(resharding.resume, 2, tmp_path, EACH)
    for job in EACH:
        assert_near(joined([found[job][1] for found in during]), unbroken(*job)[1], 1e-9)
        assert_went_on([{job: found[job][0]} for found in during], resumed, job)
