"""Complex parameters, as torch's optimizers treat them."""

import pytest
import torch
from contract.entries import ENTRIES
from contract.training import gradients, parameters, train, values
from optimizers.test_against_torch import PAIRS
from torch import nn

from torchzero_clip import Adam, ClipNorm, ClipValue, ClipValueByEMA, ClipValueGrowth, Modular


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
# Muon takes no complex ones; ClipRMS counts two elements for each, one of which is 0 here
@pytest.mark.parametrize(
    "entry", [e for e in ENTRIES if e.name != "Muon+Adam" and not e.name.startswith("ClipRMS")], ids=str
)
def test_without_imaginary_parts_it_is_a_run_on_real_numbers(entry, dtype):
    real = parameters(dtype.to_real())
    params = [nn.Parameter(p.detach().to(dtype)) for p in real]
    grads = gradients(real, 4)
    train(Modular(real, entry.make()), real, grads)
    optimizer = Modular(params, entry.make())
    train(optimizer, params, [[g.to(dtype) for g in row] for row in grads])
    tolerance = 1e-12 if dtype == torch.complex128 else 1e-5
    expected = [value.to(dtype) for value in values(real)]
    torch.testing.assert_close(values(params), expected, rtol=tolerance, atol=tolerance)
    for state in optimizer.state.values():
        assert all(
            not value.is_complex() or value.dtype in (dtype, torch.complex128) for value in state.values() if value.ndim
        )


@pytest.mark.parametrize("name", PAIRS)
def test_optimizers_equal_those_of_torch(name):
    ours, theirs = PAIRS[name]
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(3, 2, generator=generator, dtype=torch.complex128)) for _ in range(2)]
    other = [nn.Parameter(p.detach().clone()) for p in params]
    optimizer, reference = Modular(params, ours()), theirs(other)
    for _ in range(20):
        row = [torch.randn(3, 2, generator=generator, dtype=torch.complex128) for _ in params]
        train(optimizer, params, [row])
        train(reference, other, [row])
    torch.testing.assert_close(params, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("scale", [1e30, 1e-30])
@pytest.mark.parametrize("name", [name for name in PAIRS if "centered" not in name])
def test_optimizers_equal_those_of_torch_at_extreme_gradients(name, scale, fast):
    """Squares are infinite or 0. A centered RMSprop then has inf - inf."""
    ours, theirs = PAIRS[name]
    generator = torch.Generator().manual_seed(0)
    params, other = ([nn.Parameter(torch.zeros(3, 2, dtype=torch.complex64))] for _ in range(2))
    optimizer, reference = Modular(params, ours(), fast=fast), theirs(other)
    for _ in range(3):
        row = [scale * torch.randn(3, 2, generator=generator, dtype=torch.complex64)]
        train(optimizer, params, [row])
        train(reference, other, [row])
        assert torch.view_as_real(params[0].detach()).isfinite().all()
        torch.testing.assert_close(params, other, rtol=1e-5, atol=0)


def test_moments_of_a_wider_dtype_keep_the_imaginary_part():
    param, other = (nn.Parameter(torch.zeros(2, dtype=torch.complex64)) for _ in range(2))
    optimizer, reference = Modular([param], Adam(0.1, state_dtype=torch.float64)), torch.optim.Adam([other], 0.1)
    row = [torch.tensor([1 + 2j, -3 - 0.5j])]
    train(optimizer, [param], [row] * 3)
    train(reference, [other], [row] * 3)
    assert optimizer.state[param]["adam/exp_avg"].dtype == torch.complex128
    torch.testing.assert_close(param, other)


@pytest.mark.parametrize(
    "make", [lambda: ClipValue(0.5), lambda: ClipValueByEMA(0.5), lambda: ClipValueGrowth(), lambda: ClipNorm(0.5)]
)
def test_clipping_sees_pairs_of_real_numbers(make):
    generator = torch.Generator().manual_seed(0)
    param, pairs = nn.Parameter(torch.zeros(3, dtype=torch.complex128)), nn.Parameter(torch.zeros(3, 2).double())
    optimizer, reference = Modular([param], make()), Modular([pairs], make())
    for scale in (1.0, 0.1, 10.0):
        row = torch.randn(3, generator=generator, dtype=torch.complex128) * scale
        train(optimizer, [param], [[row]])
        train(reference, [pairs], [[torch.view_as_real(row)]])
    torch.testing.assert_close(torch.view_as_real(param.detach()), pairs.detach(), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(
        *({k: v for k, v in o.metrics().items() if "norm" not in k} for o in (optimizer, reference))
    )


@pytest.mark.parametrize("entry", ENTRIES, ids=str)
def test_conjugates_that_are_yet_to_be_taken(entry):
    params, plain = ([nn.Parameter(torch.zeros(3, dtype=torch.complex128))] for _ in range(2))
    optimizer, reference = Modular(params, entry.make()), Modular(plain, entry.make())
    for scale in (1.0, 10.0):
        row = torch.tensor([1 + 2j, -3 - 1j, 0.5j], dtype=torch.complex128) * scale
        params[0].grad, plain[0].grad = row.conj(), row.conj().resolve_conj()
        optimizer.step()
        reference.step()
    torch.testing.assert_close(params[0], plain[0])
