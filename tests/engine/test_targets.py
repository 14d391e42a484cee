"""What each target of a transform changes."""

import pytest
import torch
from contract.entries import Mul
from contract.training import stepped
from torch import nn

from torchzero_clip import SGD, Centralize, Chain, ClipNorm, Modular


def test_target_grad_reaches_the_update_only_if_nothing_made_one():
    param, _ = stepped([Mul(2.0), ClipNorm(1.0, target="grad")], [3.0, 4.0])
    assert param.tolist() == [-6, -8]
    assert param.grad.tolist() == pytest.approx([0.6, 0.8])
    param, _ = stepped([ClipNorm(1.0, target="grad"), Mul(2.0)], [3.0, 4.0])
    assert param.tolist() == pytest.approx([-1.2, -1.6])


def test_target_grad_after_a_reader_that_passes_gradients_on():
    param, _ = stepped([SGD(1.0), ClipNorm(1.0, target="grad")], [3.0, 4.0])
    assert param.tolist() == [-3, -4]
    assert param.grad.tolist() == pytest.approx([0.6, 0.8])


def test_target_closure_acts_before_the_first_transform_in_chain_order():
    param = nn.Parameter(torch.zeros(2))

    def closure():
        param.grad = torch.tensor([3.0, 4.0])
        return 0.0

    optimizer = Modular([param], Mul(2.0), ClipNorm(1.0, target="closure"), Mul(5.0, target="closure"))
    assert optimizer.step(closure) == 0.0
    assert param.tolist() == pytest.approx([-6, -8])
    assert param.grad.tolist() == pytest.approx([3, 4])


@pytest.mark.parametrize("unit", [False, True])
def test_target_grad_inside_a_unit_leaves_earlier_updates_alone(unit):
    scaled = Mul(2.0, target="grad")
    middle = Chain(scaled, target="params_direct") if unit else scaled
    assert stepped([SGD(1.0), middle], [3.0, 4.0])[0].tolist() == [-3, -4]
    param, _ = stepped([ClipNorm(1.0), middle, SGD(1.0)], [3.0, 4.0])
    assert param.tolist() == pytest.approx([-0.6, -0.8])
    assert param.grad.tolist() == [6, 8]


@pytest.mark.parametrize(
    ("target", "update"), [("update_difference", [0.0, 0.0]), ("params_difference", [0.0, 0.0]), ("grad", [1.0, 3.0])]
)
def test_target_grad_inside_a_chain_with_a_target_changes_the_gradient_only(target, update):
    param = nn.Parameter(torch.zeros(2))
    param.grad = torch.tensor([1.0, 3.0])
    Modular([param], Chain(Centralize(target="grad"), ClipNorm(99), target=target)).step()
    assert (-param).tolist() == update
    assert param.grad.tolist() == ([1.0, 3.0] if target == "grad" else [-1.0, 1.0])


def test_target_grad_in_a_unit_inside_a_unit():
    param = nn.Parameter(torch.zeros(2))
    param.grad = torch.tensor([1.0, 3.0])
    inner = Chain(Mul(2.0), Centralize(target="grad"), target="update_difference")  # [1, 3] - [2, 6]
    Modular([param], Chain(inner, Mul(10.0), target="update_difference")).step()  # [1, 3] - [-10, -30]
    assert (-param).tolist() == [11.0, 33.0]
    assert param.grad.tolist() == [-1.0, 1.0]
