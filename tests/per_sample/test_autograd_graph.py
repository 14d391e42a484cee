"""What the graph of autograd leads to."""

import torch

from torchzero_clip.per_sample.gradients.autograd_graph import leaves_of, nodes_of


class Keeps(torch.autograd.Function):
    """A function of a user with an attribute `variable`, as the nodes of leaves have."""

    @staticmethod
    def forward(ctx, x):
        ctx.variable = x.detach()
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


def test_what_a_function_of_a_user_keeps_is_no_leaf():
    x = torch.ones(2, requires_grad=True)
    assert [leaf is x for leaf in leaves_of([Keeps.apply(x)])] == [True]


def test_each_node_comes_once():
    x = torch.ones(2, requires_grad=True)
    first, second = (2 * x).unbind()
    nodes = list(nodes_of([first, second, first + second]))
    assert len(nodes) == len({*nodes}) == 4  # add, unbind, mul, and the leaf
