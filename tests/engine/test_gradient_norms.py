"""The norms of the gradients before the first transform."""

import pytest
import torch

from torchzero_clip.engine.gradient_norms import GradientNorms


class OnDevice(torch.Tensor):
    """A tensor on the CPU that stands for one on another device."""

    is_cpu = False


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float64), (torch.float64, torch.float32)])
def test_gradients_of_float64_whose_squares_overflow_count_as_finite_in_any_order(dtypes):
    norms = torch.tensor([1.0, 1e200], dtype=torch.float64).as_subclass(OnDevice)
    known = GradientNorms(None, [torch.ones(1, dtype=dtype) for dtype in dtypes], None, listens=False, norms=norms)
    total, finite = known.total_and_finite()
    assert total.item() == 1e200
    assert finite


def test_a_gradient_of_inf_is_found():
    norms = torch.tensor([1.0, torch.inf], dtype=torch.float64).as_subclass(OnDevice)
    known = GradientNorms(None, [torch.ones(1), torch.ones(1)], None, listens=False, norms=norms)
    assert not known.total_and_finite()[1]
