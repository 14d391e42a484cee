"""Steps that are skipped because of their joint norm."""

import math

import pytest
import torch
from contract.training import assert_equal, gradients, parameters, train, values
from torch import nn

from torchzero_clip import SGD, Adam, ClipNorm, Modular, SkipStep


def test_a_limit_on_the_joint_norm():
    first, second = parameters(shapes=[(2,), (1,)])
    optimizer = Modular([first, second], ClipNorm(0.1), SkipStep(max_norm=5.0), Adam())
    before = values([first, second])
    train(optimizer, [first, second], [[torch.tensor([3.0, 4.0]), torch.tensor([0.1])]])
    assert_equal([first, second], before)
    assert not optimizer.state
    train(optimizer, [first, second], [[torch.tensor([3.0, 4.0]), torch.tensor([0.0])]])
    assert not torch.equal(first, before[0])
    assert optimizer.metrics()["skipped_steps"].item() == 1
    assert optimizer.metrics()["skip_step/mean"].item() == 5


def test_a_multiple_of_the_running_mean():
    (param,) = parameters(shapes=[(1,)])
    optimizer = Modular([param], SkipStep(max_ratio=3.0, beta=0.5))
    taken = []
    for gradient in (0.0, 1000.0, 4000.0, 2000.0, 4600.0, 4500.0, math.inf, math.nan):
        before = param.item()
        train(optimizer, [param], [[torch.tensor([gradient])]])
        taken.append(param.item() != before)
    # means: none, 1000, 1000, 1500, 1500, 3000
    assert taken == [False, True, False, True, False, True, False, False]
    assert optimizer.param_groups[0]["skip_step/mean"].item() == 3000
    assert optimizer.metrics()["skipped_steps"].item() == 4


def test_the_norm_that_is_judged_is_the_norm_that_is_remembered():
    (param,) = parameters(shapes=[(1,)])
    optimizer = Modular([param], ClipNorm(1, target="closure"), SkipStep(max_ratio=10.0))

    def closure():
        param.grad = torch.tensor([100.0])

    for _ in range(3):
        optimizer.step(closure)
    assert optimizer.metrics()["skipped_steps"].item() == 0
    assert optimizer.metrics()["skip_step/mean"].item() == 100


def test_a_mean_of_zero_is_no_limit():
    (param,) = parameters(shapes=[(1,)])
    optimizer = Modular([param], SkipStep(max_ratio=10.0, beta=0.0))
    train(optimizer, [param], [[torch.tensor([g])] for g in (1.0, 0.0, 1.0, 1.0)])
    assert optimizer.metrics()["skipped_steps"].item() == 0


def test_limits_may_be_scheduled_and_a_scope_given():
    first, second = parameters(shapes=[(1,), (1,)])
    named = [("first", first), ("second", second)]
    optimizer = Modular(named, SkipStep(max_norm=1.0).only("first"))
    row = [torch.tensor([1.0]), torch.tensor([100.0])]
    train(optimizer, [first, second], [row])
    assert optimizer.metrics()["skipped_steps"].item() == 0
    optimizer.param_groups[0]["skip_step/max_norm"] = 0.5
    train(optimizer, [first, second], [row])
    assert optimizer.metrics()["skipped_steps"].item() == 1


def test_bare_names_are_left_to_the_transforms_that_do_the_work():
    params = parameters()
    optimizer = Modular(params, SkipStep(max_ratio=10.0), ClipNorm(1.0), SGD())
    assert optimizer.param_groups[0]["max_norm"] == 1.0
    assert optimizer.param_groups[0]["skip_step/max_norm"] is None
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))], "max_norm": 0.1})
    with pytest.raises(ValueError, match="under this bare name: write 'skip_step/max_ratio'"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))], "max_ratio": 2.0})


def test_a_running_job_may_begin_to_skip_steps():
    params = parameters()
    old = Modular(params, ClipNorm(1.0), SGD(0.1, 0.9))
    train(old, params, gradients(params, 2))
    optimizer = Modular(params, SkipStep(max_ratio=10.0), ClipNorm(1.0), SGD(0.1, 0.9))
    optimizer.load_state_dict(old.state_dict(), new=["skip_step"])
    train(optimizer, params, gradients(params, 1))
    train(optimizer, params, [[g * 1e6 for g in gradients(params, 1)[0]]])
    assert optimizer.metrics()["skipped_steps"].item() == 1


class Late(SkipStep):
    """Records each step by `record`, as if only the device knew whether it is taken."""

    def accept(self, norm, step):
        self.record(norm, step, torch.tensor(True))

    def refused(self, norm, step):
        self.record(norm, step, torch.tensor(False))


@pytest.mark.parametrize("limits", [{"max_ratio": 3.0}, {"max_norm": 10.0}, {"max_norm": 50.0, "max_ratio": 5.0}])
def test_record_stores_what_accept_and_refused_store(limits):
    values = [0.0, 0.0, 1.0, 2.0, math.nan, 4.0, 100.0, 0.0, math.inf, 1.5, 7.0, 1.0]
    found = []
    for kind in (SkipStep, Late):
        weight = nn.Parameter(torch.zeros(1))
        optimizer = Modular([weight], kind(beta=0.7, name="skip", **limits), SGD(0.1))
        for value in values:
            weight.grad = torch.tensor([value])
            optimizer.step()
            state = {key: x.item() for key, x in optimizer.runner.chain_state.values.items() if torch.is_tensor(x)}
            found.append((kind, weight.item(), state, optimizer.metrics()["skip/mean"].item()))
    half = len(values)
    assert [row[1:] for row in found[:half]] == [row[1:] for row in found[half:]]
    assert 0 < optimizer.steps_taken < half
