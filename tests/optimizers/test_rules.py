"""Rules in unusual chains, and with parameters of half precision or of a dtype that changes."""

import pytest
import torch
from contract.training import assert_equal, train
from optimizers.twins import same_gradients
from torch import nn

from torchzero_clip import LR, SGD, Adam, AdamW, ClipNorm, Modular


def test_a_later_transform_for_some_of_the_parameters_still_acts():
    """Clips the steps of the vectors only: Adam cannot take its parameters to the end of the chain by itself."""
    params = [nn.Parameter(torch.randn(shape)) for shape in [(40, 33), (7,), (7, 5, 3), (), (0, 3)]]
    before = [param.detach().clone() for param in params]
    optimizer = Modular(params, Adam(), LR(0.1), ClipNorm(1e-3).only(lambda p: p.ndim == 1))
    same_gradients(params, params)
    optimizer.step()
    moved = [(param.detach() - old).norm().item() for param, old in zip(params, before, strict=True)]
    assert moved[1] == pytest.approx(1e-3, rel=1e-4)
    assert moved[0] == pytest.approx(0.1 * (40 * 33) ** 0.5, rel=1e-3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_decay_rates_and_learning_rates_are_not_rounded_to_half_precision(dtype):
    """torch's foreach multiplication on CPU would make 0.999 a 1 in bfloat16: squares never decayed."""
    params = [nn.Parameter(torch.zeros(300, dtype=dtype)) for _ in range(2)]
    optimizer = Modular(params[:1], Adam(betas=(0.9, 0.99)), LR(1.0), ClipNorm(1e9))
    params[0].grad = torch.ones_like(params[0])
    optimizer.step()
    squares = optimizer.state[params[0]]["adam/exp_avg_sq"].copy_(torch.rand(300))
    expected = (squares.double() * 0.99).to(dtype)
    params[0].grad = torch.zeros_like(params[0])
    optimizer.step()
    assert_equal([squares], [expected])

    params[1].grad = torch.rand_like(params[1])
    Modular(params[1:], LR(0.9), ClipNorm(1e9)).step()
    assert_equal(params[1:], [-(params[1].grad.double() * 0.9).to(dtype)])


@pytest.mark.parametrize("fused", [{}, {"fused": True}, {"fused": False}], ids=["default", "fused", "loop"])
@pytest.mark.parametrize(
    "chain", [lambda **fused: Adam(**fused), lambda **fused: AdamW(**fused), lambda **fused: SGD(momentum=0.9, **fused)]
)
def test_a_model_may_change_its_dtype_between_steps(chain, fused):
    model = nn.Linear(3, 2)
    optimizer = Modular(model, chain(**fused))
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        params = list(model.to(dtype).parameters())
        train(optimizer, params, [[torch.ones_like(param) for param in params]])
        assert all(param.isfinite().all() for param in model.parameters())


@pytest.mark.parametrize("rule", [Adam(), SGD(0.1, 0.9)], ids=["Adam", "SGD"])
def test_kernels_that_a_device_lacks_are_not_called(rule, monkeypatch):
    monkeypatch.setattr(f"torchzero_clip.optimizers.{rule.name}.has_fused_kernels", lambda tensor: False)
    monkeypatch.setattr(torch, "_fused_adamw_", None)
    monkeypatch.setattr(torch, "_fused_sgd_", None)
    param = torch.nn.Parameter(torch.ones(3))
    optimizer = Modular([param], rule)
    for _ in range(2):
        param.grad = torch.ones(3)
        optimizer.step()
    assert (param < 1).all()
