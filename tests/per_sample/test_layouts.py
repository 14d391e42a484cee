"""Gradients that the clippers make are stored as torch's backward stores its own.

They have the strides of torch's gradients, memory of their own, and no graph. Fused optimizers on the CPU take strides
for granted, so a step with them is compared with that of the loop.
"""

from functools import partial

import pytest
import torch
from per_sample.harness import (
    Net,
    assert_close,
    by_backward,
    by_classic_form,
    by_two_passes,
    losses_of,
    weight,
    with_low_memory,
)
from torch import nn

from torchzero_clip import ConstantFlatClipper, PrivateGradientClipper

COUNT = 3


def images(**settings):
    return torch.randn(COUNT, 4, 6, 6, **settings)


ODD = {
    "sparse": lambda param: torch.ones_like(param).to_sparse(),
    "expanded": lambda param: torch.ones_like(param[:1, :1]).expand(param.shape),
    "dense": torch.ones_like,
}


@pytest.mark.parametrize("way", [by_backward, with_low_memory])
@pytest.mark.parametrize("kind", ODD)
def test_a_gradient_that_exists_is_added_to_as_by_torch(kind, way):
    model = nn.Sequential(*[nn.Linear(2, 2, bias=False) for _ in range(3)]).double()
    x = torch.randn(COUNT, 2, dtype=torch.float64)
    expected = torch.autograd.grad(losses_of(model(x)).mean(), list(model.parameters()))
    step = way(model, limit=1e9)
    for layer in model:
        layer.weight.grad = torch.ones_like(layer.weight)
    model[1].weight.grad = ODD[kind](model[1].weight)
    step(lambda model: losses_of(model(x)))
    for param, grad in zip(model.parameters(), expected, strict=True):
        assert param.grad.layout == torch.strided
        assert_close(param.grad, 1 + grad)
        assert param.grad.stride() == param.stride()


def channels_last(x):
    return x.to(memory_format=torch.channels_last)


def conv_net(groups=1):
    return nn.Sequential(
        nn.Conv2d(4, 6, 3, groups=groups), nn.GroupNorm(2, 6), nn.ReLU(), nn.Conv2d(6, 4, 1), nn.Flatten()
    )


def tied():
    """The weight of the decoder is that of the encoder, transposed."""
    model = nn.Sequential(nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 5))
    model[0].weight = nn.Parameter(torch.randn(5, 3).t())
    return model


def with_permuted(model, order):
    """The model with its parameters in another order of memory."""
    for module in model.modules():
        for name, param in module.named_parameters(recurse=False):
            if param.ndim == len(order):
                moved = param.detach().permute(order).contiguous().permute(torch.tensor(order).argsort().tolist())
                setattr(module, name, nn.Parameter(moved))
    return model


def with_gaps(model):
    """The model with parameters that are every second entry of a memory."""
    for module in model.modules():
        for name, param in module.named_parameters(recurse=False):
            wide = torch.randn(*param.shape, 2)
            setattr(module, name, nn.Parameter(wide[..., 0]))
    return model


def bare():
    """Parameters of the module itself, one of them permuted."""
    held = {"scale": weight(1, 5), "matrix": nn.Parameter(torch.randn(3, 5).t()), "out": nn.Linear(3, 2)}
    return Net(lambda m, x: m.out((m.scale * x) @ m.matrix), **held)


def attention():
    return Net(lambda m, x: m.attention(x, x, x)[0], attention=nn.MultiheadAttention(4, 2, batch_first=True))


def recurrent():
    return Net(lambda m, x: m.rnn(x)[0], rnn=nn.LSTM(4, 3, 2, batch_first=True))


def volumes():
    return nn.Sequential(nn.Conv3d(2, 4, 2), nn.Flatten()).to(memory_format=torch.channels_last_3d)


def words():
    return torch.randint(7, (COUNT, 5))


MODELS = {
    "plain": (conv_net, images),
    "channels last": (lambda: channels_last(conv_net()), images),
    "channels last, images too": (lambda: channels_last(conv_net()), lambda: channels_last(images())),
    "images channels last": (conv_net, lambda: channels_last(images())),
    "grouped": (partial(conv_net, 2), images),
    "grouped, images channels last": (partial(conv_net, 2), lambda: channels_last(images())),
    "grouped, channels last": (lambda: channels_last(conv_net(2)), images),
    "transposed conv": (lambda: channels_last(nn.Sequential(nn.ConvTranspose2d(4, 6, 3), nn.Flatten())), images),
    "volumes": (volumes, lambda: torch.randn(COUNT, 2, 4, 4, 4)),
    "conv with permuted weights": (lambda: with_permuted(conv_net(), (1, 3, 0, 2)), images),
    "conv of words": (lambda: with_permuted(nn.Conv1d(4, 6, 2), (2, 0, 1)), lambda: torch.randn(COUNT, 4, 5)),
    "transposed weight": (tied, lambda: torch.randn(COUNT, 5)),
    "transposed weight, positions": (tied, lambda: torch.randn(COUNT, 40, 5)),
    "embedding": (lambda: with_permuted(nn.Embedding(7, 4), (1, 0)), words),
    "head": (lambda: with_permuted(nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 7)), (1, 0)), words),
    "lstm": (lambda: with_permuted(recurrent(), (1, 0)), lambda: torch.randn(COUNT, 5, 4)),
    "attention": (lambda: with_permuted(attention(), (1, 0)), lambda: torch.randn(COUNT, 5, 4)),
    "bare": (bare, lambda: torch.randn(COUNT, 5)),
    "gaps": (lambda: with_gaps(nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3))), lambda: torch.randn(COUNT, 5, 4)),
    "norm": (lambda: with_gaps(nn.GroupNorm(2, 4)), images),
}


def privately(model, limit=1.0):
    clipper = PrivateGradientClipper(model, ConstantFlatClipper(limit), noise_multiplier=0.0, expected_batch_size=COUNT)

    def step(losses):
        result = clipper.backward(losses(model))
        clipper.pre_step()
        return result, clipper

    return step


FORMS = {
    "backward": by_backward,
    "low memory": with_low_memory,
    "kept": partial(by_backward, keep_grad_samples=True),
    "whole": lambda model, limit: by_backward(model, limit, whole=(type(model),)),
    "classic": by_classic_form,
    "two passes": by_two_passes,
    "private": privately,
}


def assert_as_torch(model, twin):
    """Gradients are stored like those of a twin, which had a backward of torch."""
    addresses = []
    for (name, param), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        grad = param.grad
        sizes = [i for i, size in enumerate(param.shape) if size != 1]  # torch leaves strides of size 1 as they come
        assert [grad.stride(i) for i in sizes] == [other.grad.stride(i) for i in sizes], name
        assert not grad.requires_grad, name
        assert grad.untyped_storage().nbytes() == grad.nbytes, name
        addresses += [grad.untyped_storage().data_ptr(), param.untyped_storage().data_ptr()]
        kept = getattr(param, "grad_sample", None)
        addresses += [] if kept is None else [kept.untyped_storage().data_ptr()]
    assert len(set(addresses)) == len(addresses)


def stepped(model, make):
    make(model.parameters()).step()
    return [param.detach().clone() for param in model.parameters()]


@pytest.mark.quick_cases(30)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", MODELS)
def test_new_gradients_are_stored_as_by_torch(kind, form):
    make, batch = MODELS[kind]
    model, twin = (seeded(make) for _ in range(2))  # a deep copy of parameters with gaps has none
    x = batch()
    for param, own in zip(twin.parameters(), model.parameters(), strict=True):
        assert param.stride() == own.stride()
    losses_of(twin(x)).mean().backward()
    held = FORMS[form](model, 0.5)(lambda model: losses_of(model(x)))
    assert_as_torch(model, twin)
    if kind != "gaps" and kind != "norm":  # torch's fused optimizers step the entries between those of a parameter too
        for optimizer in (torch.optim.AdamW, partial(torch.optim.SGD, momentum=0.9)):
            fused, loop = (clone_of(model) for _ in range(2))
            expected = stepped(loop, partial(optimizer, lr=0.1, foreach=False))
            assert_close(stepped(fused, partial(optimizer, lr=0.1, fused=True)), expected, rtol=1e-5, atol=1e-6)
    del held


def seeded(make):
    torch.manual_seed(0)
    return make()


def clone_of(model):
    """A module with the parameters and gradients of a model, in the same layout."""
    params = []
    for param in model.parameters():
        params.append(nn.Parameter(param.detach().clone()))
        params[-1].grad = torch.empty_strided(param.shape, param.grad.stride()).copy_(param.grad)
    return nn.ParameterList(params)


@pytest.mark.parametrize("form", FORMS)
def test_gradients_that_exist_keep_their_layout_and_their_memory(form):
    model = channels_last(conv_net())
    bucket = torch.zeros(sum(param.numel() for param in model.parameters()))
    views = [
        part.view(p.shape)
        for part, p in zip(bucket.split([p.numel() for p in model.parameters()]), model.parameters(), strict=True)
    ]
    for param, view in zip(model.parameters(), views, strict=True):
        param.grad = view
    x = images()
    held = FORMS[form](model, 0.5)(lambda model: losses_of(model(x)))
    if form in ("classic", "private"):  # `pre_step` replaces gradients, as Opacus does
        assert not bucket.any()
    else:
        assert all(param.grad is view for param, view in zip(model.parameters(), views, strict=True))
        assert bucket.any()
    del held


def test_gradients_that_hooks_return_are_copied_without_their_graph():
    model, factor = nn.Linear(4, 4), torch.ones(4, 4, requires_grad=True)
    shared = torch.randn(4, 4).t()
    model.weight.register_hook(lambda grad: shared * factor)
    model.bias.register_hook(lambda grad: torch.ones(1).expand(4))
    by_backward(model)(lambda model: losses_of(model(torch.randn(3, 4))))
    twin = nn.Linear(4, 4)
    losses_of(twin(torch.randn(3, 4))).mean().backward()
    assert_as_torch(model, twin)
    assert torch.equal(model.weight.grad, shared)


def normalized():
    """A norm in eval mode, behind which comes no layer of the model."""
    norm = nn.BatchNorm2d(4)
    norm.running_mean.normal_()
    norm.running_var.uniform_(0.5, 2)
    return nn.Sequential(nn.Conv2d(4, 4, 1), norm, nn.Flatten()).eval()


def grouped():
    return nn.Sequential(nn.Conv2d(4, 4, 3, groups=2), nn.ReLU(), nn.Conv2d(4, 4, 3, groups=4), nn.Flatten())


@pytest.mark.parametrize("whole", [(), ("",)])
@pytest.mark.parametrize("last", [channels_last, torch.clone])
@pytest.mark.parametrize("make", [normalized, grouped])
def test_one_image_gets_the_gradient_that_it_gets_among_others(make, last, whole):
    model = make().double()
    image = torch.randn(1, 4, 6, 6, dtype=torch.float64)
    losses = losses_of(model(torch.cat([image, torch.randn_like(image)])))
    expected = torch.autograd.grad(losses[0], list(model.parameters()))
    model = channels_last(model)
    by_backward(model, 1e9, whole=whole)(lambda model: losses_of(model(last(image))))
    assert_close([param.grad.contiguous() for param in model.parameters()], list(expected))
