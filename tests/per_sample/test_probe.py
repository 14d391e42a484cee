"""Rows whose samples labels do not tell: a probe in `backward(losses)` finds them, or refuses them.

The oracle is one backward for each sample, in float64.
"""

import copy

import pytest
import ranks
import torch
import torch.distributed as dist
import torch.nn.functional as F
from per_sample.harness import (
    Net,
    assert_close,
    by_backward,
    by_classic_form,
    by_two_passes,
    clip,
    losses_of,
    norms_in_batch,
)
from per_sample.several import WRAPS
from torch import nn
from torch.utils.checkpoint import checkpoint

from torchzero_clip import ConstantFlatClipper, PrivateGradientClipper

B, T, W = 5, 4, 3
UNKNOWN = "samples are not known, and backward.losses. cannot find them: "


class Moved(torch.autograd.Function):
    """Rows by an index, in a function that shows nothing of it."""

    @staticmethod
    def forward(ctx, x, index):
        ctx.save_for_backward(index)
        ctx.shape = x.shape
        return torch.from_numpy(x.detach().view(torch.uint8).numpy()[index.numpy()]).view(x.dtype)

    @staticmethod
    def backward(ctx, grad):
        (index,) = ctx.saved_tensors
        return grad.new_zeros(ctx.shape).index_add(0, index, grad), None


def moved(x, times=2):
    """Rows of samples in another order, each of them several times, and their samples."""
    samples = torch.arange(len(x)).repeat(times)[torch.randperm(times * len(x), generator=torch.Generator())]
    return Moved.apply(x, samples), samples


def summed(rows, samples, count):
    return rows.new_zeros(count, *rows.shape[1:]).index_add(0, samples, rows)


def data(*shape, count=B):
    return torch.randn(count, *(shape or (W,)))


def lin(width=W, other=W):
    return nn.Linear(width, other)


def through(**layers):
    """A model whose layers get moved rows."""

    def forward(m, x):
        rows, samples = moved(x)
        for name in layers:
            rows = getattr(m, name)(rows).tanh()
        return summed(rows, samples, len(x))

    return Net(forward, **layers)


def rolled(m, x):
    flat = m.first(x).flatten(0, 1)
    return m.last(flat.roll(1, 0)).tanh().roll(-1, 0).view(x.shape)


def swapped(m, x):
    h = m.first(x)
    z = torch.cat([h, h])
    z[0], z[len(x) + 1] = h[1], h[0]
    one, two = m.last(z).tanh().split(len(x))
    return torch.cat([two[:1] + two[1:2], one[:1] + one[1:2], one[2:] + two[2:]])


def with_capacity(m, x):
    """Tokens are sent to places of experts, and back, as in GShard."""
    tokens = m.first(x).flatten(0, 1)
    gates = m.router(tokens).softmax(-1)
    expert = gates.argmax(-1)
    place = F.one_hot(expert, 2).cumsum(0).gather(1, expert[:, None]) - 1
    capacity = len(tokens)
    sent = F.one_hot(expert, 2)[..., None] * F.one_hot(place[:, 0], capacity)[:, None]
    inside = torch.einsum("sec,sm->ecm", sent.to(x.dtype), tokens)
    outside = torch.stack([m.one(inside[0]), m.two(inside[1])]).tanh()
    return torch.einsum("sec,ecm->sm", sent * gates[..., None], outside).view(x.shape)


def distinct(m, ids):
    words, back = ids.unique(return_inverse=True)
    return m.head(m.table(words)[back]).tanh()


def sorted_by_data(m, x):
    h = m.first(x).flatten(0, 1)
    order = Moved.apply(h, torch.arange(len(h))).sum(1).argsort()
    rows = m.last(Moved.apply(h, order)).tanh()
    return rows.new_zeros(rows.shape).index_copy(0, order, rows).view(x.shape)


def in_two_forms(m, x):
    """A layer is used for lost rows and for others."""
    rows, samples = moved(x)
    return m.lin(x).tanh() + summed(m.lin(rows).tanh(), samples, len(x))


def unused(m, x):
    rows, samples = moved(x)
    return m.lin(x) + summed(0 * m.other(rows), samples, len(x))


RIGHT = {
    "linear layers": lambda count=B: (through(first=lin(), second=lin()), data(count=count)),
    "positions": lambda: (through(first=lin(), norm=nn.LayerNorm(W), last=lin(W, 2)), data(T, W)),
    "norms": lambda: (through(norm=nn.GroupNorm(1, 4), other=nn.RMSNorm(3)), data(4, 3)),
    "convolutions": lambda: (through(conv=nn.Conv1d(2, 4, 3, padding=1), norm=nn.GroupNorm(2, 4)), data(2, 6)),
    "an embedding": lambda: (through(table=nn.Embedding(9, W), lin=lin()), torch.randint(0, 9, (B, T))),
    "bags": lambda: (through(table=nn.EmbeddingBag(9, W), lin=lin()), torch.randint(0, 9, (B, T))),
    "roll": lambda: (Net(rolled, first=lin(), last=lin()), data(T, W)),
    "swaps": lambda: (Net(swapped, first=lin(), last=lin()), data()),
    "capacity": lambda: (Net(with_capacity, first=lin(), router=lin(W, 2), one=lin(), two=lin()), data(T, W)),
    "distinct words": lambda: (Net(distinct, table=nn.Embedding(40, W), head=lin()), torch.randperm(40).view(5, 8)),
    "sorted by data": lambda: (Net(sorted_by_data, first=lin(), last=lin()), data(T, W)),
    "two forms": lambda: (Net(in_two_forms, lin=lin()), data()),
    "a gradient of 0": lambda: (Net(unused, lin=lin(), other=lin()), data()),
    "a checkpoint": lambda: (
        Net(lambda m, x: checkpoint(m.inner, x, use_reentrant=False), inner=through(first=lin(), last=lin())),
        data(),
    ),
    "130 samples": lambda: (through(first=lin(), second=lin()), data(count=130)),
    "one sample": lambda: (through(first=lin(), second=lin()), data(count=1)),
}


def gradients_in_batch(model, losses):
    """The gradients of each loss alone: name -> (B, *shape)."""
    params = dict(model.named_parameters())
    rows = [torch.autograd.grad(x, list(params.values()), retain_graph=True, materialize_grads=True) for x in losses]
    return {name: torch.stack(column) for name, column in zip(params, zip(*rows, strict=True), strict=True)}


def assert_right(model, *inputs, losses=losses_of, steps=2, **settings):
    """Norms and clipped sums equal those of one backward for each sample."""
    each = gradients_in_batch(copied := copy.deepcopy(model), losses(copied(*inputs)))
    norms = {name: grads.flatten(1).norm(dim=1) for name, grads in each.items()}
    total = torch.stack(list(norms.values())).norm(dim=0)
    limit = total.median().item()
    with clip(model, limit, **settings) as clipper:
        for _ in range(steps):
            model.zero_grad()
            result = clipper.backward(losses(model(*inputs)))
            assert_close(result.norms, total)
            for name, param in model.named_parameters():
                assert_close(result.param_norms[name], norms[name])
                expected = torch.tensordot((limit / (total + 1e-6)).clamp(max=1), each[name], 1) / len(total)
                assert_close(torch.zeros_like(param) if param.grad is None else param.grad, expected)


@pytest.mark.parametrize("settings", [{"verify": "always"}, {"memory": "low", "verify": "never"}], ids=str)
@pytest.mark.parametrize("name", RIGHT)
def test_rows_are_found(name, settings):
    model, *inputs = RIGHT[name]()
    inputs = [x.double() if x.is_floating_point() else x for x in inputs]
    assert_right(model.double(), *inputs, **settings)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_rows_of_nested_tensors_are_found(layout):
    def padded(m, x):
        parts = torch.nested.as_nested_tensor([row[: 1 + i % T] for i, row in enumerate(m.first(x))], layout=layout)
        return m.last(torch.nested.to_padded_tensor(parts, 0.0)).sum(1) + sum(x.sum() for x in parts.unbind()) * 0

    for count in (B, 1):
        assert_right(Net(padded, first=lin(), last=lin()).double(), data(T, W, count=count).double(), verify="always")


@pytest.mark.parametrize("name", RIGHT)
@pytest.mark.parametrize("form", [by_classic_form, by_two_passes])
def test_rows_are_found_from_the_outputs_of_the_model(form, name):
    model, *inputs = RIGHT[name]()
    inputs = [x.double() if x.is_floating_point() else x for x in inputs]
    expected, step = norms_in_batch(model.double(), *inputs), form(copy.deepcopy(model), verify="never")
    for _ in range(3):
        assert_close(step(lambda m: losses_of(m(*inputs)))[0], expected)


def test_private_clippers_prove_rows_in_any_order():
    model, x = RIGHT["linear layers"]()
    model, x = model.double(), x.double()
    private = PrivateGradientClipper(model, ConstantFlatClipper(1.0), noise_multiplier=1.0, expected_batch_size=B)
    expected = norms_in_batch(copy.deepcopy(model), x)
    with private:
        for _ in range(3):
            assert_close(private.backward(losses_of(model(x))).norms, expected)


# refused


def hooked(hook):
    def forward(m, x):
        rows, samples = moved(x)
        rows = m.lin(rows)
        rows.register_hook(hook)
        return summed(rows.tanh(), samples, len(x))

    return Net(forward, lin=lin())


class Fused(torch.autograd.Function):
    """The squares of each sample. The forward makes the gradient, and the backward writes into it."""

    @staticmethod
    def forward(ctx, x):
        ctx.grad = 2 * x
        return x.square().sum(1)

    @staticmethod
    def backward(ctx, grad):
        return ctx.grad.mul_(grad[:, None])


class Freed(Fused):
    @staticmethod
    def backward(ctx, grad):
        result, ctx.grad = ctx.grad, None
        return result.mul_(grad[:, None])


class GivesAway(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise RuntimeError("This backward function was compiled with non-empty donated buffers which requires ...")


class Half(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.half()

    @staticmethod
    def backward(ctx, grad):
        return grad.float()


def mixed(m, x):
    rows, samples = moved(x)
    rows = m.lin(rows)
    return summed((rows - rows.mean(0)).tanh(), samples, len(x))


def shared(m, x):
    return m.lin(x) + m.other(torch.arange(2.0 * W).view(2, W)).tanh().sum(0)


def in_a_reentrant_checkpoint(m, x):
    return checkpoint(m.inner, x.clone().requires_grad_(), use_reentrant=True)


def plain():
    return through(first=lin(), last=lin())


def of_others(losses):
    return torch.cat([(2 * losses[2:] + losses[:-2]) / 3, losses[-2:]])


def a_pair(losses):
    return torch.cat([(losses[1:2] + losses[:1]) / 2, losses[1:2] / 2, losses[2:]])


def with_nan(losses):
    return losses * torch.tensor([1, 1, torch.nan, 1, 1])


NOT_LINEAR = "a function or hook has a backward that is not linear"
MIXED = r"losses of samples \d, \d.* change the gradient of one row"
TWICE = "the graph cannot run backward twice"
REFUSED = {
    "a sign": (lambda: hooked(torch.sign), losses_of, NOT_LINEAR),
    "a norm": (lambda: hooked(lambda grad: grad / grad.norm()), losses_of, NOT_LINEAR),
    "a limit": (lambda: hooked(lambda grad: grad.clamp(-0.01, 0.01)), losses_of, NOT_LINEAR),
    "losses that mix": (plain, lambda output: of_others(losses_of(output)), MIXED),
    "a mean": (lambda: Net(mixed, lin=lin()), losses_of, MIXED),
    "a pair": (plain, lambda output: a_pair(losses_of(output)), MIXED),
    "a difference of two": (plain, lambda output: losses_of(output) - losses_of(output).roll(1), MIXED),
    "freed": (plain, Freed.apply, TWICE),
    "given away": (plain, lambda output: losses_of(GivesAway.apply(output)), TWICE),
    "a NaN": (
        plain,
        lambda output: with_nan(losses_of(output)),
        "samples are not known, .* not finite, too large or too small",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_changes_nothing(name):
    make, losses, message = REFUSED[name]
    model, x, scale = make(), data(), torch.ones(W, requires_grad=True)
    scale.grad, kept = torch.full((W,), 7.0), None
    with clip(model, verify="never") as clipper:
        for param in model.parameters():
            param.grad = torch.full_like(param, 3.0)
        output = model(x)
        output.retain_grad()
        output.grad = kept = torch.ones_like(output)
        with pytest.raises(RuntimeError, match=message):
            clipper.backward(losses(output * scale))
        assert output.grad is kept
        assert bool((output.grad == 1).all())
        assert bool((scale.grad == 7).all())
        assert all(bool((param.grad == 3).all()) for param in model.parameters())
        clipper.discard()
    model, x = plain().double(), data().double()
    assert_right(model, x)


def test_rows_that_all_samples_share_are_right_with_a_first_dimension():
    """One network gets the inputs, and the other one the points at which all samples are evaluated."""
    points = torch.linspace(0, 1, T, dtype=torch.float64)[:, None]

    def forward(m, x):
        at = points[None] if m.right else points * 1
        return torch.einsum("bd,nd->bn", m.branch(x), m.trunk(at).view(T, -1))

    model, x = Net(forward, branch=lin(), trunk=lin(1), right=False).double(), data().double()
    assert_right(model, x, verify="always")  # points that all samples share are found by the first step
    model.right = True
    assert_right(model, x, verify="always")


def test_rows_in_a_reentrant_checkpoint_are_refused():
    model, x = Net(in_a_reentrant_checkpoint, inner=plain()), data()
    with clip(model) as clipper, pytest.raises(RuntimeError, match="a checkpoint with use_reentrant=True"):
        clipper.backward(losses_of(model(x)))
    assert all(param.grad is None for param in model.parameters())


@pytest.mark.parametrize("form", [by_backward, by_classic_form, by_two_passes])
def test_the_way_out_of_rows_in_a_reentrant_checkpoint_is_another_one(form):
    inner = nn.Sequential(lin(), nn.Tanh(), lin())
    model = Net(
        lambda m, x: checkpoint(m.inner, m.first(x).flatten(0, 1), use_reentrant=m.old), first=lin(), inner=inner
    )
    model.old, x = True, torch.randn(B, T, W)
    with pytest.raises(RuntimeError, match=r"(use|Call) torch.utils.checkpoint with use_reentrant=False"):
        form(model)(lambda m: losses_of(m(x).view(B, T, -1)))


def test_a_row_whose_gradients_cancel_is_refused():
    model, x = plain(), data().repeat(2, 1)[: B + 1]  # the last is the first
    sign = torch.tensor([1.0, 1, 1, 1, 1, -1])

    def losses(output):
        return sign * output[[0, 1, 2, 3, 4, 0]].sum(1)

    with clip(model, verify="never") as clipper, pytest.raises(RuntimeError, match="the losses of samples 0, 5 change"):
        clipper.backward(losses(model(x)))


@pytest.mark.parametrize("check", ["never", "always"])
def test_a_loss_that_writes_in_place_does_not_change_what_other_layers_have_got(check):
    def forward(m, x):
        rows, samples = moved(x)
        return m.lin(x) + summed(0 * m.other(rows), samples, len(x))

    model, x = Net(forward, lin=lin(), other=lin()).double(), data().double()
    expected = gradients_in_batch(copied := copy.deepcopy(model), copied(x).square().sum(1))["lin.weight"]
    with clip(model, 1e9, verify=check) as clipper:
        clipper.backward(Fused.apply(model(x)))
        assert_close(model.lin.weight.grad, expected.mean(0))


def test_a_loss_that_writes_in_place_is_right_in_one_probe_and_refused_in_two():
    model, x = plain().double(), data(count=16).double()
    expected = gradients_in_batch(copied := copy.deepcopy(model), copied(x).square().sum(1))
    with clip(model, 1e9, verify="always") as clipper:
        clipper.backward(Fused.apply(model(x)))
        for name, param in model.named_parameters():
            assert_close(param.grad, expected[name].mean(0))
        model.zero_grad()
        with pytest.raises(RuntimeError, match="gets other gradients from a second backward"):
            clipper.backward(Fused.apply(model(data(count=17).double())))
        assert all(param.grad is None for param in model.parameters())


def test_kept_gradients_are_those_of_one_backward():
    model, x, scale = plain().double(), data().double(), torch.rand(W, dtype=torch.float64, requires_grad=True)

    def step(model, backward):
        output = model(x)
        output.retain_grad()
        scale.grad = None
        backward(losses_of(output * scale))
        return output.grad, scale.grad

    expected = step(copy.deepcopy(model), lambda losses: losses.sum().backward())
    with clip(model, verify="always") as clipper:
        for _ in range(2):
            for found, value in zip(step(model, clipper.backward), expected, strict=True):
                assert_close(found, value)


def test_samples_that_mix_behind_lost_rows_are_found_by_the_check():
    def forward(m, x):
        rows, samples = moved(x)
        h = summed(m.first(rows), samples, len(x))
        return m.last(h) + h.detach() * m.last(h.roll(1, 0))

    model, x = Net(forward, first=lin(), last=lin()), data()
    with clip(model) as clipper, pytest.raises((RuntimeError, ValueError), match=r"mixes samples|several samples"):
        clipper.backward(losses_of(model(x)))


def test_losses_may_be_in_another_order():
    model = Net(lambda m, x: m.known(x) + summed(m.lost((rows := moved(x))[0]), rows[1], B), known=lin(), lost=lin())
    model, x = model.double(), data().double()
    expected = norms_in_batch(copy.deepcopy(model), x)
    assert_close(clip(model, verify="never").backward(losses_of(model(x)).flip(0)).norms, expected.flip(0))


def test_another_number_of_losses_is_refused():
    model, x = plain(), data()
    with clip(model) as clipper, pytest.raises(ValueError, match="saw 5 samples, the batch has 4"):
        clipper.backward(losses_of(model(x))[:4])


def test_bfloat16_and_float32_find_the_rows_of_float64():
    model, x = plain().double(), data(count=70).double()
    expected = clip(copied := copy.deepcopy(model)).backward(losses_of(copied(x))).norms
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 3e-2)):
        other = copy.deepcopy(model).to(dtype)
        norms = clip(other).backward(losses_of(other(x.to(dtype)))).norms
        assert_close(norms.double(), expected, rtol=tolerance, atol=1e-9)


def test_rows_behind_an_index_are_found_with_several_threads():
    def forward(m, x):
        rows, samples = moved(x)
        index = torch.arange(len(rows)).repeat(200)
        found = m.lin(rows)[index].tanh().view(200, len(rows), -1)
        return summed((found * torch.linspace(-1, 2, 200)[:, None, None].to(x)).sum(0), samples, len(x))

    model, x = Net(forward, lin=nn.Linear(16, 64)), data(16, count=50)
    each = gradients_in_batch(wide := copy.deepcopy(model).double(), losses_of(wide(x.double())))
    expected = torch.stack([grads.flatten(1).norm(dim=1) for grads in each.values()]).norm(dim=0)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with clip(model, verify="never") as clipper:
            for _ in range(3):
                assert_close(clipper.backward(losses_of(model(x))).norms.double(), expected, rtol=1e-4)
    finally:
        torch.set_num_threads(threads)


def test_steps_that_need_no_proof_run_one_backward():
    model, calls = lin(), []
    x = data()
    with clip(model, verify="never") as clipper:
        clipper.backward(losses_of(model(x)))
        output = model(x)
        output.register_hook(lambda grad: calls.append(1))
        clipper.backward(losses_of(output))
    assert len(calls) == 1


def test_a_graph_that_needs_a_proof_and_is_kept_needs_none_elsewhere():
    model, x, calls = plain(), data(), []
    other = lin()
    joined = Net(lambda m, x: m.lost(x) if lost else m.other(x), lost=model, other=other)
    with clip(joined, verify="never") as clipper:
        lost = False
        clipper.backward(losses_of(joined(x)))
        lost = True
        _kept = joined(x)
        lost = False
        output = joined(x)
        output.register_hook(lambda grad: calls.append(1))
        clipper.backward(losses_of(output))
    assert len(calls) == 1


# several processes


def in_processes(kind):
    """Processes with 64 and 65 samples, of which one has lost rows."""

    def forward(m, x):
        rows, samples = moved(x) if len(x) == 65 else (x, torch.arange(len(x)))
        return summed(m.last(m.first(rows).tanh()).tanh(), samples, len(x))

    torch.manual_seed(0)
    model, x = Net(forward, first=lin(), last=lin()).double(), data(count=129).double()
    parts = [gradients_in_batch(copied := copy.deepcopy(model), losses_of(copied(part))) for part in x.split([64, 65])]
    each = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    total = torch.stack([grads.flatten(1).norm(dim=1) for grads in each.values()]).norm(dim=0)
    limit = total.median().item()
    factors = (limit / (total + 1e-6)).clamp(max=1)
    own = x.split([64, 65])[dist.get_rank()]
    wrapped = WRAPS[kind](model)
    with clip(wrapped, limit) as clipper:
        for _ in range(3):
            wrapped.zero_grad()
            result = clipper.backward(losses_of(wrapped(own)))
            assert_close(result.norms, total.split([64, 65])[dist.get_rank()])
            for name, param in getattr(wrapped, "module", wrapped).named_parameters():
                grad = param.grad.full_tensor() if hasattr(param.grad, "full_tensor") else param.grad
                assert_close(grad, torch.tensordot(factors, each[name], 1) / 129)
        losses = losses_of(wrapped(own))
        with pytest.raises((ValueError, RuntimeError), match="mixes samples"):
            clipper.backward(losses + (losses.roll(1) if dist.get_rank() else 0))
    return kind


@pytest.mark.parametrize("kind", WRAPS)
def test_processes_of_which_one_has_lost_rows(kind):
    assert ranks.run(in_processes, 2, kind) == [kind] * 2
