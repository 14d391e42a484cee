"""Random updates, and what a transform makes of them."""

import math

import torch
from hypothesis import strategies as st
from torch import nn

from torchzero_clip import Modular

ROUNDING = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}
ORDERS = st.sampled_from([1, 2, 3, "l4", math.inf, "mad", "std"])
SHAPES = st.lists(st.lists(st.integers(0, 4), max_size=4).map(tuple), min_size=1, max_size=4)


SLICINGS = {
    "order": st.sampled_from([2, 1, 0.5, -1, 0, math.inf, -math.inf, "mad", "std", "var", "sum"]),
    "dim": st.sampled_from([None, 0, -1, 1, (0, 1), (1, -1, 7), (), "global"]),
    "inverse_dims": st.booleans(),
    "min_size": st.integers(0, 5),
}


@st.composite
def updates(draw, dtypes=tuple(ROUNDING)):
    """A few random tensors of one dtype, of any magnitude that leaves half precision normal numbers."""
    dtype = draw(st.sampled_from(dtypes))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    scale = 2.0 ** draw(st.integers(-2, 8) if dtype == torch.float16 else st.integers(-60, 60))
    return [(torch.randn(shape, generator=generator) * scale).to(dtype) for shape in draw(SHAPES)]


def transformed(tensors, transform, **options):
    """What the transform makes of updates: the negative of parameters that start at zero."""
    params = [nn.Parameter(torch.zeros_like(tensor)) for tensor in tensors]
    for param, tensor in zip(params, tensors, strict=True):
        param.grad = tensor.clone()
    Modular(params, transform, **options).step()
    return [-param.detach() for param in params]


def slack(tensors, *, elements=1):
    """Rounding of the elements, and of those that underflow in half precision."""
    return ROUNDING[tensors[0].dtype] + (6e-8 * elements if tensors[0].dtype == torch.float16 else 0)
