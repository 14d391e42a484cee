"""Steps that are skipped or refused change nothing, and are counted."""

import copy
import math

import pytest
import torch
from contract.entries import ENTRIES
from contract.training import assert_equal, gradients, parameters, set_grads, through_file, train, values
from torch import nn

from torchzero_clip import SGD, ClipNorm, ClipNormGrowth, ClipValue, Modular, SkipStep

BAD = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
each_bad = pytest.mark.parametrize("bad", BAD.values(), ids=BAD)


def spoiled(row, bad):
    row = [g.clone() for g in row]
    row[-1].view(-1)[0] = bad
    return row


@each_bad
@pytest.mark.parametrize("entry", ENTRIES, ids=str)
def test_a_skipped_step_changes_nothing(entry, bad):
    params, twins = parameters(), parameters()
    optimizer, twin = Modular(params, entry.make(), nonfinite="skip"), Modular(twins, entry.make())
    for row in gradients(params, 3):
        before, state = values(params), copy.deepcopy(optimizer.state_dict()["state"])
        train(optimizer, params, [spoiled(row, bad)])
        assert_equal(params, before)
        assert_equal([p.grad for p in params], spoiled(row, bad))
        torch.testing.assert_close(optimizer.state_dict()["state"], state, rtol=0, atol=0)
        train(optimizer, params, [row])
        train(twin, twins, [row])
    assert_equal(params, twins)
    torch.testing.assert_close(optimizer.state_dict()["state"], twin.state_dict()["state"], rtol=0, atol=0)
    assert optimizer.metrics()["skipped_steps"].item() == 3


@each_bad
@pytest.mark.parametrize("entry", ENTRIES, ids=str)
def test_raising_names_the_parameters_and_changes_nothing(entry, bad):
    params = parameters()
    optimizer = Modular([(f"layer.{i}", p) for i, p in enumerate(params)], entry.make(), nonfinite="raise")
    grads = gradients(params, 2)
    train(optimizer, params, grads[:1])
    before, state = values(params), copy.deepcopy(optimizer.state_dict()["state"])
    with pytest.raises(RuntimeError, match=r"gradients are not finite: layer\.3\. Nothing was changed"):
        train(optimizer, params, [spoiled(grads[1], bad)])
    assert_equal(params, before)
    torch.testing.assert_close(optimizer.state_dict()["state"], state, rtol=0, atol=0)


def test_parameters_without_names_are_told_by_number_and_shape():
    params = parameters()
    set_grads(params, spoiled(gradients(params, 1)[0], math.nan))
    with pytest.raises(RuntimeError, match=r"not finite: parameter 3 of shape \(\)\."):
        Modular(params, SGD(), nonfinite="raise").step()


def test_a_transform_of_the_closure_does_not_act_in_a_skipped_step():
    (param,) = parameters(shapes=[(2,)])
    before = values([param])
    optimizer = Modular([param], ClipNormGrowth(target="closure"), ClipValue(1.0), nonfinite="skip")

    def closure():
        param.grad = torch.tensor([math.inf, 1.0])
        return 7.0

    assert optimizer.step(closure) == 7.0
    assert_equal([param], before)
    assert param.grad.tolist() == [math.inf, 1.0]
    assert not optimizer.state


def test_too_many_skips_in_a_row_raise_with_the_norms():
    (param,) = parameters(shapes=[(1,)])
    optimizer = Modular([param], SGD(), nonfinite="skip", max_consecutive_skips=2)
    steps = [3.0, math.nan, math.inf, 4.0, math.nan, math.nan]
    train(optimizer, [param], [[torch.tensor([gradient])] for gradient in steps])
    before = values([param])
    with pytest.raises(RuntimeError, match=r"3 steps in a row were skipped\. .* end: 3, nan, inf, 4, nan, nan, inf$"):
        train(optimizer, [param], [[torch.tensor([math.inf])]])
    assert_equal([param], before)
    assert optimizer.metrics()["skipped_steps"].item() == 5


def test_too_many_skips_name_the_gradients_that_were_not_finite_in_the_last_step():
    model = nn.Linear(1, 1)
    optimizer = Modular(model, SkipStep(max_norm=5.0), SGD(), nonfinite="skip", max_consecutive_skips=1)

    def step(weight, bias):
        model.weight.grad, model.bias.grad = torch.tensor([[weight]]), torch.tensor([bias])
        optimizer.step()

    step(math.nan, 1.0)
    with pytest.raises(
        RuntimeError, match=r"skipped\. In the last one these gradients were not finite: bias\. The arg"
    ):
        step(1.0, math.inf)
    with pytest.raises(RuntimeError, match=r"3 steps in a row were skipped\. The arg.* end: nan, inf, 9$"):
        step(9.0, 0.0)  # skipped by the gate


def test_counts_survive_a_checkpoint_and_are_not_required():
    (param,) = parameters(shapes=[(1,)])
    optimizer = Modular([param], SGD(), nonfinite="skip", max_consecutive_skips=3)
    train(optimizer, [param], [[torch.tensor([math.nan])]] * 2)
    resumed = Modular([param], SGD(), nonfinite="skip", max_consecutive_skips=3)
    resumed.load_state_dict(through_file(optimizer.state_dict()))
    assert resumed.metrics()["skipped_steps"].item() == 2
    with pytest.raises(RuntimeError, match="4 steps in a row"):
        train(resumed, [param], [[torch.tensor([math.nan])]] * 2)
    resumed.load_state_dict(Modular([param], SGD()).state_dict())  # of an optimizer that never skips
    Modular([param], SGD()).load_state_dict(optimizer.state_dict())
    broken = optimizer.state_dict()
    broken["param_groups"][0]["skipped_steps"] = "many"
    with pytest.raises(ValueError, match="skipped_steps must be an int"):
        resumed.load_state_dict(broken)


def test_a_checkpoint_without_counts_ends_a_row_of_skips():
    (param,) = parameters(shapes=[(1,)])
    optimizer = Modular([param], SGD(), nonfinite="skip", max_consecutive_skips=2)
    train(optimizer, [param], [[torch.tensor([math.nan])]] * 2)
    optimizer.load_state_dict(Modular([param], SGD()).state_dict())
    train(optimizer, [param], [[torch.tensor([math.nan])]] * 2)
    assert optimizer.metrics()["skipped_steps"].item() == 4
    assert "nonfinite='skip',\n    max_consecutive_skips=2," in repr(optimizer)


def test_a_joint_norm_beyond_float64_of_finite_gradients_is_not_skipped():
    param = nn.Parameter(torch.zeros(4, dtype=torch.float64))
    optimizer = Modular([param], ClipNorm(1.0), nonfinite="skip")
    param.grad = torch.tensor([1e308, 1.0, 0.0, 0.0], dtype=torch.float64)
    optimizer.step()
    assert optimizer.metrics()["skipped_steps"].item() == 0
