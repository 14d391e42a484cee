"""A step of an optimizer raises if gradients of its parameters wait to be clipped, before it changes anything."""

import copy
import gc
import weakref

import pytest
import torch
from per_sample.harness import assert_close, assert_grads, attached, batch, clip, losses_of, reference, small
from torch import nn
from torch.optim.optimizer import _global_optimizer_pre_hooks
from torch.utils import _pytree as pytree

from torchzero_clip import Adam, ClipNorm, GradSampleModuleFastGradientClipping, Modular

MATCH = (
    r"(?s)wait to be clipped.*clipper.backward\(losses\).*loss.backward\(\); clipper.clip_and_accumulate\(\); "
    r"clipper.pre_step\(\).*with clipper.paused\(\):.*clipper.discard\(\)"
)
OPTIMIZERS = {
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), weight_decay=0.1),
    "of one parameter": lambda model: torch.optim.SGD([model[2].bias], lr=0.1),
    "Modular": lambda model: Modular(model, ClipNorm(1.0, dim="global"), Adam(lr=0.1)),
}


def state_of(model, optimizer):
    values = [optimizer.state_dict(), model.state_dict(), [p.grad for p in model.parameters()]]
    return copy.deepcopy(values)


def assert_same(a, b):
    for x, y in zip(*(pytree.tree_leaves(values) for values in (a, b)), strict=True):
        assert torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("steps", [0, 6])  # Modular has a plan after three
def test_a_step_raises_and_changes_nothing(name, steps):
    model, x, clipper = attached()
    optimizer = OPTIMIZERS[name](model)
    for _ in range(steps):
        optimizer.zero_grad()
        clipper.backward(losses_of(model(x)))
        optimizer.step()
    assert name != "Modular" or not steps or optimizer.runner.fast_way.plan is not None
    losses_of(model(x)).mean().backward()
    before = state_of(model, optimizer)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=MATCH):
            optimizer.step()
    assert_same(state_of(model, optimizer), before)
    clipper.clip_and_accumulate()
    clipper.pre_step()
    optimizer.step()
    assert not torch.equal(model[2].bias, before[1]["2.bias"])


@pytest.mark.parametrize("way_out", ["discard", "detach", "classic", "paused", "backward"])
def test_each_way_out_lets_the_next_step_pass(way_out):
    model, x, clipper = attached()
    optimizer, before = torch.optim.SGD(model.parameters(), lr=0.1), model[2].bias.clone()
    losses_of(model(x)).mean().backward()
    if way_out == "classic":
        clipper.clip_and_accumulate()
        clipper.pre_step()
    elif way_out == "detach":
        clipper.detach()
    else:
        clipper.discard()
        if way_out == "paused":
            with clipper.paused():
                losses_of(model(x)).mean().backward()
        elif way_out == "backward":
            clipper.backward(losses_of(model(x)))
    optimizer.step()
    assert torch.equal(model[2].bias, before) == (way_out in ("discard", "detach"))  # which leave no gradient


def test_a_closure_that_clips_passes():
    model, x, clipper = attached()
    optimizer = Modular(model, ClipNorm(1.0), Adam())

    def closure():
        loss = losses_of(model(x)).mean()
        loss.backward()
        clipper.clip_and_accumulate()
        clipper.pre_step()
        return loss.detach()

    before = model[0].weight.detach().clone()
    assert optimizer.step(closure) is not None
    assert not torch.equal(model[0].weight, before)


def test_other_optimizers_step_between_micro_batches():
    model, x = small(), batch(6)
    sums = reference(model, x)[1]
    clipper, other = clip(model), nn.Parameter(torch.ones(()))
    optimizer, another = torch.optim.SGD(model.parameters(), lr=0.0), torch.optim.SGD([other], lr=1.0)
    for part in x.split([4, 2]):
        losses_of(model(part)).mean().backward()
        other.grad = torch.ones(())
        another.step()
        clipper.clip_and_accumulate()
    clipper.pre_step()
    optimizer.step()
    assert other.item() == -1
    assert_grads(model, [total / 6 for total in sums])


def test_of_many_clippers_only_those_with_waiting_gradients_matter():
    models = [small() for _ in range(3)]
    clippers = [clip(model) for model in models]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    losses_of(models[1](batch())).mean().backward()
    optimizers[0].step()
    optimizers[2].step()
    with pytest.raises(RuntimeError, match=MATCH):
        optimizers[1].step()
    del clippers[0]
    with pytest.raises(RuntimeError, match=MATCH):
        optimizers[1].step()


def test_a_generator_may_step_while_the_gradients_of_its_discriminator_wait():
    generator, discriminator = nn.Linear(2, 3), nn.Linear(3, 1)
    clipper = clip(discriminator)
    discriminator(generator(torch.randn(4, 2))).mean().backward()
    torch.optim.SGD(generator.parameters(), lr=0.1).step()
    optimizer = torch.optim.SGD(discriminator.parameters(), lr=0.1)
    with pytest.raises(RuntimeError, match=MATCH):
        optimizer.step()
    clipper.discard()
    optimizer.step()


@pytest.mark.parametrize("name", ["SGD", "Modular"])
def test_with_a_scaler(name):
    model, x, clipper = attached()
    outside = nn.Parameter(torch.ones((), dtype=torch.float64))
    optimizer = OPTIMIZERS[name](model)
    optimizer.add_param_group({"params": [("outside", outside)] if name == "Modular" else [outside]})
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(losses_of(model(x)).mean() * outside).backward()
    before = outside.item()
    with pytest.raises(RuntimeError, match=MATCH):
        scaler.step(optimizer)
    assert outside.item() == before
    clipper.clip_and_accumulate()


def test_two_passes_are_not_refused():
    model, x = small(), batch()
    wrapper = GradSampleModuleFastGradientClipping(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = losses_of(wrapper(x))
    losses.mean().backward(retain_graph=True)
    wrapper.disable_hooks()
    (wrapper.get_clipping_coef() * losses).mean().backward()
    wrapper.enable_hooks()
    before = model[0].weight.detach().clone()
    optimizer.step()
    assert_close(model[0].weight.detach(), before - 0.1 * model[0].weight.grad)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("how", ["detach", "with", "del", "with the model", "failed", "cycle"])
def test_the_hook_ends_and_keeps_nothing_alive(how):
    gc.collect()
    before = len(_global_optimizer_pre_hooks)
    model = small()
    reference_to_model = weakref.ref(model)
    if how == "failed":
        with pytest.raises(ValueError, match="BatchNorm"):
            clip(nn.BatchNorm1d(3))
    elif how == "with":
        with clip(model):
            assert len(_global_optimizer_pre_hooks) == before + 1
    else:
        clipper = clip(model)
        assert len(_global_optimizer_pre_hooks) == before + 1
        if how == "detach":
            copy.deepcopy(clipper).detach()
            assert len(_global_optimizer_pre_hooks) == before + 1
            clipper.detach()
            clipper.detach()
        elif how == "cycle":
            model.clipper = clipper
        elif how == "with the model":
            losses_of(model(batch())).mean().backward()
            del model
        del clipper
    if how in ("with the model", "cycle"):
        model = None
        gc.collect()
        assert reference_to_model() is None
    assert len(_global_optimizer_pre_hooks) == before


def test_a_step_without_pre_step_raises_and_changes_nothing():
    model = nn.Linear(3, 2)
    before, optimizer = model.weight.detach().clone(), torch.optim.SGD(model.parameters(), lr=1.0)
    with clip(model) as clipper:
        model(torch.randn(4, 3)).square().mean().backward()
        clipper.clip_and_accumulate()
        with pytest.raises(RuntimeError, match=r"clipped gradients wait for clipper\.pre_step\(\)"):
            optimizer.step()
        assert torch.equal(model.weight, before)
        clipper.pre_step()
        optimizer.step()
    assert not torch.equal(model.weight, before)
