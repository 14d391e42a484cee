"""Elementwise transforms in the fast way: the pieces that they get, what runs, and the operations on CUDA."""

import pytest
import torch
from contract.training import train
from core.test_elementwise import CLIP, IN_PLACE, SHAPES
from fast.comparison import noise
from fast.test_dispatch import operations_of_a_step
from torch import nn

from torchzero_clip import AdamW, ClipNorm, ClipValue, ClipValueByEMA, ClipValueGrowth, Modular, before_step


def test_the_transform_of_an_author_is_called_with_pieces(monkeypatch):
    seen = []
    change, formula = IN_PLACE.change, CLIP.formula
    monkeypatch.setattr(
        IN_PLACE, "change", lambda self, x, *rest: seen.append((tuple(x.shape), rest[-1])) or change(self, x, *rest)
    )
    for kind in (CLIP, IN_PLACE):
        monkeypatch.setattr(
            kind, "formula", lambda self, x, *rest: seen.append((tuple(x.shape), None)) or formula(self, x, *rest)
        )
    pieces = [(262144,), (37856,), (23,)]
    for kind, fast, shapes in ((IN_PLACE, True, pieces), (CLIP, True, pieces), (IN_PLACE, False, SHAPES)):
        params = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
        optimizer = Modular(params, kind(), AdamW(), fast=fast)
        for step in range(2):
            seen.clear()
            train(optimizer, params, [[grad.float() for grad in noise(SHAPES, step)]])
        assert [shape for shape, _ in seen] == shapes
        assert [at.usual for _, at in seen if at is not None] == [True] * len(shapes) * (fast and kind is IN_PLACE)


@pytest.mark.slow
def test_the_transform_of_an_author_takes_no_more_operations_than_ours():
    theirs = [operations_of_a_step(lambda: [IN_PLACE(), AdamW()], count) for count in (20, 80)]
    ours = operations_of_a_step(lambda: [ClipValueByEMA(ema_init="update"), AdamW()], 20)
    assert theirs == [ours + 2] * 2  # it multiplies by `factor`, and sets the first limits to inf
    formula = [operations_of_a_step(lambda: [CLIP(), AdamW()], count) for count in (20, 80)]
    assert formula[0] == formula[1] <= ours


def test_only_the_readable_way_runs_the_formula_of_a_class_with_change(monkeypatch):
    called = []
    formula, change = ClipValueByEMA.formula, ClipValueByEMA.change
    monkeypatch.setattr(ClipValueByEMA, "formula", lambda *args: called.append("formula") or formula(*args))
    monkeypatch.setattr(ClipValueByEMA, "change", lambda *args: called.append("change") or change(*args))
    half = torch.bfloat16  # in half precision on CPU, the fast way leaves the transform to the walk
    for fast, dtype, name in ((True, torch.float32, "change"), (True, half, "change"), (False, half, "formula")):
        weight = nn.Parameter(torch.zeros(2, dtype=dtype))
        optimizer = Modular([weight], ClipValueByEMA(), AdamW(), fast=fast)
        for _ in range(2):
            called.clear()
            weight.grad = torch.ones(2, dtype=dtype)
            optimizer.step()
        assert called == [name]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "made", [lambda: ClipNorm(1.0, dim="global"), ClipValueByEMA, ClipValueGrowth], ids=["norm", "ema", "growth"]
)
def test_long_gradients_are_changed_in_place_before_another_optimizer(made, dtype):
    """A gradient longer than a piece, a short one, and in the second step one that is not finite."""
    results = []
    for fast in (True, False):
        params = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in ((300_000,), (7,), (2, 150_000))]
        before_step(optimizer := torch.optim.SGD(params, lr=0.0), made(), ClipValue(0.7), fast=fast)
        for step in range(3):
            grads = [grad.to(dtype) for grad in noise([tuple(param.shape) for param in params], step)]
            grads[2].view(-1)[140_000:140_002] = torch.inf if step == 1 else 3.0
            for param, grad in zip(params, grads, strict=True):
                param.grad = grad
            optimizer.step()
            assert all(param.grad is grad for param, grad in zip(params, grads, strict=True))
            results.append(grads)
    for one, other in zip(results[:3], results[3:], strict=True):
        torch.testing.assert_close(one, other, equal_nan=True)
