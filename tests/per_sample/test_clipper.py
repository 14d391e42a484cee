"""PerSampleGradientClipper: what its calls do, and what it refuses."""

import copy
import gc
import io
import pickle
import weakref

import pytest
import torch
from per_sample.harness import assert_close, assert_matches_loop, loop, losses_of, norms_of, total_of
from torch import nn
from torch.nn import functional as F

from torchzero_clip import (
    SGD,
    ClipNorm,
    ConstantFlatClipper,
    ConstantPerLayerClipper,
    GradSampleModuleFastGradientClipping,
    Modular,
    NormClipper,
    PerSampleGradientClipper,
)


def small():
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def batch(count=5):
    return torch.randn(count, 3, dtype=torch.float64) * torch.arange(1, count + 1)[:, None]


def grads(model):
    return [p.grad for p in model.parameters()]


def reference(model, x, limit):
    """Norms, and the clipped sum of each parameter, from one backward per sample."""
    each = loop(copy.deepcopy(model), [x])
    norms = total_of(norms_of(each))
    factors = (limit / (norms + 1e-6)).clamp(max=1)
    return norms, [torch.tensordot(factors, g, 1) for g in each.values()]


# what it computes


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_numbers_of_the_definition(reduction):
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1, bias=False)).double()
    with torch.no_grad():
        net[0].weight.copy_(torch.eye(2))
        net[0].bias.zero_()
        net[1].weight.copy_(torch.tensor([[1.0, 2.0]]))
    clipper = PerSampleGradientClipper(net, ConstantFlatClipper(1.0), loss_reduction=reduction)
    for x in ([[3.0, 4.0], [0.0, 0.0]], [[1.0, 1.0]]):
        losses = net(torch.tensor(x, dtype=torch.float64))
        (losses.mean() if reduction == "mean" else losses.sum()).backward()
        clipper.clip_and_accumulate()
    max_norm, count = clipper.pre_step()
    scale = 1 if reduction == "mean" else 3
    expected = [[[0.16117, 0.18794], [0.32233, 0.37588]], [0.25669, 0.51338], [[0.16117, 0.18794]]]
    for grad, value in zip(grads(net), expected, strict=True):
        assert_close(grad, torch.tensor(value, dtype=torch.float64) * scale, rtol=0, atol=1e-5 * scale)
    assert (max_norm.tolist(), count) == ([1.0, 1.0, 1.0], 3)


@pytest.mark.parametrize(("values", "expected"), [([1.0, 2.0, 3.0], 3.7417), ([1.0], 1.7321)])
def test_max_norm_is_the_norm_of_all_limits(values, expected):
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1, bias=False))
    clipper = PerSampleGradientClipper(net, ConstantPerLayerClipper(values))
    net(torch.ones(2, 2)).mean().backward()
    clipper.clip_and_accumulate()
    assert clipper.pre_step()[0].tolist() == pytest.approx([expected] * 3, abs=1e-4)


def test_backward_adds_to_grad_as_a_backward_does():
    model, x, y = small(), batch(5), batch(3)
    _, first = reference(model, x, 1.0)
    _, second = reference(model, y, 1.0)
    clipper = PerSampleGradientClipper(model, ConstantFlatClipper(1.0), loss_reduction="sum")
    clipper.backward(losses_of(model(x)))
    clipper.backward(losses_of(model(y)))
    for grad, a, b in zip(grads(model), first, second, strict=True):
        assert_close(grad, a + b)


def test_accumulation_over_unequal_batches_equals_one_big_batch():
    model, x = small(), batch(7)
    _, expected = reference(model, x, 1.0)
    clipper = PerSampleGradientClipper(model, ConstantFlatClipper(1.0))
    for piece in x.split([3, 1, 2, 1]):
        losses_of(model(piece)).mean().backward()
        clipper.clip_and_accumulate()
    assert clipper.pre_step()[1] == 7
    for grad, total in zip(grads(model), expected, strict=True):
        assert_close(grad, total / 7)


def test_pre_step_begins_anew():
    model, x, y = small(), batch(4), batch(2)
    clipper = PerSampleGradientClipper(model, ConstantFlatClipper(1.0))
    for data in (x, y):
        losses_of(model(data)).mean().backward()
        clipper.clip_and_accumulate()
        assert clipper.pre_step()[1] == len(data)
    for grad, total in zip(grads(model), reference(model, y, 1.0)[1], strict=True):
        assert_close(grad, total / 2)


def test_several_backwards_before_clipping_are_one_gradient():
    model, x = small(), batch()
    clipper = PerSampleGradientClipper(model, ConstantFlatClipper(1.0), loss_reduction="sum")
    losses = losses_of(model(x))
    (0.25 * losses).sum().backward(retain_graph=True)
    (0.75 * losses).sum().backward()
    result = clipper.clip_and_accumulate()
    clipper.pre_step()
    norms, expected = reference(model, x, 1.0)
    assert_close(result.norms, norms)
    for grad, total in zip(grads(model), expected, strict=True):
        assert_close(grad, total)


def test_zero_gradients_get_factor_1():
    model = small()
    clipper = PerSampleGradientClipper(model, ConstantFlatClipper(1.0))
    result = clipper.backward(model(batch()).sum(1) * 0)
    assert result.norms.tolist() == [0.0] * 5
    assert result.factors.tolist() == [1.0] * 5
    assert all(not grad.any() for grad in grads(model))


def test_keep_grad_samples_lasts_from_backward_until_clipping():
    model, x = small(), batch()
    expected = loop(copy.deepcopy(model), [x])
    clipper = PerSampleGradientClipper(model, ConstantFlatClipper(1.0), keep_grad_samples=True)
    losses_of(model(x)).mean().backward()
    for name, param in model.named_parameters():
        assert_close(param.grad_sample, expected[name])
    clipper.clip_and_accumulate()
    assert not any(hasattr(param, "grad_sample") for param in model.parameters())


def test_without_keep_grad_samples_nothing_is_put_on_parameters():
    model = small()
    clipper = PerSampleGradientClipper(model, ConstantFlatClipper(1.0))
    before = [set(vars(p)) for p in model.parameters()]
    losses_of(model(batch())).mean().backward()
    assert [set(vars(p)) for p in model.parameters()] == before
    clipper.discard()


@pytest.mark.parametrize("optimizer_of", [lambda m: torch.optim.AdamW(m.parameters()), lambda m: Modular(m, SGD())])
def test_any_optimizer_steps_on_what_it_left(optimizer_of):
    model = small()
    before = [p.detach().clone() for p in model.parameters()]
    clipper, optimizer = PerSampleGradientClipper(model, ConstantFlatClipper(1.0)), optimizer_of(model)
    clipper.backward(losses_of(model(batch())))
    optimizer.step()
    assert all((p != b).any() for p, b in zip(model.parameters(), before, strict=True))


def test_modular_clips_the_mean_after_the_samples():
    model, x = small(), batch()
    _, sums = reference(model, x, 1.0)
    start = [p.detach().clone() for p in model.parameters()]
    optimizer = Modular(model, ClipNorm(0.01, dim="global"), SGD(lr=1.0))
    PerSampleGradientClipper(model, ConstantFlatClipper(1.0)).backward(losses_of(model(x)))
    optimizer.step()
    total = torch.cat([(s / 5).flatten() for s in sums]).norm()
    for p, s, value in zip(model.parameters(), start, sums, strict=True):
        assert_close(p.detach(), s - 0.01 / total * value / 5, rtol=1e-6)


# shared, repeated, skipped


class Tied(nn.Module):
    def __init__(self, width=4, words=7):
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.middle = nn.Linear(width, width)
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, index):
        return self.head(torch.tanh(self.middle(self.embedding(index))))


class Twice(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(torch.tanh(self.layer(x)))


class Functional(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 4)

    def forward(self, index):
        return self.embedding(index) @ self.embedding.weight.T


@pytest.mark.parametrize("length", [1, 6, 60])
def test_tied_embedding_and_head(length):
    assert_matches_loop(Tied(), torch.randint(0, 7, (5, length)))


@pytest.mark.parametrize(
    "layer",
    [nn.Linear(3, 3), nn.LayerNorm(3), nn.RMSNorm(3)],
    ids=lambda layer: type(layer).__name__,
)
@pytest.mark.parametrize("length", [1, 4, 60])
def test_layer_called_twice(layer, length):
    assert_matches_loop(Twice(layer), torch.randn(5, length, 3))


def test_convolution_called_twice():
    assert_matches_loop(Twice(nn.Conv2d(3, 3, 3, padding=1)), torch.randn(5, 3, 4, 4))
    assert_matches_loop(Twice(nn.Conv2d(9, 9, 3, padding=1)), torch.randn(5, 9, 8, 8))


def test_one_weight_in_linear_layers_and_norms_of_other_kinds():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.LayerNorm(4))
    model[2].weight, model[3].bias = model[0].weight, model[0].bias
    assert_matches_loop(model, torch.randn(5, 3, 4))


def test_two_embeddings_of_one_weight():
    model = nn.Sequential(nn.Embedding(6, 4), nn.Flatten(), nn.Linear(12, 2))
    other = nn.Embedding(6, 4)
    other.weight = model[0].weight

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.model, self.other = model, other

        def forward(self, index):
            return self.model(index) + self.other(index).sum((1, 2))[:, None]

    assert_matches_loop(Both(), torch.randint(0, 6, (5, 3)))


class Choosing(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 2), nn.Linear(3, 2)
        self.which = "second"

    def forward(self, x):
        return self.get_submodule(self.which)(x)


def test_a_layer_skipped_in_this_step_contributes_nothing():
    model, x = Choosing().double(), batch()
    clipper = PerSampleGradientClipper(model, ConstantFlatClipper(1.0))
    for which in ("first", "second"):
        model.which = which
        model.zero_grad()
        result = clipper.backward(losses_of(model(x)))
        other = "second" if which == "first" else "first"
        assert_close(result.norms, total_of(norms_of(loop(copy.deepcopy(model.get_submodule(which)), [x]))))
        assert not result.param_norms[f"{other}.weight"].any()
        assert model.get_submodule(other).weight.grad is None


def test_pre_step_leaves_no_old_gradient_in_a_skipped_layer():
    model, x = Choosing().double(), batch()
    model.first.weight.grad = torch.ones_like(model.first.weight)
    clipper = PerSampleGradientClipper(model, ConstantFlatClipper(1.0))
    losses_of(model(x)).mean().backward()
    clipper.clip_and_accumulate()
    clipper.pre_step()
    assert not model.first.weight.grad.any()


def test_two_forwards_into_one_loss():
    model, x, y = small(), batch(), batch().flip(0)
    twin, rows = copy.deepcopy(model), []
    for i in range(5):
        one = losses_of(twin(x[i : i + 1])) * losses_of(twin(y[i : i + 1]))
        rows.append(torch.cat([g.flatten() for g in torch.autograd.grad(one.sum(), list(twin.parameters()))]))
    clipper = PerSampleGradientClipper(model, ConstantFlatClipper(1.0))
    assert_close(clipper.backward(losses_of(model(x)) * losses_of(model(y))).norms, torch.stack(rows).norm(dim=1))


# samples that are not finite, empty batches


@pytest.mark.parametrize("memory", ["auto", "low"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_sample_that_is_not_finite_leaves_the_others_as_they_are(memory, bad):
    model = nn.Sequential(
        nn.Conv1d(3, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(inplace=True), nn.Linear(6, 5), nn.LayerNorm(5), nn.PReLU()
    ).double()
    x = torch.randn(6, 3, 8, dtype=torch.float64)
    keep = torch.tensor([0, 1, 3, 4])
    _, expected = reference(model, x[keep], 0.5)
    x[2, 1, 1], x[5] = bad, bad
    clipper = PerSampleGradientClipper(model, ConstantFlatClipper(0.5), loss_reduction="sum", memory=memory)
    result = clipper.backward(losses_of(model(x)))
    assert result.nonfinite.tolist() == [False, False, True, False, False, True]
    assert result.factors[[2, 5]].tolist() == [0.0, 0.0]
    for grad, total in zip(grads(model), expected, strict=True):
        assert_close(grad, total, rtol=1e-12, atol=1e-14)


def test_a_bad_loss_leaves_the_others_as_they_are():
    model = Tied().double()
    index = torch.randint(0, 6, (5, 4))
    _, expected = reference(model, index[:4], 0.5)
    clipper = PerSampleGradientClipper(model, ConstantFlatClipper(0.5), loss_reduction="sum")
    weights = torch.tensor([1.0, 1.0, 1.0, 1.0, float("nan")], dtype=torch.float64)
    result = clipper.backward(losses_of(model(index)) * weights)
    assert result.nonfinite.tolist() == [False] * 4 + [True]
    for grad, total in zip(grads(model), expected, strict=True):
        assert_close(grad, total, rtol=1e-12, atol=1e-14)


def test_nonfinite_raise_names_the_samples_and_changes_nothing():
    model, x = small(), batch()
    x[3] = torch.nan
    clipper = PerSampleGradientClipper(model, ConstantFlatClipper(1.0), nonfinite="raise")
    with pytest.raises(RuntimeError, match=r"samples \[3\] are not finite"):
        clipper.backward(losses_of(model(x)))
    assert all(grad is None for grad in grads(model))
    clipper.backward(losses_of(model(batch())))


@pytest.mark.parametrize("memory", ["auto", "low"])
def test_no_samples_at_all_give_gradients_of_zeros(memory):
    model = nn.Sequential(
        nn.Embedding(6, 3),
        nn.Linear(3, 4),
        nn.LayerNorm(4),
        nn.RMSNorm(4),
        nn.Conv1d(5, 4, 3),
        nn.GroupNorm(2, 4),
        nn.InstanceNorm1d(4, affine=True),
        nn.PReLU(),
        nn.Linear(2, 2),
    ).double()
    for form in ("backward", "classic"):
        model.zero_grad()
        with PerSampleGradientClipper(model, ConstantFlatClipper(1.0), memory=memory) as clipper:
            losses = model(torch.zeros(0, 5, dtype=torch.int64)).sum((1, 2))
            if form == "backward":
                assert clipper.backward(losses).norms.shape == (0,)
            else:
                losses.sum().backward()
                clipper.clip_and_accumulate()
                assert clipper.pre_step()[1] == 0
        for grad, param in zip(grads(model), model.parameters(), strict=True):
            assert grad.shape == param.shape
            assert not grad.any()


# what stands around it


def test_in_place_activations_work():
    assert_matches_loop(
        nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 2), nn.ELU(inplace=True)), torch.randn(5, 3)
    )
    assert_matches_loop(
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True)), torch.randn(5, 3, 5, 5), modes=("auto", "low")
    )


class Mutating(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.next = nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x):
        hidden = self.layer(x)
        y = self.next(hidden)
        hidden.mul_(2)
        return y


def test_an_input_changed_after_the_layer_used_it_raises():
    model = Mutating()
    clipper = PerSampleGradientClipper(model, ConstantFlatClipper(1.0))
    with pytest.raises(RuntimeError, match=r"input of 'next' \(Linear\) was changed in place"):
        clipper.backward(losses_of(model(torch.randn(5, 3))))
    assert all(grad is None for grad in grads(model))


def test_forwards_without_gradients_are_as_before():
    model, x = small(), batch()
    expected = model(x).detach()
    _clipper = PerSampleGradientClipper(model, ConstantFlatClipper(1.0))
    with torch.no_grad():
        assert torch.equal(model(x), expected)
    with torch.inference_mode():
        assert torch.equal(model(x), expected)


def test_captured_forwards_have_the_same_output():
    model, x = small(), batch()
    expected = model(x).detach()
    _clipper = PerSampleGradientClipper(model, ConstantFlatClipper(1.0))
    assert torch.equal(model(x), expected)


def test_eval_mode_is_captured_too():
    model, x = small().eval(), batch()
    norms, _ = reference(model, x, 1.0)
    assert_close(PerSampleGradientClipper(model, ConstantFlatClipper(1.0)).backward(losses_of(model(x))).norms, norms)


def test_detach_leaves_the_model_as_it_was():
    model = small()
    before = [dict(vars(m)) for m in model.modules()]
    keys = list(model.state_dict())
    clipper = PerSampleGradientClipper(model, ConstantFlatClipper(1.0))
    assert list(model.state_dict()) == keys
    clipper.backward(losses_of(model(batch())))
    clipper.detach()
    after = [dict(vars(m)) for m in model.modules()]
    assert [m.keys() for m in after] == [m.keys() for m in before]
    assert not model._forward_pre_hooks
    assert not any(p._backward_hooks for p in model.parameters())
    model.zero_grad()
    losses_of(model(batch())).sum().backward()
    assert all(grad is not None for grad in grads(model))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
def test_copies_of_an_attached_model_are_models_as_any_other(copied):
    model, x = small(), batch()
    clipper = PerSampleGradientClipper(model, ConstantFlatClipper(1.0))
    twin = copied(model)
    losses_of(twin(x)).sum().backward()
    assert all(grad is not None for grad in grads(twin))
    norms, _ = reference(twin, x, 1.0)
    assert_close(clipper.backward(losses_of(model(x))).norms, norms)


def test_the_state_dict_loads_elsewhere():
    model = small()
    _clipper = PerSampleGradientClipper(model, ConstantFlatClipper(1.0))
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    twin, x = small(), batch()
    twin.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(twin(x), model(x))


def test_hooks_of_the_user_fire_as_before():
    model, x, seen = small(), batch(), []
    model[0].register_forward_hook(lambda *_: seen.append("forward"))
    model[0].register_forward_pre_hook(lambda *_: seen.append("pre"))
    model[2].register_full_backward_hook(lambda m, gi, go: seen.append(tuple(go[0].shape)))
    clipper = PerSampleGradientClipper(model, ConstantFlatClipper(1.0), verify="never")
    result = clipper.backward(losses_of(model(x)))
    assert seen == ["pre", "forward", (5, 2)]
    clipper.detach()
    assert_close(result.norms, reference(nn.Sequential(*model), x, 1.0)[0])


def test_gradients_of_the_inputs_are_those_of_a_backward():
    model, x = small(), batch().requires_grad_()
    (expected,) = torch.autograd.grad(losses_of(copy.deepcopy(model)(x)).sum(), x)
    PerSampleGradientClipper(model, ConstantFlatClipper(1.0)).backward(losses_of(model(x)))
    assert_close(x.grad, expected)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_activations_are_right(reentrant):
    model, x = nn.Sequential(small(), nn.Tanh(), nn.Linear(2, 2)).double(), batch()
    norms, sums = reference(model, x, 1.0)
    verify = "never" if reentrant else "first"
    clipper = PerSampleGradientClipper(model, ConstantFlatClipper(1.0), loss_reduction="sum", verify=verify)

    class Checkpointed(nn.Module):
        def forward(self, x):
            hidden = torch.utils.checkpoint.checkpoint(model[0], x.requires_grad_(reentrant), use_reentrant=reentrant)
            return model[2](model[1](hidden))

    result = clipper.backward(losses_of(Checkpointed()(x)))
    assert_close(result.norms, norms)
    for grad, total in zip(grads(model), sums, strict=True):
        assert_close(grad, total)


def test_parameters_freed_or_frozen_later_are_followed():
    model, x = small(), batch()
    clipper = PerSampleGradientClipper(model, ConstantFlatClipper(1.0))
    model[0].requires_grad_(False)
    norms, _ = reference(model, x, 1.0)
    assert_close(clipper.backward(losses_of(model(x))).norms, norms)
    assert model[0].weight.grad is None
    model[0].requires_grad_(True)
    norms, _ = reference(model, x, 1.0)
    assert_close(clipper.backward(losses_of(model(x))).norms, norms)


# positions


class Positions(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.words, self.positions = nn.Embedding(6, 4), nn.Embedding(9, 4)
        self.head = nn.Linear(4, 2)
        self.shape = shape

    def forward(self, index):
        return self.head(self.words(index) + self.positions(torch.arange(index.shape[1]).reshape(self.shape)))


def test_positions_of_one_row_for_all_samples_are_right():
    assert_matches_loop(Positions((1, -1)), torch.randint(0, 6, (5, 7)))


@pytest.mark.parametrize("length", [5, 7])
@pytest.mark.parametrize("shape", [(-1,), (1, -1)])
def test_positions_of_all_samples_are_right_with_and_without_a_batch_dimension(length, shape):
    assert_matches_loop(Positions(shape), torch.randint(0, 6, (5, length)))


def test_batch_dimension_that_is_not_where_declared_raises():
    model = nn.Linear(3, 2)
    clipper = PerSampleGradientClipper(model, ConstantFlatClipper(1.0), batch_first=False)
    with pytest.raises(ValueError, match="Linear saw 6 samples, the batch has 5"):
        clipper.backward(model(torch.randn(5, 6, 3)).sum((1, 2)))
    assert model.weight.grad is None


# refusals


@pytest.mark.parametrize(
    ("layer", "match"),
    [
        (nn.BatchNorm1d(3), r"'1' \(BatchNorm1d\).*GroupNorm"),
        (nn.BatchNorm2d(3, affine=False), r"BatchNorm2d"),
        (nn.SyncBatchNorm(3), r"SyncBatchNorm"),
        (nn.InstanceNorm1d(3, affine=True, track_running_stats=True), "track_running_stats=False"),
        (nn.Embedding(3, 2, scale_grad_by_freq=True), "scale_grad_by_freq"),
        (nn.Embedding(3, 2, sparse=True), "sparse=False"),
        (nn.Embedding(3, 2, max_norm=1.0), "max_norm"),
        (nn.EmbeddingBag(3, 2, mode="max"), "mode='max'"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_layers_that_cannot_be_right_are_refused_by_name(layer, match):
    model = nn.Sequential(nn.Linear(3, 3), layer)
    with pytest.raises(ValueError, match=match):
        PerSampleGradientClipper(model, ConstantFlatClipper(1.0))
    assert all("forward" not in vars(m) for m in model.modules())
    assert not model._forward_pre_hooks


class Bias(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x, bias):
        return x * self.scale + bias


def test_an_input_that_only_looks_like_a_batch_is_none():
    for length in (5, 4):
        model, x = Bias(), torch.randn(5, length, 3)
        with PerSampleGradientClipper(model, ConstantFlatClipper(1.0)) as clipper:
            norms = clipper.backward(model(x, torch.randn(length, 3)).sum((1, 2))).norms
        assert_close(norms, x.sum(1).norm(dim=1), rtol=1e-5)


class NoisyScale(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3, dtype=torch.float64))

    def forward(self, x):
        return self.scale * F.dropout(x)


def test_random_numbers_of_generic_modules_are_drawn_once():
    model, x = NoisyScale(), batch()
    clipper = PerSampleGradientClipper(model, ConstantFlatClipper(1.0))
    state = torch.get_rng_state()
    output = model(x)  # what was kept times 2 times 1: the gradient of the sum with respect to the scale
    norms = clipper.backward(output.sum(1)).norms
    assert_close(norms, output.detach().norm(dim=1))
    assert not torch.equal(torch.get_rng_state(), state)
    assert (output == 0).any()
    assert len({tuple(row) for row in (output == 0).tolist()}) > 1


def test_a_parameter_used_outside_its_module_is_refused_by_name():
    model = Functional()
    clipper = PerSampleGradientClipper(model, ConstantFlatClipper(1.0))
    with pytest.raises(RuntimeError, match=r"'embedding.weight' got a gradient from outside"):
        clipper.backward(losses_of(model(torch.randint(0, 7, (5, 3)))))
    assert model.embedding.weight.grad is None


def test_a_penalty_on_parameters_is_refused():
    model = small()
    clipper = PerSampleGradientClipper(model, ConstantFlatClipper(1.0))
    with pytest.raises(RuntimeError, match=r"'0.weight' got a gradient from outside"):
        clipper.backward(losses_of(model(batch())) + model[0].weight.square().sum())
    assert all(grad is None for grad in grads(model))


def every_kind():
    return nn.Sequential(
        nn.Linear(3, 4), nn.PReLU(), nn.Unflatten(1, (4, 1)), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(4, 2)
    ).double()


def test_gradients_of_gradients_are_refused():
    model, x = every_kind(), batch().requires_grad_()
    clipper = PerSampleGradientClipper(model, ConstantFlatClipper(1.0))
    with pytest.raises(RuntimeError, match=r"\(Linear\) is in a backward with create_graph=True"):
        torch.autograd.grad(model(x).sum(), x, create_graph=True)
    clipper.backward(losses_of(model(x)))


def test_gradients_of_the_inputs_alone_are_no_gradients_of_samples():
    model, x = every_kind(), batch().requires_grad_()
    norms, _ = reference(model, x.detach(), 1.0)
    clipper = PerSampleGradientClipper(model, ConstantFlatClipper(1.0))
    output = model(x)
    torch.autograd.grad(output.sum(), x, retain_graph=True)
    assert_close(clipper.backward(losses_of(output)).norms, norms)


def test_functional_calls_are_as_before():
    model, x = every_kind(), batch()
    params = {name: p.detach() for name, p in model.named_parameters()}

    def loss(params, x):
        return losses_of(torch.func.functional_call(model, params, (x[None],))).sum()

    per_sample = torch.vmap(torch.func.grad(loss), in_dims=(None, 0))
    expected = per_sample(params, x)
    clipper = PerSampleGradientClipper(model, ConstantFlatClipper(1.0))
    for name, grads in per_sample(params, x).items():
        assert_close(grads, expected[name])
    own = {name: p.clone().requires_grad_() for name, p in params.items()}
    total = losses_of(torch.func.functional_call(model, own, (x,))).sum()
    for name, grads in zip(own, torch.autograd.grad(total, list(own.values())), strict=True):
        assert_close(grads, expected[name].sum(0))
    assert_close(clipper.backward(losses_of(model(x))).norms, total_of(norms_of(expected)))


def test_a_forward_before_attaching_is_refused():
    model = small()
    losses = losses_of(model(batch()))
    clipper = PerSampleGradientClipper(model, ConstantFlatClipper(1.0))
    with pytest.raises(RuntimeError, match="ran before the clipper was attached"):
        clipper.backward(losses)
    assert all(grad is None for grad in grads(model))


def test_a_backward_that_nobody_consumed_raises_at_the_next_forward():
    model, x = small(), batch()
    clipper = PerSampleGradientClipper(model, ConstantFlatClipper(1.0))
    losses_of(model(x)).sum().backward()
    with pytest.raises(RuntimeError, match="wait to be clipped"):
        model(x)
    clipper.discard()
    assert_close(clipper.backward(losses_of(model(x))).norms, reference(copy.deepcopy(model), x, 1.0)[0])


def test_a_clipper_that_nobody_holds_leaves_its_model():
    model, x, before = small(), batch(), vars(small()[0]).keys()
    clipper = PerSampleGradientClipper(model, ConstantFlatClipper(1.0), keep_grad_samples=True)
    losses_of(model(x)).mean().backward()
    assert model[0].weight.grad_sample.shape[0] == len(x)
    del clipper
    assert not any(hasattr(param, "grad_sample") for param in model.parameters())
    assert vars(model[0]).keys() == before
    for _ in range(2):
        losses_of(model(x)).mean().backward()  # as if there had been none
    wrapper = GradSampleModuleFastGradientClipping(model)
    losses_of(wrapper(x)).mean().backward(retain_graph=True)
    assert hasattr(model[0].weight, "norm_sample")
    del wrapper
    assert not hasattr(model[0].weight, "norm_sample")
    PerSampleGradientClipper(model, ConstantFlatClipper(1.0)).backward(losses_of(model(x)))


def test_a_second_clipper_on_one_model_is_refused():
    model = small()
    _clipper = PerSampleGradientClipper(model, ConstantFlatClipper(1.0))
    with pytest.raises(ValueError, match="another clipper is attached"):
        PerSampleGradientClipper(model, ConstantFlatClipper(1.0))


def test_a_graph_that_was_kept_can_be_clipped_again():
    model, x = small(), batch()
    clipper = PerSampleGradientClipper(model, ConstantFlatClipper(1.0))
    losses = losses_of(model(x))
    for _ in range(2):
        losses.mean().backward(retain_graph=True)
        assert_close(clipper.clip_and_accumulate().norms, reference(model, x, 1.0)[0])
    for grad, total in zip((clipper.pre_step(), grads(model))[1], reference(model, x, 1.0)[1], strict=True):
        assert_close(grad, total / 5)


def test_calls_out_of_order_raise():
    model = small()
    clipper = PerSampleGradientClipper(model, ConstantFlatClipper(1.0))
    with pytest.raises(ValueError, match="clip_and_accumulate"):
        clipper.pre_step()
    with pytest.raises(RuntimeError, match=r"call loss.backward\(\) first"):
        clipper.clip_and_accumulate()
    losses_of(model(batch())).sum().backward()
    with pytest.raises(RuntimeError, match="wait: call"):
        clipper.backward(torch.ones(5, requires_grad=True))


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"loss_reduction": "none"}, ValueError, "loss_reduction must be one of"),
        ({"memory": "high"}, ValueError, "memory must be one of"),
        ({"nonfinite": "skip"}, ValueError, "nonfinite must be one of"),
        ({"batch_first": 1}, TypeError, "batch_first must be True or False"),
        ({"keep_grad_samples": None}, TypeError, "keep_grad_samples must be True or False"),
    ],
)
def test_arguments_that_cannot_be_are_refused(arguments, error, match):
    with pytest.raises(error, match=match):
        PerSampleGradientClipper(small(), ConstantFlatClipper(1.0), **arguments)


def test_wrong_types_are_refused():
    with pytest.raises(TypeError, match="norm_clipper must be of class NormClipper"):
        PerSampleGradientClipper(small(), 1.0)
    with pytest.raises(TypeError, match="module must be of class Module"):
        PerSampleGradientClipper([torch.zeros(1)], ConstantFlatClipper(1.0))
    clipper = PerSampleGradientClipper(small(), ConstantFlatClipper(1.0))
    with pytest.raises(TypeError, match="losses must be of class Tensor"):
        clipper.backward([1.0])
    with pytest.raises(ValueError, match='reduction="none"'):
        clipper.backward(torch.zeros((), requires_grad=True))


def test_losses_of_another_number_of_samples_are_refused():
    model = small()
    clipper = PerSampleGradientClipper(model, ConstantFlatClipper(1.0))
    with pytest.raises(ValueError, match="saw 5 samples, the batch has 10"):
        clipper.backward(F.mse_loss(model(batch()), torch.zeros(5, 2).double(), reduction="none").flatten())
    assert all(grad is None for grad in grads(model))


def test_recurrent_layers_refuse_packed_sequences():
    model = nn.LSTM(3, 2)
    _clipper = PerSampleGradientClipper(model, ConstantFlatClipper(1.0), batch_first=False)
    with pytest.raises(ValueError, match="PackedSequence"):
        model(nn.utils.rnn.pack_sequence([torch.randn(4, 3), torch.randn(2, 3)]))


@pytest.fixture
def one_process(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("one_process")
def test_distributed_tensors_are_refused_by_name():
    model = small()
    mesh = torch.distributed.init_device_mesh("cpu", (1,))
    model[2].weight = nn.Parameter(torch.distributed.tensor.distribute_tensor(model[2].weight.detach(), mesh))
    with pytest.raises(ValueError, match=r"'2\.weight' is a DTensor: clip before fully_shard"):
        PerSampleGradientClipper(model, ConstantFlatClipper(1.0))


@pytest.mark.usefixtures("one_process")
def test_distributed_data_parallel_is_refused_by_name():
    with pytest.raises(ValueError, match="DistributedDataParallel"):
        PerSampleGradientClipper(nn.parallel.DistributedDataParallel(small()), ConstantFlatClipper(1.0))
    model = small()
    _clipper = PerSampleGradientClipper(model, ConstantFlatClipper(1.0))
    with pytest.raises(RuntimeError, match="DistributedDataParallel"):
        nn.parallel.DistributedDataParallel(model)(batch())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.jit
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_scripted_and_complex_models_are_refused_by_name():
    with pytest.raises(ValueError, match=r"scripted, got a RecursiveScriptModule"):
        PerSampleGradientClipper(torch.jit.script(small()), ConstantFlatClipper(1.0))
    model = nn.Linear(2, 2)
    model.weight = nn.Parameter(torch.zeros(2, 2, dtype=torch.complex64))
    with pytest.raises(ValueError, match=r"'weight' is torch\.complex64"):
        PerSampleGradientClipper(model, ConstantFlatClipper(1.0))


def test_a_forward_set_on_an_instance_is_refused_by_name():
    model = small()
    model[0].forward = lambda x: x
    with pytest.raises(ValueError, match=r"'0' \(Linear\) has a forward of its own"):
        PerSampleGradientClipper(model, ConstantFlatClipper(1.0))


def test_a_single_layer_whose_bias_was_freed_is_followed():
    model, x = nn.Linear(3, 2).double(), batch()
    model.bias.requires_grad_(False)
    clipper = PerSampleGradientClipper(model, ConstantFlatClipper(1.0))
    model.bias.requires_grad_(True)
    norms, _ = reference(model, x, 1.0)
    assert_close(clipper.backward(losses_of(model(x))).norms, norms)


def test_a_layer_that_cannot_be_right_put_in_later_is_refused_and_nothing_trains():
    model = small()
    clipper = PerSampleGradientClipper(model, ConstantFlatClipper(1.0))
    model.append(nn.BatchNorm1d(2).double())
    for _ in range(2):
        with pytest.raises(ValueError, match=r"'3' \(BatchNorm1d\)"):
            model(batch())
    del model[3]
    assert clipper.backward(losses_of(model(batch()))).norms.shape == (5,)


def test_parts_of_the_model_called_by_themselves_are_captured_and_refuse_to_go_on_unclipped():
    model, x = small(), batch()
    norms, _ = reference(model, x, 1.0)
    clipper = PerSampleGradientClipper(model, ConstantFlatClipper(1.0))
    assert_close(clipper.backward(losses_of(model[2](model[1](model[0](x))))).norms, norms)
    model[0](x).sum().backward()
    with pytest.raises(RuntimeError, match="wait to be clipped"):
        model[0](x)


def test_a_layer_that_was_exchanged_is_followed():
    model, x = small(), batch()
    clipper = PerSampleGradientClipper(model, ConstantFlatClipper(1.0))
    model[0] = nn.Linear(3, 4).double()
    norms, _ = reference(model, x, 1.0)
    assert_close(clipper.backward(losses_of(model(x))).norms, norms)


class Conv1D(nn.Module):
    """The linear layer of GPT-2, with its weight the other way round."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(inputs, outputs)), nn.Parameter(torch.randn(outputs))

    def forward(self, x):
        shape = (*x.shape[:-1], len(self.bias))
        return torch.addmm(self.bias, x.view(-1, x.shape[-1]), self.weight).view(shape)


def test_linear_layers_of_gpt_2():
    assert_matches_loop(nn.Sequential(Conv1D(3, 4), nn.GELU(), Conv1D(4, 2)), torch.randn(5, 6, 3))


class FirstLayerUnused(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x):
        self.first(x)
        return self.second(x)


def test_a_layer_whose_output_is_not_used_contributes_nothing():
    assert_matches_loop(FirstLayerUnused(), torch.randn(5, 3))


def test_losses_that_do_not_depend_on_the_module_raise():
    clipper = PerSampleGradientClipper(small(), ConstantFlatClipper(1.0))
    with pytest.raises(RuntimeError, match="the losses do not depend on it"):
        clipper.backward(torch.ones(5, requires_grad=True) * 2)


def test_detach_between_forward_and_backward_raises():
    model = small()
    clipper = PerSampleGradientClipper(model, ConstantFlatClipper(1.0))
    losses = losses_of(model(batch()))
    clipper.detach()
    with pytest.raises(RuntimeError, match="run the forward again"):
        losses.sum().backward()
    assert all(grad is None for grad in grads(model))


# backwards that did not end


def raising(grad):
    raise KeyError("out of memory")


def interrupted(model, x):
    """A backward that raises after the gradients of the last layer have arrived."""
    handle = model[1].register_forward_hook(lambda module, args, output: output.register_hook(raising) and None)
    with pytest.raises(KeyError):
        losses_of(model(x)).mean().backward()
    handle.remove()


def test_gradients_of_a_backward_that_raised_are_refused():
    model, x = small(), batch()
    clipper = PerSampleGradientClipper(model, ConstantFlatClipper(1.0))
    interrupted(model, x)
    with pytest.raises(RuntimeError, match="raised before its end"):
        clipper.clip_and_accumulate()
    with pytest.raises(ValueError, match="nothing was accumulated"):
        clipper.pre_step()


@pytest.mark.parametrize("forget", [True, False], ids=["discard", "next forward"])
def test_a_backward_that_raised_is_forgotten(forget):
    model, x = small(), batch()
    clipper = PerSampleGradientClipper(model, ConstantFlatClipper(1.0))
    interrupted(model, x)
    if forget:
        clipper.discard()
    losses_of(model(x)).mean().backward()
    assert_close(clipper.clip_and_accumulate().norms, reference(model, x, 1.0)[0])


def test_the_forward_hook_is_gone_after_detach():
    model = small()
    PerSampleGradientClipper(model, ConstantFlatClipper(1.0)).detach()
    assert not model._forward_hooks
    assert not model._forward_hooks_always_called


# parameters


def test_grad_samples_of_a_parameter_that_was_frozen_are_forgotten():
    model = small()
    clipper = PerSampleGradientClipper(model, ConstantFlatClipper(1.0), keep_grad_samples=True)
    clipper.backward(losses_of(model(batch())))
    model[0].weight.requires_grad_(False)
    model(batch())
    assert not hasattr(model[0].weight, "grad_sample")


@pytest.mark.parametrize("classic", [True, False])
def test_hooks_of_parameters_get_the_clipped_gradient(classic):
    model, x, seen, stepped = small(), batch(), [], []
    model[0].weight.register_hook(lambda grad: seen.append(grad) or grad * 2)
    model[0].weight.register_post_accumulate_grad_hook(lambda param: stepped.append(param.grad.clone()))
    clipper = PerSampleGradientClipper(model, ConstantFlatClipper(1.0), loss_reduction="sum")
    losses = losses_of(model(x))
    if classic:
        losses.sum().backward()
        clipper.clip_and_accumulate()
        clipper.pre_step()
    else:
        clipper.backward(losses)
    expected = reference(small_like(model), x, 1.0)[1][0]
    assert_close(torch.stack(seen), expected[None])
    assert_close(torch.stack(stepped), 2 * expected[None])
    assert_close(model[0].weight.grad, 2 * expected)


def small_like(model):
    twin = small()
    twin.load_state_dict(model.state_dict())
    return twin


class Loop(nn.Module):
    def __init__(self, cell):
        super().__init__()
        self.cell = cell

    def forward(self, x):
        hidden = x.new_zeros(len(x), 4)
        for step in x.unbind(1):
            hidden = self.cell(step, hidden)
        return hidden


def test_of_a_layer_in_a_loop_one_gradient_of_each_sample_is_kept():
    model, x = Loop(nn.GRUCell(3, 4)), torch.randn(5, 6, 3)
    assert_matches_loop(model, x)
    clipper = PerSampleGradientClipper(model, ConstantFlatClipper(1.0))
    losses_of(model(x.double())).mean().backward()
    assert {len(group) for group in clipper._engine.captured.of.values()} == {1}
    clipper.discard()


def test_a_batch_that_counts_from_0_is_no_positions():
    assert_matches_loop(nn.Sequential(nn.Embedding(7, 3), nn.Linear(3, 2)), torch.arange(5))


def test_the_limit_may_change_between_steps():
    model, x = small(), batch()
    clipper = PerSampleGradientClipper(model, ConstantFlatClipper(1e9))
    limit = clipper.backward(losses_of(model(x))).norms.quantile(0.5).item()
    clipper.norm_clipper = ConstantFlatClipper(limit)
    assert clipper.backward(losses_of(model(x))).factors.min() < 1
    assert repr(clipper) == f"PerSampleGradientClipper(ConstantFlatClipper({limit}), loss_reduction='mean')"
    with pytest.raises(TypeError, match="norm_clipper must be of class NormClipper, got 5"):
        clipper.norm_clipper = 5
    assert clipper.norm_clipper.flat_value == limit


def test_gradients_that_a_scaler_multiplied_take_a_limit_that_it_multiplied_too():
    models, x = [small().float() for _ in range(2)], batch().float()
    models[1].load_state_dict(models[0].state_dict())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for model in models:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        clipper = PerSampleGradientClipper(model, ConstantFlatClipper(0.3))
        if model is models[0]:
            clipper.backward(losses_of(model(x)))
            optimizer.step()
            continue
        losses = scaler.scale(losses_of(model(x)))
        clipper.norm_clipper = ConstantFlatClipper(0.3 * scaler.get_scale())
        clipper.backward(losses)
        scaler.step(optimizer)
        scaler.update()
    for one, two in zip(*(model.parameters() for model in models), strict=True):
        assert_close(one, two, rtol=1e-5, atol=1e-7)


def test_a_layer_freed_before_a_call_of_submodules_is_not_left_out():
    model, x = small(), batch()
    model[0].weight.requires_grad_(False)
    clipper = PerSampleGradientClipper(model, ConstantFlatClipper(0.1))
    model[0].requires_grad_(True)
    norms = clipper.backward(losses_of(model[2](model[1](model[0](x))))).norms
    assert_close(norms, reference(copy.deepcopy(model), x, 0.1)[0])


def test_a_layer_that_was_all_frozen_before_a_call_of_submodules_is_refused():
    model, x = small(), batch()
    model[0].requires_grad_(False)
    clipper = PerSampleGradientClipper(model, ConstantFlatClipper(0.1))
    model[0].requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"outside the call of its layer|run it again"):
        clipper.backward(losses_of(model[2](model[0](x))))
    assert all(param.grad is None for param in model.parameters())
    assert_close(clipper.backward(losses_of(model(x))).norms, reference(copy.deepcopy(model), x, 0.1)[0])


def test_layers_freed_between_forward_and_backward_are_refused():
    model, x = small(), batch()
    model[0].requires_grad_(False)
    clipper = PerSampleGradientClipper(model, ConstantFlatClipper(0.1))
    losses = losses_of(model(x))
    model[0].requires_grad_(True)
    with pytest.raises(RuntimeError, match="frozen, freed or exchanged since its forward began: run it again"):
        clipper.backward(losses)
    assert all(param.grad is None for param in model.parameters())


def test_a_module_with_the_address_of_an_old_one_is_seen():
    for _ in range(20):
        model = nn.Sequential(nn.Linear(3, 3), nn.Identity(), nn.Linear(3, 2)).double()
        clipper = PerSampleGradientClipper(model, ConstantFlatClipper(1.0))
        clipper.backward(losses_of(model(batch())))
        model[1] = None
        model[1] = nn.BatchNorm1d(3, affine=False)
        with pytest.raises(ValueError, match="BatchNorm1d"):
            model(batch())


def test_a_clipper_that_could_not_attach_leaves_the_model_as_it_was():
    model = nn.Sequential(nn.Linear(5, 3), nn.LazyLinear(3), nn.Linear(3, 1))
    with pytest.raises(ValueError, match=r"'1\.weight' is lazy: run a forward first"):
        PerSampleGradientClipper(model, ConstantFlatClipper(1.0))
    model(torch.randn(4, 5))
    PerSampleGradientClipper(model, ConstantFlatClipper(1.0)).backward(losses_of(model(torch.randn(4, 5))))


def test_a_hook_that_raises_in_pre_step_changes_nothing():
    model, x = small(), batch()
    clipper, raising = PerSampleGradientClipper(model, ConstantFlatClipper(0.1)), [True]

    def hook(grad):
        if raising:
            raise KeyError

    model[2].weight.register_hook(hook)
    losses_of(model(x)).mean().backward()
    clipper.clip_and_accumulate()
    with pytest.raises(KeyError):
        clipper.pre_step()
    assert all(param.grad is None for param in model.parameters())
    raising.clear()
    clipper.pre_step()
    for param, grad in zip(model.parameters(), reference(copy.deepcopy(model), x, 0.1)[1], strict=True):
        assert_close(param.grad, grad / len(x))


def test_a_forward_that_the_user_sets_meanwhile_stays():
    model = small()
    clipper = PerSampleGradientClipper(model, ConstantFlatClipper(1.0))
    model[0].forward = own = lambda x: x
    clipper.detach()
    assert model[0].forward is own


def test_options_that_are_refused_are_refused_also_where_they_are_set_later():
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 2))
    clipper = PerSampleGradientClipper(model, ConstantFlatClipper(1.0))
    model[0].max_norm = 0.1
    with pytest.raises(ValueError, match=r"'0' \(Embedding\) cannot be clipped per sample: max_norm"):
        model(torch.tensor([[1, 2]]))
    assert clipper


def test_a_hook_that_raises_in_backward_changes_no_gradient():
    model, x = small(), batch()
    for param in model.parameters():
        param.grad = torch.ones_like(param)

    def hook(grad):
        raise KeyError

    model[2].bias.register_hook(hook)
    clipper = PerSampleGradientClipper(model, ConstantFlatClipper(1.0))
    with pytest.raises(KeyError):
        clipper.backward(losses_of(model(x)))
    assert all((param.grad == 1).all() for param in model.parameters())


def test_a_model_that_holds_its_clipper_is_freed_with_it():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 2)
            self.clipper = PerSampleGradientClipper(self, ConstantFlatClipper(1.0), keep_grad_samples=True)

        def forward(self, x):
            return self.layer(x)

    model = Net()
    model.clipper.backward(losses_of(model(torch.randn(4, 3))))
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize(
    ("factors", "error", "message"),
    [
        (lambda norms: norms[0], TypeError, "Giving.calc_clipping_factors must return factors for 4 parameter tensors"),
        (lambda norms: None, TypeError, "got NoneType"),
        (lambda norms: [norms[0]] * 3, ValueError, "got 3"),
        (lambda norms: [norms[0]] * 5, ValueError, "got 5"),
        (lambda norms: [norms[0][1:]] * 4, ValueError, r"must return tensors of shape \(5,\), got \(4,\)"),
        (lambda norms: [1.0] * 4, ValueError, "got float"),
        (lambda norms: [norms[0][:, None]] * 4, ValueError, r"got \(5, 1\)"),
    ],
)
def test_factors_that_do_not_fit_are_refused_by_the_name_of_the_class(factors, error, message):
    class Giving(NormClipper):
        is_per_layer = False
        thresholds = torch.ones(1)

        def calc_clipping_factors(self, norms):
            return factors(norms)

    model = small()
    clipper = PerSampleGradientClipper(model, Giving())
    with pytest.raises(error, match=message):
        clipper.backward(losses_of(model(batch())))
    assert all(param.grad is None for param in model.parameters())


def test_what_hooks_have_seen_or_returned_stays_theirs():
    model, x, seen, constant = small(), batch(), [], torch.ones(2, 4, dtype=torch.float64)
    model[0].weight.register_hook(seen.append)
    model[2].weight.register_hook(lambda grad: constant)
    clipper = PerSampleGradientClipper(model, ConstantFlatClipper(1.0))
    clipper.backward(losses_of(model(x)))
    first = seen[0].clone()
    clipper.backward(losses_of(model(x)))
    assert torch.equal(seen[0], first)
    assert (constant == 1).all()
    assert (model[2].weight.grad == 2).all()


def test_a_hook_that_returns_another_shape_is_refused_and_changes_nothing():
    model, x = small(), batch()
    model[2].weight.register_hook(lambda grad: grad.sum())
    clipper = PerSampleGradientClipper(model, ConstantFlatClipper(1.0))
    with pytest.raises(RuntimeError, match=r"of shape \(2, 4\) returned a gradient of shape \(\)"):
        clipper.backward(losses_of(model(x)))
    assert all(param.grad is None for param in model.parameters())
