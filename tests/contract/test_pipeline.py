"""Stages of a pipeline, each under FSDP2, train as one process with the whole model and the whole batch."""

import pytest
import ranks
import torch
from contract import pipeline
from contract.pipeline import JOBS, SCHEDULES
from contract.resharding import assert_near

LIMIT = 240.0


def assert_equals_one_process(found, expected):
    """``found`` is what each rank has found."""
    for own in found[1:]:
        assert_near(own["metrics"], found[0]["metrics"], 0.0, "metrics of ranks")
        assert_near(own["joint"], found[0]["joint"], 0.0, "joint state of ranks")
    together = {}
    for own in found:
        for key, value in own["own"].items():
            assert_near(value, together.setdefault(key, value), 0.0, key)
    assert_near(together, expected["own"], 1e-9)
    assert_near(found[0]["metrics"], expected["metrics"], 1e-9)
    assert_near(found[0]["joint"], expected["joint"], 1e-9)


@pytest.mark.parametrize("job", JOBS)
def test_jobs_skip_as_many_steps_as_they_say(job):
    metrics = pipeline.one_process(JOBS[job])["metrics"]
    assert metrics.get(f"{pipeline.STEPS - 1} skipped_steps", 0) == JOBS[job].skipped


def test_a_pipeline_with_a_joint_clip_trains_as_one_process():
    found = ranks.run(pipeline.all_jobs, 4, "GPipe", ["SkipStep"])
    assert_equals_one_process([own["SkipStep"] for own in found], pipeline.one_process(JOBS["SkipStep"]))


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_pipelines_train_as_one_process(schedule):
    found = ranks.run(pipeline.all_jobs, 4, schedule, list(JOBS), limit=LIMIT)
    for name, job in JOBS.items():
        assert_equals_one_process([own[name] for own in found], pipeline.one_process(job))
