"""Parameters and gradients whose layout changes under an optimizer that remembers it."""

import weakref

import torch
from contract.training import assert_equal, train
from fast.comparison import both
from torch import nn

from torchzero_clip import AdamW, ClipValue, Modular, SkipStep


def test_parameters_that_get_other_strides_in_the_same_memory():
    runs = list(both(lambda: [ClipValue(0.5), AdamW(0.1)], [(4, 4)]))
    for run in runs:
        train(run.optimizer, run.params, [[torch.ones(4, 4)]])
        run.params[0].data = run.params[0].data.t()
        train(run.optimizer, run.params, [[torch.arange(16.0).view(4, 4)]])
    torch.testing.assert_close(*(run.params for run in runs))


def test_a_parameter_that_becomes_a_part_of_its_buffer():
    buffer = torch.zeros(20)
    param = nn.Parameter(buffer[:10])
    optimizer = Modular([param], AdamW(0.1))
    train(optimizer, [param], [[torch.ones(10)]])
    param.data = buffer[::2]
    before = buffer[1::2].clone()
    train(optimizer, [param], [[torch.ones(10)]])
    assert_equal([buffer[1::2]], [before])


def test_gradients_are_released_after_a_step_and_checked_after_a_skipped_one():
    param = nn.Parameter(torch.ones(4, 6))
    optimizer = Modular([param], ClipValue(0.1), SkipStep(max_norm=10.0), AdamW(0.1))
    train(optimizer, [param], [[torch.full((4, 6), size)] for size in (1.0, 1.0, 1e3)])  # the last step is skipped
    grad, before = weakref.ref(param.grad), param.detach().clone()
    param.grad.data = torch.full((6, 4), 1.0).T  # the same tensor with other strides
    optimizer.step()
    torch.testing.assert_close(before - param.detach(), torch.full((4, 6), 0.1), rtol=0.1, atol=0)
    param.grad = None
    assert grad() is None
