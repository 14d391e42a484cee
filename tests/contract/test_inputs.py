"""What gradients look like changes nothing but the rounding."""

import pytest
import torch
from contract.entries import ENTRIES, is_matrix
from contract.training import assert_equal, gradients, parameters, train, values
from table import EVERY_RANK
from torch import nn

from torchzero_clip import Chain, ClipNorm, ClipNormByEMA, ClipValue, Modular

CLIPS_BEFORE_OPTIMIZERS = {
    "ClipNorm+AdamW": ClipNorm(0.5, dim="global", target="grad"),
    "Adam+two clips": ClipNorm(0.5, target="grad"),
    "target grad": ClipNorm(0.5, target="grad"),
    "SkipStep": ClipNorm(0.5, target="grad"),
    "SkipStep-sigma": ClipNorm(0.5, target="grad"),
    "schedules": ClipNorm(0.1, target="grad"),
    "scopes": ClipNorm(0.5, dim="global", target="grad").only(is_matrix),
    "scoped unit": Chain(ClipNormByEMA(0.5), ClipValue(0.1), target="grad").only(is_matrix),
    "target grad statistics": ClipNormByEMA(0.5, target="grad"),
}
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 4e-2, torch.float16: 6e-3}


def trained(make, params, grads, **options):
    optimizer = Modular(params, make(), **options)
    train(optimizer, params, grads)
    return optimizer


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("entry", ENTRIES, ids=str)
def test_all_shapes_and_dtypes_follow_float64(entry, dtype):
    params = parameters(dtype, EVERY_RANK)
    reference = [nn.Parameter(p.detach().double()) for p in params]
    grads = gradients(params, 3)
    trained(entry.make, params, grads)
    trained(entry.make, reference, [[g.double() for g in row] for row in grads])
    for param, expected in zip(params, reference, strict=True):
        assert param.dtype == dtype
        if dtype == torch.float16 and entry.squares_in_param_dtype:
            continue  # squares of small gradients are zero in float16, as in torch's Adam
        torch.testing.assert_close(param.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("layout", ["channels_last", "transposed", "strided"])
@pytest.mark.parametrize("entry", ENTRIES, ids=str)
def test_memory_layout_does_not_matter(entry, layout):
    def laid_out(value):
        if layout == "channels_last":
            return value.contiguous(memory_format=torch.channels_last)
        if layout == "transposed":
            return value.transpose(0, -1).contiguous().transpose(0, -1)
        return torch.stack([value, value], dim=-1)[..., 0]

    plain = parameters(torch.float64, [(3, 4, 2, 5)])
    params = [nn.Parameter(laid_out(p.detach())) for p in plain]
    grads = gradients(plain, 3)
    trained(entry.make, plain, grads)
    optimizer = Modular(params, entry.make())
    for row in grads:
        params[0].grad = laid_out(row[0])
        optimizer.step()
    torch.testing.assert_close(params[0], plain[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("entry", ENTRIES, ids=str)
def test_order_and_split_into_groups_do_not_matter(entry):
    plain, turned, split = (parameters(torch.float64) for _ in range(3))
    grads = gradients(plain, 4)
    trained(entry.make, plain, grads)
    trained(entry.make, turned[::-1], [row[::-1] for row in grads])
    optimizer = Modular([{"params": split[:1]}, {"params": split[1:]}], entry.make())
    train(optimizer, split, grads)
    torch.testing.assert_close(turned, plain, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(split, plain, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("entry", ENTRIES, ids=str)
def test_parameters_without_gradient_and_frozen_ones_take_no_part(entry):
    params, fewer = parameters(torch.float64), parameters(torch.float64)
    before = values(params)
    params[1].requires_grad_(False)
    optimizer = Modular(params, entry.make())
    reference = Modular([fewer[0], fewer[3]], entry.make())
    for row in gradients(params, 3):
        params[0].grad, params[1].grad, params[2].grad, params[3].grad = row[0].clone(), row[1], None, row[3].clone()
        optimizer.step()
        fewer[0].grad, fewer[3].grad = row[0].clone(), row[3].clone()
        reference.step()
    assert_equal([params[0], params[3]], [fewer[0], fewer[3]])
    assert_equal(params[1:3], before[1:3])
    assert set(optimizer.state) <= {params[0], params[3]}


@pytest.mark.parametrize("closure", [None, lambda: None], ids=["no closure", "a closure without a loss"])
@pytest.mark.parametrize("entry", ENTRIES, ids=str)
def test_no_gradients_at_all_is_no_error(entry, closure):
    params = parameters()
    before = values(params)
    optimizer = Modular(params, entry.make())
    assert optimizer.step(closure) is None
    assert_equal(params, before)
    assert not optimizer.state


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("entry", ENTRIES, ids=str)
def test_one_step_on_zeros_with_lr_0_makes_all_state_and_moves_nothing(entry, dtype):
    params = parameters(dtype)
    optimizer = Modular(params, entry.make())
    before = values(params)
    lr, optimizer.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"], 0.0
    train(optimizer, params, [[torch.zeros_like(p) for p in params]])
    optimizer.param_groups[0]["lr"] = lr
    if entry.name != "target params":  # which moves parameters whatever lr is
        assert_equal(params, before)
    keys = [set(optimizer.state.get(p, {})) for p in params]
    train(optimizer, params, gradients(params, 2))
    assert [set(optimizer.state.get(p, {})) for p in params] == keys
    for param in params:
        assert param.isfinite().all() or (dtype == torch.float16 and entry.squares_in_param_dtype)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("entry", [entry for entry in ENTRIES if not entry.joint], ids=str)
def test_a_non_finite_gradient_stays_in_its_tensor(entry, bad):
    params, healthy = parameters(torch.float64), parameters(torch.float64)
    grads = gradients(params, 3)
    trained(entry.make, healthy, grads)
    grads[1][0][0, 0] = bad
    optimizer = Modular(params, entry.make())
    train(optimizer, params, grads)
    assert_equal(params[1:], healthy[1:])


@pytest.mark.parametrize(("dtype", "value"), [(torch.float16, 4096), (torch.float32, 1e20), (torch.float32, 1e-25)])
@pytest.mark.parametrize("entry", ENTRIES, ids=str)
def test_finite_gradients_never_become_nan_or_infinite(entry, dtype, value):
    params = [nn.Parameter(torch.ones(50, 40, dtype=dtype)), nn.Parameter(torch.zeros(3, dtype=dtype))]
    optimizer = Modular(params, entry.make())
    train(optimizer, params, [[torch.full_like(p, value) for p in params]] * 2)
    for param in params:
        assert param.isfinite().all()


@pytest.mark.parametrize("entry", ENTRIES, ids=str)
def test_keep_grads_leaves_gradients_bitwise(entry):
    params, other = parameters(), parameters()
    grads = gradients(params, 1)
    optimizer = trained(entry.make, params, grads, keep_grads=True)
    trained(entry.make, other, grads)
    assert_equal(params, other)
    if not any(t.target == "grad" for t in optimizer.transforms.values()):
        assert_equal([p.grad for p in params], grads[0])


@pytest.mark.parametrize("entry", ENTRIES, ids=str)
def test_grad_is_left_as_clips_before_an_optimizer_scaled_it_and_not_otherwise(entry):
    params, clipped = parameters(), parameters()
    grads = gradients(params, 1)
    trained(entry.make, params, grads)
    expected = grads[0]
    if clips_before_optimizer := CLIPS_BEFORE_OPTIMIZERS.get(entry.name):
        trained(lambda: clips_before_optimizer, clipped, grads)
        # torch's kernel divides by the inverse of the factor
        torch.testing.assert_close([p.grad for p in params], [p.grad for p in clipped], rtol=1e-6, atol=0)
        return
    assert_equal([p.grad for p in params], expected)


@pytest.mark.parametrize("entry", ENTRIES, ids=str)
def test_maximize_is_a_step_on_the_negative_gradient(entry):
    params, other = parameters(), parameters()
    grads = gradients(params, 3)
    if any(t.target == "grad" for t in Modular(params, entry.make()).transforms.values()):
        pytest.skip("target='grad' sees the gradient before its sign is turned")
    trained(entry.make, params, grads, maximize=True)
    trained(entry.make, other, [[-g for g in row] for row in grads])
    assert_equal(params, other)
