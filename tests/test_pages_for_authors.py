"""The transforms that the documentation shows to authors compute what they say."""

import math
import re
from pathlib import Path

import pytest
import torch
from contract.entries import Mul
from torch import nn

from torchzero_clip import LR, ClipNorm, Modular, Scaling

DOCS = Path(__file__).parents[1] / "docs"


def shown(page, name):
    """A class that a page shows, and its source."""
    names = {"torch": torch, "model": nn.Linear(2, 2)}
    blocks = re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(), re.MULTILINE | re.DOTALL)
    for block in blocks:
        exec(compile(block, page, "exec"), names)
    (source,) = [block for block in blocks if f"class {name}(" in block]
    return names[name], source[source.index(f"class {name}(") :].split("\n\n\n")[0]


def update(optimizer, params, gradients):
    """What a step subtracts from parameters that are zeros before it."""
    for param, gradient in zip(params, gradients, strict=True):
        param.data.zero_()
        param.grad = torch.tensor(gradient)
    optimizer.step()
    return [(-param).tolist() for param in params]


def test_a_gate_by_hand():
    gate, _ = shown("write_a_transform.md", "SkipJumps")
    weight = nn.Parameter(torch.zeros(1))
    optimizer = Modular([weight], gate(2.0))
    moved = []
    for loss in (3.0, 7.0, 6.0, 11.0, 13.0, 1.0):  # the losses of steps that are taken: 3, 6, 11, 13, 1
        optimizer.report_loss(loss)
        moved.append(update(optimizer, [weight], [[4.0]])[0][0])
    assert moved == [4.0, 0.0, 4.0, 4.0, 4.0, 4.0]
    assert optimizer.metrics()["skipped_steps"] == 1
    assert optimizer.metrics()["skip_jumps/norm"] == 4.0
    assert optimizer.param_groups[0]["skip_jumps/last"] == 1.0


def test_a_gate_refuses_a_loss_that_is_not_finite():
    gate, _ = shown("write_a_transform.md", "SkipJumps")
    weight = nn.Parameter(torch.zeros(1))
    optimizer = Modular([weight], gate(2.0))
    moved = []
    for loss in (math.nan, math.inf, 3.0, math.nan, math.inf, 7.0, 1e-9):
        optimizer.report_loss(loss)
        moved.append(update(optimizer, [weight], [[4.0]])[0][0])
    assert moved == [0.0, 0.0, 4.0, 0.0, 0.0, 0.0, 4.0]
    last = optimizer.param_groups[0]["skip_jumps/last"]
    assert (last.dtype, last.item()) == (torch.float64, 1e-9)
    other = Modular([weight], gate(2.0))
    other.load_state_dict(optimizer.state_dict())
    assert other.param_groups[0]["skip_jumps/last"] == 1e-9


def test_the_limit_without_a_loop_is_clip_norm():
    clip, _ = shown("write_a_transform.md", "ClipToLimit")
    results = []
    for transform, key in ((clip(1.0), "limit"), (ClipNorm(1.0), "max_norm")):
        params = [nn.Parameter(torch.zeros(2)) for _ in range(3)]
        for i, param in enumerate(params):
            param.grad = torch.tensor([3.0, 4.0]) * (i + 1)
        Modular([{"params": params[:2]}, {"params": params[2:], key: 0.5}], transform).step()
        results.append([param.tolist() for param in params])
    assert results[0] == results[1]
    assert results[0][2] == pytest.approx([-0.3, -0.4])


def test_the_median_by_hand():
    clip, _ = shown("write_a_transform.md", "ClipToMedian")
    params = [nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))]
    optimizer = Modular(params, clip(2.0, window=3))
    steps = [([0.0], [1.0]), ([2.0], [9.0]), ([9.0], [math.inf]), ([3.0], [5.0]), ([30.0], [50.0]), ([1.0], [7.0])]
    moved = [update(optimizer, params, row) for row in steps]
    # the medians of the first tensor: none, none, 2, the lower of 2 and 9, 3, 9; of the second: none, 1, 1, 1, 5, 9
    assert [row[0] for row in moved] == [[0.0], [2.0], [4.0], [3.0], [6.0], [1.0]]
    assert [row[1] for row in moved] == [[1.0], [2.0], [math.inf], [2.0], [10.0], [7.0]]
    norms = [optimizer.state[p]["clip_to_median/norms"].tolist() for p in params]
    assert norms == [[1.0, 30.0, 3.0], [7.0, 50.0, 5.0]]


@pytest.mark.parametrize(
    ("arguments", "shape"),
    [
        ({}, (1, 1, 1)),
        ({"dim": 0}, (1, 3, 5)),
        ({"dim": 0, "inverse_dims": True}, (8, 1, 1)),
        ({"dim": (1, 2)}, (8, 1, 1)),
        ({"dim": "global"}, (1, 1, 1)),
    ],
)
def test_shapes_of_norms_are_those_of_the_table(arguments, shape):
    class Spy(Scaling):
        def factors(self, measured, updates, step):
            shapes.append([tuple(norms.shape) for norms in measured.norms])
            return torch.ones_like(measured.vector)

    shapes = []
    params = [nn.Parameter(torch.zeros(8, 3, 5)), nn.Parameter(torch.zeros(()))]
    optimizer = Modular(params, Spy({}, **arguments), LR(1.0))
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    assert shapes[0][0] == shape
    if "dim" not in arguments:
        assert shapes[0][1] == (1,)


def test_lion_by_hand():
    lion, _ = shown("write_a_transform.md", "Lion")
    weight = nn.Parameter(torch.zeros(2))
    optimizer = Modular([weight], lion(lr=0.5, betas=(0.5, 0.0)))
    for gradient, expected in (([1.0, -2.0], [-0.5, 0.5]), ([-0.5, 3.0], [-1.0, 0.0]), ([0.5, 1.0], [-1.0, -0.5])):
        # the averages are the gradients of the step before; the last two sums are [0.5 - 0.5, 3 + 1]
        weight.grad = torch.tensor(gradient)
        optimizer.step()
        assert weight.tolist() == expected
    assert optimizer.state[weight]["lion/average"].tolist() == [0.5, 1.0]


def test_the_usual_norm_by_hand():
    clip, _ = shown("write_a_transform.md", "ClipToUsualNorm")
    params = [nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))]
    optimizer = Modular(params, clip(0.5))
    steps = [([0.0], [1.0]), ([2.0], [100.0]), ([2.0], [math.inf]), ([20.0], [1.0])]
    moved = [update(optimizer, params, row) for row in steps]
    # the first usual norms are those of the first gradients that are not 0: 2 and 1; the limits are three times them
    assert moved == [[[0.0], [1.0]], [[2.0], [3.0]], [[2.0], [math.inf]], [[6.0], [1.0]]]
    assert [optimizer.state[p]["clip_to_usual_norm/usual"].item() for p in params] == [4.0, 1.5]


def test_the_usual_joint_norm_by_hand():
    scale, _ = shown("write_a_transform.md", "ScaleByUsualNorm")
    param = nn.Parameter(torch.zeros(2))
    optimizer = Modular([param], scale(0.5))
    for gradient, expected in (([3.0, 4.0], [0.6, 0.8]), ([math.nan, 1.0], [math.nan, 1.0]), ([9.0, 12.0], [0.9, 1.2])):
        assert update(optimizer, [param], [gradient]) == [pytest.approx(expected, nan_ok=True)]


def test_a_transform_after_one_that_makes_infs_of_finite_gradients_goes_on():
    class Overflows(Mul):
        def apply_tensors(self, updates, step):
            return [update * (torch.inf if update[0] == 7 else 1.0) for update in updates]

    for name in ("ClipToUsualNorm", "ScaleByUsualNorm"):
        param = nn.Parameter(torch.zeros(2))
        optimizer = Modular([param], Overflows(1.0), shown("write_a_transform.md", name)[0]())
        for gradient in ([3.0, 4.0], [7.0, 1.0], [3.0, 4.0]):
            update(optimizer, [param], [gradient])
        assert param.isfinite().all(), name
