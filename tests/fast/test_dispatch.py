"""The number of operations of a step on CUDA does not grow with that of tensors. Counted on fake tensors.

An operation on a list may launch a kernel for each tensor: `pretended.costs` bounds launches and bytes.
"""

from collections import Counter

import pytest
import torch
from table import chain
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from torchzero_clip import Modular, clip_grad_norm_, clip_grad_value_

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


MOST = {
    "AdamW": 2,
    "ClipNorm global + AdamW": 24,
    "ClipNorm + AdamW": 24,
    "ClipValue + AdamW": 12,
    "ClipNormGrowth + AdamW": 45,
    "ClipValueByEMA + AdamW": 32,
    "ClipValueGrowth + AdamW": 43,
    "SpikeAwareClip + AdamW": 42,
    "ClipByMaxEMA + AdamW": 46,
}
"""Of chains in `table.LINKS`."""


@pytest.mark.slow
@pytest.mark.parametrize("name", MOST)
def test_operations_of_a_step_do_not_grow_with_the_number_of_tensors(name):
    few, many = (operations_of_a_step(lambda: chain(name), count) for count in (20, 80))
    assert 0 < few == many <= MOST[name]


FOR_EACH = {"Centralize": 1, "ClipNorm of slices": 2, "ClipNorm mad": 2, "ClipNorm std": 2, "ClipNorm var global": 3}


@pytest.mark.slow
@pytest.mark.parametrize("name", FOR_EACH)
def test_operations_for_each_tensor_where_no_operation_takes_lists(name):
    few, many = (operations_of_a_step(lambda: chain(f"{name} + AdamW"), count) for count in (20, 40))
    assert (many - few) / 20 <= FOR_EACH[name]


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
    totals = []
    for count in (20, 80):
        with FakeTensorMode():
            params = parameters(count)
            with Count() as counted:
                call(params)
        totals.append(counted.operations.total())
    assert 0 < totals[0] == totals[1] <= most
