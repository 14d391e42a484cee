"""Tensor subclasses that do not support what norms need: what can be measured is recorded, and one warning names them.

torchao's int8 weights are such tensors.
"""

import warnings

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_map

from torchzero_clip import ClipNorm, Recorder, SkipStep, before_step

ALLOWED = ("detach", "clone", "copy_", "alias", "t", "mm", "addmm", "empty_like", "zeros_like", "_to_copy", "view")


class Quantized(torch.Tensor):
    """Values that can be copied, and multiplied by a matrix, but not measured."""

    @staticmethod
    def __new__(cls, values):
        return torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=values.dtype, requires_grad=False)

    def __init__(self, values):
        self.values_inside = values

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function.overloadpacket.__name__ not in ALLOWED:
            raise NotImplementedError(f"Quantized does not support {function}")
        plain = [
            tree_map(lambda x: x.values_inside if isinstance(x, cls) else x, given) for given in (args, kwargs or {})
        ]
        found = function(*plain[0], **plain[1])
        if function.overloadpacket.__name__ == "copy_":
            return args[0]
        return found if function.overloadpacket.__name__ in ("mm", "addmm") else cls(found)


class Plain(torch.optim.Optimizer):
    """Steps without arithmetic on the parameters, as an optimizer with its own kernels does."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.5})

    @torch.no_grad()
    def step(self, closure=None):
        for param in self.param_groups[0]["params"]:
            values = param.values_inside if isinstance(param, Quantized) else param
            grad = param.grad.values_inside if isinstance(param.grad, Quantized) else param.grad
            values.sub_(grad, alpha=0.5)


def made(grad_of, **given):
    model = nn.Module()
    model.first, model.last = nn.Parameter(torch.full((2,), 3.0)), nn.Parameter(torch.full((1,), 4.0))
    model.middle = nn.Parameter(Quantized(torch.ones(2, 2)))
    params = [model.first, model.middle, model.last]
    optimizer = Plain(params)

    def step(size):
        model.first.grad, model.last.grad = torch.full((2,), size), torch.full((1,), size)
        model.middle.grad = grad_of(torch.full((2, 2), size))
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            optimizer.step()
        return [str(warning.message) for warning in found]

    return model, optimizer, step


def test_weights_that_cannot_be_measured():
    model, optimizer, step = made(lambda grad: grad)
    recorder = Recorder(optimizer, model=model, ratios_every=1)
    (text,) = step(1.0)
    assert text.startswith("the record has no norms of weights and updates of 'middle', which cannot be measured: ")
    assert "Quantized does not support" in text
    assert [step(float(size)) for size in range(2, 13)] == [[]] * 11
    record = recorder.record()
    assert record.layers == ["first", "middle", "last"]
    for size, norms in enumerate(record.layer_norms.tolist(), 1):
        assert norms == pytest.approx([2**0.5 * size, 2 * size, size])
    _, params, updates = record.ratios[0]
    assert params.tolist() == pytest.approx([3 * 2**0.5, -1, 4])
    assert updates.tolist() == pytest.approx([0.5 * 2**0.5, -1, 0.5])
    assert recorder.early_signs() == []
    assert recorder.worst(step=11)[0].name in ("first", "middle", "last")


def test_gradients_that_cannot_be_measured():
    model, optimizer, step = made(Quantized)
    recorder = Recorder(optimizer, model=model, ratios_every=1)
    (text,) = step(1.0)
    assert text.startswith("the record has no norms of gradients of 'middle' and of weights and updates of 'middle', ")
    assert [step(float(size)) for size in range(2, 13)] == [[]] * 11
    record = recorder.record()
    for size, norms in enumerate(record.layer_norms.tolist(), 1):
        assert norms == pytest.approx([2**0.5 * size, -1, size])
    assert record.norm.tolist() == pytest.approx([3**0.5 * size for size in range(1, 13)])


def test_only_such_gradients():
    param = nn.Parameter(Quantized(torch.ones(2)))
    optimizer = Plain([param])
    recorder = Recorder(optimizer)
    param.grad = Quantized(torch.ones(2))
    with pytest.warns(UserWarning, match="the record has no norms of"):
        optimizer.step()
    optimizer.step()
    assert recorder.record().steps == [0, 1]
    assert recorder.record().norm.isnan().all()


@pytest.mark.filterwarnings("ignore:the record has no norms")
def test_transforms_before_an_optimizer_with_such_weights():
    model, optimizer, step = made(lambda grad: grad)
    before_step(optimizer, SkipStep(max_norm=20.0), ClipNorm(1, dim="global"), model=model)
    recorder = Recorder(optimizer, ratios_every=1)
    for size in (1.0, 2.0, 100.0):
        step(size)
    record = recorder.record()
    assert record.norm.tolist() == pytest.approx([7**0.5 * size for size in (1, 2, 100)])
    assert record.reasons == ["", "", "skip_step"]
    assert [ratio.step for ratio in record.ratios] == [0, 1]
    assert record.ratios[0].params.tolist() == pytest.approx([3 * 2**0.5, -1, 4])
