"""State by parameter, as columns, and as numbers."""

import pytest
import torch
from contract.training import gradients, parameters, train
from torch import nn
from typing_extensions import override

from torchzero_clip import AdamW, ClipNormGrowth, Modular, TensorwiseTransform, Transform


def test_each_part_of_the_state_is_stored_even_if_a_later_tensor_fails():
    class Fails(TensorwiseTransform):
        def init_state(self, param, setting):
            return {"count": torch.zeros(())}

        def apply_tensor(self, tensor, param, grad, loss, state, setting):
            state["count"] = state["count"] + 1
            if tensor.ndim == 1:
                raise ArithmeticError("bad luck")
            return tensor

    params = parameters()
    optimizer = Modular(params, Fails({}))
    with pytest.raises(ArithmeticError, match="bad luck"):
        train(optimizer, params, gradients(params, 1))
    assert [optimizer.state[p]["fails/count"].item() for p in params] == [1, 1, 0, 0]


def test_numbers_of_a_step_do_not_change_when_new_ones_are_kept():
    class Counts(ClipNormGrowth):
        @override
        def factors(self, measured, updates, step):
            before = step.numbers("prev")
            step.keep("prev", before + 1)
            assert before.tolist() == [0.0]
            return torch.ones_like(measured.vector)

    weight = nn.Parameter(torch.ones(2))
    train(Modular([weight], Counts(), AdamW()), [weight], [[torch.ones(2)]])


class ReadsTwice(Transform):
    """Changes the list that `Step.column` returned, and asks for it again."""

    def init_state(self, param, setting):
        return {"m": torch.zeros_like(param)}

    def apply_tensors(self, updates, step):
        averages = step.column("m")
        for i, update in enumerate(updates):
            averages[i] = 0.5 * averages[i] + update
        torch._foreach_copy_(step.column("m"), averages)
        return [average.clone() for average in averages]


class CountsSome(Transform):
    """Counts for some parameters, then for all."""

    def init_state(self, param, setting):
        return {"n": torch.zeros(())}

    def apply_tensors(self, updates, step):
        step.numbers("n")
        step.keep("n", step.numbers("n", [0]) + 1, [0])
        step.add("n", 10)
        return updates


@pytest.mark.parametrize("fast", [True, False])
def test_lists_of_state_belong_to_the_transform_and_numbers_of_some_are_those_of_all(fast):
    params = [nn.Parameter(torch.zeros(2)) for _ in range(2)]
    optimizer = Modular(params, ReadsTwice({}), CountsSome({}), fast=fast)
    train(optimizer, params, [[torch.ones(2)] * 2] * 4)
    assert optimizer.state[params[0]]["reads_twice/m"].tolist() == [1.875, 1.875]
    assert [optimizer.state[p]["counts_some/n"].item() for p in params] == [44.0, 40.0]
