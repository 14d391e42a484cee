"""Counts and answers of steps about which a device decides. A CPU stands in for it: there is only arithmetic."""

import math

import pytest
import torch

from torchzero_clip.engine.device_decisions import MOST_LATE, Answers, DeviceDecisions

CPU = torch.device("cpu")


class Sent:
    """Numbers that arrive when a test says so."""

    has_arrived = False

    def __init__(self, numbers):
        self.numbers = numbers.tolist()

    def arrived(self):
        return Sent.has_arrived

    def read(self):
        return self.numbers


@pytest.fixture
def decisions(monkeypatch):
    monkeypatch.setattr(DeviceDecisions, "send", Sent)
    monkeypatch.setattr(Sent, "has_arrived", False)
    return DeviceDecisions(["a gate", "nonfinite"], CPU)


def decide(decisions, *passed):
    decisions.decide([torch.tensor(value) for value in passed])


def test_steps_are_counted_and_named_once(decisions):
    decide(decisions, True, True)
    assert (decisions.found_inf.item(), decisions.taken.item()) == (0.0, True)
    decide(decisions, False, True)
    decide(decisions, False, False)
    assert (decisions.found_inf.item(), decisions.taken.item()) == (1.0, False)
    assert decisions.answers() == Answers(1, 2, 2, ("a gate", "nonfinite"))
    assert decisions.answers() is None
    decide(decisions, True, False)
    assert decisions.answers() == Answers(0, 1, 3, ("nonfinite",))
    decide(decisions, True, True)
    assert decisions.answers() == Answers(1, 0, 0, ())


def test_one_policy_needs_no_vector_of_answers():
    decisions = DeviceDecisions(["nonfinite"], CPU)
    decide(decisions, False)
    assert decisions.answers() == Answers(0, 1, 1, ("nonfinite",))
    decide(decisions, True)
    assert decisions.answers() == Answers(1, 0, 0, ())


def test_skips_in_a_row_continue_those_of_the_host(decisions):
    decisions.continue_from(4)
    decide(decisions, False, True)
    decisions.continue_from(4)  # the host knows of no more
    decide(decisions, False, True)
    answers = decisions.answers()
    assert answers is not None
    assert answers.in_a_row == 6
    decisions.continue_from(0)  # the host has taken a step
    decide(decisions, False, True)
    assert decisions.answers() == Answers(0, 1, 1, ("a gate",))


def test_a_step_that_raised_does_not_count(decisions):
    decide(decisions, True, True)
    decide(decisions, False, True)
    decisions.uncount()
    assert decisions.counts.tolist()[:2] == [1, 0]


def test_the_norms_of_the_last_bad_gradients_are_told_once(decisions):
    params = [torch.zeros(1), torch.zeros(2)]
    for norms in ([1.0, 2.0], [math.inf, 3.0], [4.0, 5.0]):
        vector = torch.tensor(norms, dtype=torch.float64)
        decisions.note_norms(vector.isfinite().all(), vector, params)
    assert decisions.bad_norms() == [math.inf, 3.0]
    assert decisions.bad_norms() is None
    assert decisions.bad_params is params


def test_skipped_steps_are_those_of_host_and_device(decisions):
    for _ in range(3):
        decide(decisions, False, True)
    assert decisions.skipped_steps(2).item() == 5
    decisions.answers()
    assert decisions.skipped_steps(5).item() == 5


def test_counts_arrive_late_and_wait_only_for_the_oldest(decisions):
    decisions.post()
    assert decisions.arrived() is None
    decide(decisions, False, True)
    decisions.post()
    Sent.has_arrived = True
    assert decisions.arrived() == [0, 1, 1]
    assert decisions.arrived() is None
    Sent.has_arrived = False
    for _ in range(MOST_LATE):
        assert decisions.arrived() is None
        decide(decisions, False, True)
        decisions.post()
    counts = decisions.arrived()
    assert counts == [0, 2, 2]
    assert decisions.step_at(counts, known=10) == 12
