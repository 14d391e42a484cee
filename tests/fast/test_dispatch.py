"""The number of operations of a step on CUDA does not grow with that of tensors. Counted on fake tensors.

An operation on a list may launch a kernel for each tensor: `pretended.costs` bounds launches and bytes.
"""

from collections import Counter

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from torchzero_clip import (
    AdamW,
    Centralize,
    ClipByMaxEMA,
    ClipNorm,
    ClipNormByEMA,
    ClipNormGrowth,
    ClipValue,
    ClipValueByEMA,
    ClipValueGrowth,
    Modular,
    Normalize,
    NormalizeByEMA,
    SpikeAwareClip,
    clip_grad_norm_,
    clip_grad_value_,
)

FREE = {
    *("alias", "as_strided", "detach", "expand", "narrow", "permute", "select", "slice", "split", "split_with_sizes"),
    *("squeeze", "t", "transpose", "unbind", "unflatten", "unsqueeze", "view", "view_as_real"),
    *("empty", "empty_like", "empty_strided", "new_empty"),
    *("device", "promote_types", "lift_fresh", "_record_function_enter_new", "_record_function_exit"),
}
"""Views, allocations, and what only fake tensors dispatch."""


class Count(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.operations = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.partition("::")[2]
        if name not in FREE:
            self.operations[name] += 1
        return func(*args, **(kwargs or {}))


def parameters(count):
    params = [nn.Parameter(torch.empty(8, 16, device="cuda")) for _ in range(count)]
    for param in params:
        param.grad = torch.empty_like(param)
    return params


def operations_of_a_step(make, count):
    with FakeTensorMode():
        params = parameters(count)
        optimizer = Modular(params, *make())
        with Count() as counted:
            for _ in range(3):  # what is kept from step to step was made within the mode
                counted.operations.clear()
                optimizer.step()
    return counted.operations.total()


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    ("make", "most"),
    [
        (lambda: [AdamW()], 2),
        (lambda: [ClipNorm(1, dim="global"), AdamW()], 24),
        (lambda: [ClipNorm(1), AdamW()], 24),
        (lambda: [Normalize(), AdamW()], 24),
        (lambda: [ClipValue(1), AdamW()], 12),
        (lambda: [ClipNormGrowth(), AdamW()], 45),
        (lambda: [ClipNormByEMA(), AdamW()], 64),
        (lambda: [NormalizeByEMA(), AdamW()], 64),
        (lambda: [ClipValueByEMA(), AdamW()], 32),
        (lambda: [ClipValueGrowth(), AdamW()], 43),
        (lambda: [ClipValueGrowth(add=0.1), AdamW()], 47),
        (lambda: [SpikeAwareClip(), AdamW()], 42),
        (lambda: [ClipNorm(1, "linf"), AdamW()], 24),
        (lambda: [ClipByMaxEMA(), AdamW()], 46),
    ],
    ids=lambda x: ", ".join(map(repr, x())) if callable(x) else None,
)
def test_operations_of_a_step_do_not_grow_with_the_number_of_tensors(make, most):
    few, many = (operations_of_a_step(make, count) for count in (20, 80))
    assert 0 < few == many <= most


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("make", "each"),
    [
        (lambda: [Centralize(), AdamW()], 1),
        (lambda: [ClipNorm(1, dim=0), AdamW()], 2),
        (lambda: [ClipNorm(1, "mad"), AdamW()], 2),
        (lambda: [ClipNorm(1, "std"), AdamW()], 2),
        (lambda: [ClipNorm(1, "var", dim="global"), AdamW()], 3),
    ],
    ids=["Centralize", "dim=0", "mad", "std", "var of all"],
)
def test_operations_for_each_tensor_where_no_operation_takes_lists(make, each):
    few, many = (operations_of_a_step(make, count) for count in (20, 40))
    assert (many - few) / 20 <= each


@pytest.mark.parametrize(
    ("call", "most"),
    [
        (lambda params: clip_grad_norm_(params, 1.0, dim="global"), 20),
        (lambda params: clip_grad_norm_(params, 1.0), 20),
        (lambda params: clip_grad_value_(params, 1.0), 2),
    ],
    ids=["clip_grad_norm_ global", "clip_grad_norm_", "clip_grad_value_"],
)
def test_operations_of_functions_do_not_grow_with_the_number_of_tensors(call, most):
    found = []
    for count in (20, 80):
        with FakeTensorMode():
            params = parameters(count)
            with Count() as counted:
                call(params)
        found.append(counted.operations.total())
    assert 0 < found[0] == found[1] <= most
