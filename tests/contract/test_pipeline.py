"""Stages of a pipeline, each under FSDP2, train as one process with the whole model and the whole batch."""

import pytest
import ranks
import torch
from contract import pipeline
from contract.pipeline import JOBS, SCHEDULES
from contract.resharding import assert_near


def assert_equals_one_process(found, expected, name):
    """``found`` is what each rank has found in the training ``name``."""
    found = [own[name] for own in found]
    for own in found[1:]:
        assert_near(own["metrics"], found[0]["metrics"], 0.0, f"{name}, metrics of ranks")
        assert_near(own["joint"], found[0]["joint"], 0.0, f"{name}, joint state of ranks")
    together = {}
    for own in found:
        for key, value in own["own"].items():
            assert_near(value, together.setdefault(key, value), 0.0, f"{name}, {key}")
    assert_near(together, expected["own"], 1e-9, name)
    assert_near(found[0]["metrics"], expected["metrics"], 1e-9, name)
    assert_near(found[0]["joint"], expected["joint"], 1e-9, name)


@pytest.mark.parametrize("job", JOBS)
def test_jobs_skip_as_many_steps_as_they_say(job):
    metrics = pipeline.one_process(JOBS[job])["metrics"]
    assert metrics.get(f"{pipeline.STEPS - 1} skipped_steps", 0) == JOBS[job].skipped


def test_a_pipeline_with_a_joint_clip_trains_as_one_process():
    found = ranks.run(pipeline.all_jobs, 4, "GPipe", ["SkipStep"])
    assert_equals_one_process(found, pipeline.one_process(JOBS["SkipStep"]), "SkipStep")


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_pipelines_train_as_one_process(schedule):
    """Schedules differ only in the order of backwards, so each job runs under one."""
    names = list(JOBS)[list(SCHEDULES).index(schedule) :: 2]
    found = ranks.run(pipeline.all_jobs, 4, schedule, names)
    for name in names:
        assert_equals_one_process(found, pipeline.one_process(JOBS[name]), name)


@pytest.mark.slow
def test_a_joint_clip_of_stages_is_that_of_torchtitan():
    for found in ranks.run(pipeline.clips_as_torchtitan, 4):
        for theirs, ours in zip(found[::2], found[1::2], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=0.0)  # torch adds 1e-6 to the norm
            torch.testing.assert_close(ours[1], theirs[1], rtol=1e-12, atol=0.0)


@pytest.mark.slow
def test_a_nan_in_a_plain_gradient_of_one_rank_skips_the_step_on_all():
    for first, bad, last in ranks.run(pipeline.skips_a_nan_of_one_rank, 4):
        assert_near(bad["own"], first["own"], 0.0)
        assert [int(found["metrics"]["skipped_steps"]) for found in (first, bad, last)] == [0, 1, 1]
        assert not torch.equal(last["own"]["plain"], first["own"]["plain"])


@pytest.mark.slow
def test_a_nan_in_a_plain_gradient_of_one_rank_raises_on_all():
    for has_raised, before, after in ranks.run(pipeline.raises_for_a_nan_of_one_rank, 4):
        assert has_raised
        assert_near(after, before, 0.0)


@pytest.mark.slow
def test_a_tied_embedding_counts_once_by_two_halves():
    (embedding, *rest), norms = pipeline.tied_in_one_process()
    for rank, (params, found) in enumerate(ranks.run(pipeline.tied_in_two_stages, 2)):
        own = [embedding, *(rest[2:] if rank else rest[:2])]
        torch.testing.assert_close((params, found), (own, norms), rtol=1e-5, atol=0.0)  # torch adds 1e-6 to the norm
        torch.testing.assert_close(found[0], norms[0], rtol=1e-12, atol=0.0)


@pytest.mark.slow
def test_functions_count_zeros_where_another_process_has_a_gradient_and_nothing_where_none_has():
    expected = pipeline.functions_without_some_gradients(1)
    for found in ranks.run(pipeline.functions_without_some_gradients, 2, 2):
        for own, alone in zip(found, expected, strict=True):
            torch.testing.assert_close(own[0], alone[0], rtol=1e-12, atol=0.0)
            for i in (0, 2):
                torch.testing.assert_close(own[1][i], alone[1][i], rtol=1e-12, atol=1e-12)
