"""Numbers of the state that are elements of a vector look like numbers of their own to everybody else."""

import gc
import io
import pickle
import weakref

import pytest
import torch
from contract.training import train
from fast.comparison import both
from torch import nn

from torchzero_clip import (
    SGD,
    Adam,
    AdamW,
    ClipNormByEMA,
    ClipNormGrowth,
    ClipValueByEMA,
    ClipValueGrowth,
    Modular,
    Transform,
)
from torchzero_clip.core.chain import Composite


@pytest.mark.slow
@pytest.mark.parametrize("save", [torch.save, pickle.dump], ids=["torch.save", "pickle"])
def test_a_saved_state_is_no_larger(save):
    sizes = []
    for run in both(lambda: [ClipNormGrowth(), AdamW()], [(3, 5)] * 200):
        train(run.optimizer, run.params, [[torch.ones_like(p) for p in run.params]] * 2)
        for saved in (run.optimizer.state_dict(), run.optimizer):
            file = io.BytesIO()
            save(saved, file)
            sizes.append(file.tell())
    assert sizes[0] <= sizes[2]
    assert sizes[1] <= sizes[3]


def test_a_state_that_was_handed_out_is_that_of_the_optimizer():
    params = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))]
    optimizer = Modular(params, ClipNormGrowth(), AdamW())
    rows = [[torch.ones_like(p) for p in params]] * 2
    train(optimizer, params, rows[:1])
    saved = optimizer.state_dict()["state"]
    numbers = {i: float(state["adam/step"]) for i, state in saved.items()}
    saved[0]["adam/step"].fill_(9.0)  # as loaders do that write in place, also into the state of torch's optimizers
    train(optimizer, params, rows[1:])
    assert numbers == {0: 1.0, 1: 1.0}
    assert [float(optimizer.state[p]["adam/step"]) for p in params] == [10.0, 2.0]
    assert [float(state["adam/step"]) for state in saved.values()] == [10.0, 2.0]


@pytest.mark.parametrize("clip", [ClipValueByEMA(), ClipValueGrowth()], ids=repr)
def test_a_parameter_that_is_listed_twice_has_one_statistic(clip):
    states = []
    for fast in (True, False):
        weight = nn.Parameter(torch.ones(3))
        with pytest.warns(UserWarning, match="duplicate parameters"):
            optimizer = Modular([weight, weight], clip, AdamW(), fast=fast)
        train(optimizer, [weight], [[torch.tensor([1.0, 2.0, 3.0]) * k] for k in (1, 2)])
        states.append({key: value for key, value in optimizer.state[weight].items() if value.ndim})
    torch.testing.assert_close(*states)


def test_state_that_is_moved_away_frees_its_memory():
    params = [nn.Parameter(torch.ones(3)) for _ in range(3)]
    optimizer = Modular(params, ClipNormGrowth(), AdamW())
    train(optimizer, params, [[torch.ones(3)] * 3] * 3)
    kept = [weakref.ref(optimizer.state[p]["adam/exp_avg"]) for p in params]
    for param in params:
        optimizer.state[param]["adam/exp_avg"] = optimizer.state[param]["adam/exp_avg"].clone()
    gc.collect()
    assert [reference() for reference in kept] == [None] * 3


@pytest.mark.slow
@pytest.mark.parametrize("save", [lambda optimizer: optimizer.state_dict(), lambda optimizer: optimizer])
def test_numbers_that_are_elements_of_a_vector_are_pickled_alone(save):
    params = [nn.Parameter(torch.zeros(1)) for _ in range(400)]
    optimizer = Modular(params, ClipNormByEMA(), AdamW())
    train(optimizer, params, [[torch.ones(1)] * 400] * 2)
    numbers = [v for state in optimizer.state.values() for v in state.values() if not v.ndim]
    assert len(numbers) == 1200
    assert all(number.untyped_storage().nbytes() == number.nbytes for number in numbers)
    steps = [v for state in optimizer.state.values() for key, v in state.items() if key.endswith("/step")]
    assert steps[1].data_ptr() - steps[0].data_ptr() == steps[0].nbytes  # elements of one vector
    small = Modular([nn.Parameter(torch.zeros(1)) for _ in range(40)], ClipNormByEMA(), AdamW())
    train(small, small.param_groups[0]["params"], [[torch.ones(1)] * 40] * 2)
    assert len(pickle.dumps(save(optimizer))) < 11 * len(pickle.dumps(save(small)))


class Counted(Adam):
    """Reads its state as dicts before the kernel."""

    def kernel(self, rest, step):
        assert all(state.keys() >= {"step", "exp_avg"} for state in step.states)
        return super().kernel(rest, step)


def test_a_rule_whose_state_was_read_as_dicts_counts_its_steps():
    sides = []
    for rule in (Counted, Adam):
        params = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))]
        optimizer = Modular(params, rule())
        train(optimizer, params, [[torch.ones_like(p) for p in params]] * 3)
        sides.append([*params, *(optimizer.state[p][f"{rule().name}/step"] for p in params)])
    torch.testing.assert_close(*sides)
    assert sides[0][-1] == 3


class Moves(Transform):
    """Replaces its state, and adds the state under its key to updates of 0."""

    def __init__(self):
        super().__init__({})

    def init_state(self, param, setting):
        return {"sum": torch.zeros_like(param)}

    def apply_tensors(self, updates, step):
        if not any(update.any() for update in updates):
            return [value.clone() for value in step.column("sum")]
        for state, update in zip(step.states, updates, strict=True):
            state["sum"] = state["sum"] + update
        return [torch.zeros_like(update) for update in updates]


class TwiceEach(Composite):
    def __init__(self):
        super().__init__({}, {"moves": Moves()})

    def apply_tensors(self, updates, step):
        return step.apply_child("moves", list(step.apply_child("moves", updates)))


@pytest.mark.parametrize("fast", [True, False])
def test_state_that_was_replaced_in_a_step_is_read_later_in_the_step(fast):
    params = [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(2))]
    optimizer = Modular(params, TwiceEach(), SGD(1.0), fast=fast)
    train(optimizer, params, [[torch.ones_like(p) for p in params]] * 3)
    assert [p.tolist() for p in params] == [[-6.0] * 3, [-6.0] * 2]
