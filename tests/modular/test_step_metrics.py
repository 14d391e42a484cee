"""The metrics of the last step, those of a planned step too."""

import copy
import pickle

import pytest
import torch

from torchzero_clip.modular.step_metrics import StepMetrics


def planned(memory):
    metrics = StepMetrics({"old": torch.zeros(())})
    metrics.compute = lambda: {"norm": memory * 2}
    return metrics


def test_metrics_of_a_planned_step_are_computed_each_time_they_are_read():
    memory = torch.tensor(1.0)
    metrics = planned(memory)
    assert metrics.read() == {"norm": 2.0}
    memory.fill_(3.0)  # as a replay does
    assert metrics.read() == {"norm": 6.0}


def test_a_copy_is_not_replaced_by_later_steps():
    metrics = planned(torch.tensor(1.0))
    ordinary = StepMetrics({"norm": torch.tensor(5.0)})
    before, before_ordinary = metrics.copy(), ordinary.copy()
    metrics.forget()
    ordinary.forget()
    assert metrics.read() == ordinary.read() == {}
    assert before.read() == {"norm": 2.0}
    assert before_ordinary.read() == {"norm": 5.0}


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda metrics: pickle.loads(pickle.dumps(metrics))])
def test_copies_and_pickles_have_numbers(copied):
    memory = torch.tensor(1.0)
    other = copied(planned(memory))
    memory.fill_(3.0)
    assert other.compute is None
    assert other.read() == {"norm": 2.0}


def test_whoever_reads_gets_ordinary_tensors():
    metrics = planned(torch.tensor(1.0, requires_grad=True))
    with torch.inference_mode():
        (value,) = metrics.read().values()
    assert not value.is_inference()
    assert not value.requires_grad
