"""The C steps that the benchmarks time compute what the chains compute."""

import shutil

import pytest
import torch
from torch import nn

from benchmarks.floor import CHAINS, in_c
from torchzero_clip import AdamW, Modular


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
@pytest.mark.parametrize("name", CHAINS)
def test_a_step_in_c_is_that_of_the_chain(name):
    params, plain = ([nn.Parameter(torch.ones(shape)) for shape in [(40, 30), (7,)]] for _ in range(2))
    optimizer, c_step = Modular(plain, *(made() for made in CHAINS[name]), AdamW()), in_c(name)(params)
    for k in range(5):
        for param, other in zip(params, plain, strict=True):
            param.grad = torch.randn(param.shape) * 0.1 * 2.0**k
            other.grad = param.grad.clone()
        c_step.before()
        c_step.step()
        optimizer.step()
        torch.testing.assert_close(params, plain, rtol=1e-5, atol=1e-6)
