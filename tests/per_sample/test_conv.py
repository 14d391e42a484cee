"""The ways to the norms of a convolution: they agree with one backward per sample, and the cheapest is taken."""

from unittest.mock import patch

import pytest
import torch
from per_sample.harness import Net, assert_matches_loop
from per_sample.layers import LAYERS
from torch import nn

from torchzero_clip.per_sample.rules.conv import Convolved, Options

NAMES = (
    *("conv1d", "conv1d, strided and dilated", "conv2d", "conv2d, uneven", "conv2d, dilated", "conv2d twice", "conv3d"),
    *("conv2d, same with an even kernel", "conv2d, same and dilated", "conv2d, circular", "conv2d, reflect"),
    *("conv2d, one pixel wide", "conv2d, one pixel wide, strided"),
)
WIDE = nn.Conv2d(40, 80, 3, padding=1)  # from about as many channels on, few pixels cost less than their patches
FORMED = {
    "patches side by side": (nn.Conv2d(3, 80, 4, stride=4), torch.randn(5, 3, 8, 8)),
    "many positions": (nn.Conv2d(40, 80, 3, padding=1), torch.randn(5, 40, 20, 20)),
}


def taken(method, module, x):
    """How often a way was taken in a check of the layer."""
    way = getattr(Convolved, method)
    with patch.object(Convolved, method, autospec=True, side_effect=way) as spy:
        assert_matches_loop(module, x, modes=("low",))
    return spy.call_count


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize("name", NAMES)
def test_gram_matrices_of_patches_are_sums_of_those_of_pixels(name):
    with patch.object(Convolved, "_costs", return_value=(1, 0)):
        assert taken("_inner", *(make() for make in LAYERS[name]))


def test_pixels_are_taken_where_they_cost_less():
    assert taken("_inner", WIDE, torch.randn(5, 40, 3, 4))


@pytest.mark.parametrize("name", FORMED)
def test_gradients_are_formed_where_that_costs_less(name):
    assert not taken("_inner", *FORMED[name])


def test_gradients_of_small_kernels_lie_turned_in_memory():
    module = nn.Conv2d(3, 16, 3)
    contribution = Convolved(module.weight, torch.randn(5, 3, 6, 6), torch.randn(5, 16, 4, 4), Options.of(module))
    assert contribution.dense(0, 5).stride(1) == 1
    assert_matches_loop(nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU()), torch.randn(17, 3, 12, 12))


@pytest.mark.parametrize("channels", [3, 16])
def test_options_may_differ_from_call_to_call(channels):
    def forward(m, x):
        outputs = []
        for dilation in (1, 2):
            m.conv.dilation = m.conv.padding = (dilation, dilation)
            outputs.append(m.conv(x))
        return outputs[0] + outputs[1].tanh()

    model = Net(forward, conv=nn.Conv2d(channels, channels, 3, padding=1))
    assert_matches_loop(model, torch.randn(4, channels, 6, 6))


@pytest.mark.parametrize("channels", [(3, 80), (40, 80), (3, 3), (3, 32), (64, 32)])
@pytest.mark.parametrize("padding", [(0, 0), (2, 2), 1, (1,)])
def test_options_may_be_changed_after_construction(channels, padding):
    module = nn.Conv2d(*channels, 3, padding=1)
    module.padding, module.dilation, module.stride = padding, 2, (1, 1)
    assert_matches_loop(module, torch.randn(4, channels[0], 7, 7), modes=("auto", "low"))
