"""The ways to the norms of a convolution: they agree with one backward per sample, and the cheapest is taken."""

from unittest.mock import patch

import pytest
import torch
from per_sample.harness import Net, assert_matches_loop
from torch import nn

from torchzero_clip.per_sample.rules.conv import Convolved, Options

LAYERS = {
    "1d": (nn.Conv1d(4, 6, 3, padding=1), (6,)),
    "1d, strided": (nn.Conv1d(4, 6, 5, stride=2), (11,)),
    "1d, dilated": (nn.Conv1d(4, 6, 3, dilation=2, padding=2), (8,)),
    "2d": (nn.Conv2d(4, 6, 3, padding=1), (3, 4)),
    "2d, strided": (nn.Conv2d(4, 6, (3, 2), stride=(1, 2)), (5, 6)),
    "2d, dilated": (nn.Conv2d(4, 6, (2, 3), dilation=(2, 1)), (4, 4)),
    "2d, same with an even kernel": (nn.Conv2d(4, 6, 2, padding="same"), (3, 3)),
    "2d, circular": (nn.Conv2d(4, 6, 3, padding=1, padding_mode="circular"), (4, 4)),
    "2d, reflect": (nn.Conv2d(4, 6, 3, padding=(1, 2), padding_mode="reflect"), (3, 4)),
    "2d, one pixel wide": (nn.Conv2d(16, 6, 1), (3, 3)),
    "2d, one pixel wide, strided": (nn.Conv2d(16, 6, 1, stride=2), (5, 3)),
    "3d": (nn.Conv3d(4, 6, 2, stride=(1, 2, 1)), (2, 4, 2)),
}
WIDE = nn.Conv2d(40, 80, 3, padding=1)  # from about as many channels on, few pixels cost less than their patches
FORMED = {
    "patches side by side": (nn.Conv2d(3, 80, 4, stride=4), (8, 8)),
    "many positions": (nn.Conv2d(40, 80, 3, padding=1), (20, 20)),
}


def taken(method, module, sizes):
    """How often a way was taken in a check of the layer."""
    way = getattr(Convolved, method)
    with patch.object(Convolved, method, autospec=True, side_effect=way) as spy:
        assert_matches_loop(module, torch.randn(5, module.in_channels, *sizes), modes=("low",))
    return spy.call_count


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize("name", LAYERS)
def test_gram_matrices_of_patches_are_sums_of_those_of_pixels(name):
    with patch.object(Convolved, "_costs", return_value=(1, 0)):
        assert taken("_inner", *LAYERS[name])


def test_pixels_are_taken_where_they_cost_less():
    assert taken("_inner", WIDE, (3, 4))


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
