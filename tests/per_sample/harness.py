"""One check for every layer: against one backward per sample in float64, in every memory mode and both ways to clip."""

import copy

import torch
from torch import nn

from torchzero_clip import (
    ConstantFlatClipper,
    ConstantPerLayerClipper,
    GradSampleModuleFastGradientClipping,
    PerSampleGradientClipper,
)
from torchzero_clip.per_sample.engine import Engine

MODES = ("auto", "low", "generic", "kept")


class Net(nn.Module):
    """A module with a forward of its own, which gets the module first, and what it holds."""

    def __init__(self, forward, /, **held):
        super().__init__()
        self.call = forward
        for name, value in held.items():
            setattr(self, name, value)

    def forward(self, *args, **kwargs):
        return self.call(self, *args, **kwargs)


def weight(*shape, value=None):
    return nn.Parameter(torch.randn(shape) if value is None else torch.full(shape, value))


def small():
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def batch(count=5):
    return torch.randn(count, 3, dtype=torch.float64) * torch.arange(1, count + 1)[:, None]


def clip(model, limit=1.0, **settings):
    return PerSampleGradientClipper(model, ConstantFlatClipper(limit), **settings)


def attached(limit=1.0, **settings):
    """A small model, a batch, and a clipper."""
    model = small()
    return model, batch(), clip(model, limit, **settings)


def grads(model):
    return [p.grad for p in model.parameters()]


def assert_grads(model, expected, **kwargs):
    for grad, value in zip(grads(model), expected, strict=True):
        assert_close(grad, value, **kwargs)


def reference(model, x, limit=1.0):
    """Norms, and the clipped sum of each parameter, from one backward per sample."""
    each = loop(copy.deepcopy(model), [x])
    norms = total_of(norms_of(each))
    factors = (limit / (norms + 1e-6)).clamp(max=1)
    return norms, [torch.tensordot(factors, g, 1) for g in each.values()]


def norms_by_loop(model, *inputs, **settings):
    return total_of(norms_of(loop(copy.deepcopy(model), inputs, **settings)))


def assert_step(clipper, model, *inputs, output=None, batch_dim=0, **kwargs):
    """The norms of the samples in each parameter are those of one backward per sample."""
    expected = norms_of(loop(copy.deepcopy(model), inputs, batch_dim))
    result = clipper.backward(losses_of(model(*inputs) if output is None else output, batch_dim))
    for name, norms in result.param_norms.items():
        assert_close(norms, expected[name], **kwargs)
    assert_close(result.norms, total_of(expected), **kwargs)


def first_tensor(output):
    return output if isinstance(output, torch.Tensor) else first_tensor(output[0])


def losses_of(output, batch_dim=0):
    """One loss for each sample, in which all elements count differently."""
    flat = first_tensor(output).movedim(batch_dim if first_tensor(output).ndim > 1 else 0, 0).flatten(1)
    readout = torch.linspace(-1, 2, flat.shape[1], dtype=flat.dtype, device=flat.device)
    return (flat * readout).sum(1) + 0.1 * flat.square().sum(1)


def samples(inputs, batch_dim):
    """The inputs of each sample alone; what is no tensor is shared."""
    count = next(x for x in inputs if isinstance(x, torch.Tensor)).shape[batch_dim]
    for i in range(count):
        yield [x.narrow(batch_dim, i, 1) if isinstance(x, torch.Tensor) else x for x in inputs]


def loop(model, inputs, batch_dim=0, losses=losses_of):
    """The gradients of each sample, by one backward for each: name -> (B, *shape)."""
    params = {name: p for name, p in model.named_parameters() if p.requires_grad}
    rows = []
    for one in samples(inputs, batch_dim):
        grads = torch.autograd.grad(losses(model(*one), batch_dim).sum(), list(params.values()), allow_unused=True)
        rows.append([torch.zeros_like(p) if g is None else g for p, g in zip(params.values(), grads, strict=True)])
    return {name: torch.stack(column) for name, column in zip(params, zip(*rows, strict=True), strict=True)}


def norms_in_batch(model, *inputs, losses=losses_of):
    """The norms of the gradients of each loss alone, in the batch."""
    model = copy.deepcopy(model)
    params = [p for p in model.parameters() if p.requires_grad]
    each = losses(model(*inputs))
    rows = [torch.autograd.grad(loss, params, retain_graph=True, materialize_grads=True) for loss in each]
    return torch.stack([torch.stack([grad.norm() for grad in row]).norm() for row in rows])


def norms_of(grads):
    return {name: g.reshape(len(g), -1).norm(dim=1) for name, g in grads.items()}


def total_of(norms):
    return torch.stack(list(norms.values())).norm(dim=0)


def clipper_for(model, mode, clipper, *, batch_first=True, **kwargs):
    memory = mode if mode in ("auto", "low") else "auto"
    result = PerSampleGradientClipper(
        model, clipper, batch_first, memory=memory, keep_grad_samples=mode == "kept", **kwargs
    )
    if mode == "generic":
        engine = result._engine
        engine.detach()
        result._engine = Engine(model, batch_first=batch_first, force_generic=True, of_mean=engine.of_mean)
    return result


def assert_close(actual, expected, **kwargs):
    torch.testing.assert_close(actual, expected, **{"rtol": 1e-9, "atol": 1e-11, **kwargs})


def assert_matches_loop(model, *inputs, batch_first=True, modes=MODES, losses=losses_of, **kwargs):
    """Norms, factors and clipped sums equal those of one backward per sample."""
    model = model.double()
    inputs = [x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in inputs]
    batch_dim = 0 if batch_first else 1
    expected = loop(copy.deepcopy(model), inputs, batch_dim, losses)
    norms = norms_of(expected)
    limit = total_of(norms).median().item() or 1.0
    for mode in modes:
        _check_backward(model, inputs, batch_first, mode, losses, expected, norms, limit, kwargs)
        _check_classic(model, inputs, batch_first, mode, losses, expected, norms, kwargs)


def _check_backward(model, inputs, batch_first, mode, losses, expected, norms, limit, kwargs):
    with clipper_for(model, mode, ConstantFlatClipper(limit), batch_first=batch_first, **kwargs) as clipper:
        model.zero_grad()
        result = clipper.backward(losses(model(*inputs), 0 if batch_first else 1))
        assert_close(result.norms, total_of(norms))
        for name, norm in result.param_norms.items():
            assert_close(norm, norms[name])
        factors = (limit / (total_of(norms) + 1e-6)).clamp(max=1)
        assert_close(result.factors, factors)
        for name, param in model.named_parameters():
            if name in expected:
                grad = torch.zeros_like(param) if param.grad is None else param.grad  # None where no gradient came
                assert_close(grad, torch.tensordot(factors, expected[name], 1) / len(factors))
                assert not hasattr(param, "grad_sample") or mode == "kept"
            else:
                assert param.grad is None
            if mode == "kept" and name in expected and param.grad is not None:
                assert_close(param.grad_sample, expected[name])


def _check_classic(model, inputs, batch_first, mode, losses, expected, norms, kwargs):
    limits = [norm.mean().item() for norm in norms.values()]
    with clipper_for(model, mode, ConstantPerLayerClipper(limits), batch_first=batch_first, **kwargs) as clipper:
        for _ in range(2):
            losses(model(*inputs), 0 if batch_first else 1).mean().backward()
            clipper.clip_and_accumulate()
        max_norm, count = clipper.pre_step()
        size = len(next(iter(norms.values())))
        assert count == 2 * size
        assert_close(max_norm, torch.tensor(limits, dtype=torch.float64).norm().expand(len(limits)))
        for (name, norm), limit in zip(norms.items(), limits, strict=True):
            factors = (limit / (norm + 1e-6)).clamp(max=1)
            assert_close(dict(model.named_parameters())[name].grad, torch.tensordot(factors, expected[name], 1) / size)


def frozen(module, *names):
    """The module with some parameters that do not train."""
    for name in names:
        module.get_parameter(name).requires_grad_(False)
    return module


# ways to clip: each returns a function of the losses of a model, which takes a step and returns the norms


def by_backward(model, limit=1.0, **settings):
    clipper = clip(model, limit, **settings)

    def step(losses):
        result = clipper.backward(losses(model))
        return result.norms, result.param_norms

    return step


def with_low_memory(model, limit=1.0, **settings):
    return by_backward(model, limit, memory="low", **settings)


def by_classic_form(model, limit=1.0, **settings):
    clipper = clip(model, limit, **settings)

    def step(losses):
        losses(model).mean().backward()
        result = clipper.clip_and_accumulate()
        assert clipper.pre_step()[1] == len(result.norms)
        return result.norms, result.param_norms

    return step


def by_two_passes(model, limit=1.0, **settings):
    module = GradSampleModuleFastGradientClipping(model, strict=False, max_grad_norm=limit, **settings)

    def step(losses):
        each = losses(module)
        each.mean().backward(retain_graph=True)
        norms, coef = module.get_norm_sample(), module.get_clipping_coef()
        shown = {name: p.norm_sample for name, p in model.named_parameters() if hasattr(p, "norm_sample")}
        module.disable_hooks()
        (coef * each).mean().backward()
        module.enable_hooks()
        return norms, shown

    return step
