"""Rows of several samples in random shapes, where there are often as many rows as samples by chance."""

import copy
import random

import pytest
import torch
from per_sample.harness import (
    Net,
    assert_close,
    by_backward,
    by_classic_form,
    clip,
    losses_of,
    norms_in_batch,
)
from torch import nn
from torch.nn import functional as F

from torchzero_clip import ConstantFlatClipper, PerSampleGradientClipper

W = 4


def lin():
    return nn.Linear(W, W)


def pool(x, mask, rows):
    return torch.zeros(len(x), W, dtype=x.dtype).index_add(0, mask.nonzero()[:, 0], rows)


def moe_list(m, ids, x, mask):
    h = m.a(x).flatten(0, 1)
    logits = m.router(h)
    k = logits.topk(min(2, 3), -1)
    w = k.values.softmax(-1)
    out = torch.zeros_like(h)
    for e, ex in enumerate(m.experts):
        tok, slot = (k.indices == e).nonzero(as_tuple=True)
        if len(tok):
            out.index_add_(0, tok, ex(h[tok]) * w[tok, slot][:, None])
    return m.head((h + out).view(x.shape)).sum(1)


def moe_data(m, ids, x, mask):
    h = x.flatten(0, 1)
    k = m.router(h).argmax(-1)
    out = torch.zeros_like(h)
    for e, ex in enumerate(m.experts):
        out = out.index_put(((k == e),), ex(h[k == e]))
    return m.head(out.view(x.shape)).sum(1)


def moe_sort(m, ids, x, mask):
    h = m.a(x).flatten(0, 1)
    k = m.router(h).argmax(-1)
    o = k.argsort(stable=True)
    parts = h[o].split(torch.bincount(k, minlength=3).tolist())
    y = torch.cat([ex(p) for ex, p in zip(m.experts, parts, strict=True)])
    return m.head(y[o.argsort()].view(x.shape)).sum(1)


def moe_cap(m, ids, x, mask):
    h = m.a(x).flatten(0, 1)
    k = m.router(h).argmax(-1)
    experts, places = 3, len(h)
    buf = torch.zeros(experts, places, W, dtype=h.dtype)
    pos = (F.one_hot(k, experts).cumsum(0) - 1).gather(1, k[:, None])[:, 0]
    buf = buf.index_put((k, pos), h)
    y = torch.stack([F.gelu(buf[e] @ m.a.weight.detach()) for e in range(experts)])[k, pos]
    return m.head(y.view(x.shape)).sum(1)


MODELS = {
    "emb_mask": lambda m, ids, x, mask: m.head(pool(x, mask, m.emb(ids[mask]))),
    "emb_index": lambda m, ids, x, mask: m.head(pool(x, mask, m.emb(ids[mask.nonzero(as_tuple=True)]))),
    "lin_mask": lambda m, ids, x, mask: m.head(pool(x, mask, m.a(x[mask]))),
    "lin_mask_graph": lambda m, ids, x, mask: m.head(pool(x, mask, m.experts[0](m.a(x)[mask]).tanh())),
    "norm_mask": lambda m, ids, x, mask: m.head(pool(x, mask, m.norm(m.a(x)[mask]))),
    "flat": lambda m, ids, x, mask: m.head(m.norm(m.a(x.flatten(0, 1))).tanh().unflatten(0, x.shape[:2])).sum(1),
    "flat_t": lambda m, ids, x, mask: (
        m.head(m.a(x).transpose(0, 1).reshape(-1, W)).view(x.shape[1], x.shape[0], W).sum(0)
    ),
    "turned": lambda m, ids, x, mask: m.head(m.a(x.transpose(0, 1)).tanh()).transpose(0, 1).sum(1),
    "windows": lambda m, ids, x, mask: (
        m.head(m.a(F.pad(x, (0, 0, 0, x.shape[1] % 2)).unflatten(1, (-1, 2)).flatten(0, 1)).tanh().mean(1))
        .view(len(x), -1, W)
        .sum(1)
    ),
    "unfold": lambda m, ids, x, mask: (
        m.head(m.a(x.unfold(1, 2, 1).transpose(2, 3).reshape(-1, 2, W))).tanh().mean(1).view(len(x), -1, W).sum(1)
    ),
    "select": lambda m, ids, x, mask: torch.stack([m.head(m.a(x[:, t])) for t in range(x.shape[1])]).sum(0),
    "each": lambda m, ids, x, mask: torch.stack([m.head(m.a(x[i])).sum(0) for i in range(len(x))]),
    "sort": lambda m, ids, x, mask: (lambda o: m.head(m.a(x[o]).tanh())[o.argsort()].sum(1))(x.sum((1, 2)).argsort()),
    "flip": lambda m, ids, x, mask: m.head(m.a(x).flip(0)).flip(0).sum(1),
    "roll": lambda m, ids, x, mask: m.head(m.a(x).roll(1, 0)).roll(-1, 0).sum(1),
    "positions": lambda m, ids, x, mask: m.head(m.a(x) + m.emb(2 * torch.arange(x.shape[1]))).sum(1),
    "cat": lambda m, ids, x, mask: m.head(torch.cat([m.a(x), m.emb(ids)])).tanh().view(2, *x.shape).sum((0, 2)),
    "gru": lambda m, ids, x, mask: m.head(pool(x, mask, m.gru(m.a(x)[mask][:, None])[0][:, 0])),
    "moe_list": moe_list,
    "moe_data": moe_data,
    "moe_sort": moe_sort,
    "moe_cap": moe_cap,
}


def make(fn):
    return Net(
        fn,
        emb=nn.Embedding(40, W),
        a=lin(),
        router=nn.Linear(W, 3),
        experts=nn.ModuleList(nn.Sequential(lin(), nn.Tanh()) for _ in range(3)),
        norm=nn.LayerNorm(W),
        gru=nn.GRU(W, W, batch_first=True),
        head=lin(),
    ).double()


def batch():
    count, length = random.randint(2, 8), random.randint(2, 8)
    chosen = count if random.random() < 0.5 else random.randint(1, count * length)
    mask = torch.zeros(count * length, dtype=torch.bool)
    mask[torch.randperm(count * length)[:chosen]] = True
    x = torch.randn(count, length, W, dtype=torch.float64)
    return torch.randint(0, 8, (count, length)), x, mask.view(count, length)


def assert_never_wrong(name, seeds):
    for seed in seeds:
        torch.manual_seed(seed)
        random.seed(seed)
        model = make(MODELS[name])
        unchecked, classic = by_backward(copy.deepcopy(model), verify="never"), by_classic_form(copy.deepcopy(model))
        for _ in range(3):
            data = batch()
            expected = norms_in_batch(model, *data)
            for step in (unchecked, classic):
                assert_close(step(lambda m, data=data: losses_of(m(*data)))[0], expected)


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("name", MODELS)
def test_norms_are_right_also_where_there_are_as_many_rows_as_samples(name):
    assert_never_wrong(name, range(3))


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_norms_are_right_in_many_shapes(name):
    assert_never_wrong(name, range(3, 6))


def network():
    return Net(lambda m, x: m.head(m.lin(x).tanh()), lin=nn.Linear(W, W), head=nn.Linear(W, 2)).double()


def pooled(output, owners, count):
    return losses_of(torch.zeros(count, 2, dtype=output.dtype).index_add(0, owners, output))


@pytest.mark.parametrize("owners", [[0, 0, 1, 2, 2, 2], [2, 0, 2, 1, 0, 1], [1, 1], [0, 1, 2]], ids=str)
def test_rows_may_be_named(owners):
    model, owners = network(), torch.tensor(owners)
    x = torch.randn(len(owners), W, dtype=torch.float64)
    expected = norms_in_batch(model, x, losses=lambda output: pooled(output, owners, 3))
    with clip(model, verify="never") as clipper:
        with clipper.rows(owners, batch_size=3):
            output = model(x)
        assert_close(clipper.backward(pooled(output, owners, 3)).norms, expected)


@pytest.mark.parametrize(
    ("owners", "error", "message"),
    [
        ([torch.tensor([1, 0, 2])], ValueError, "as many rows as there are samples, 3, in another order"),
        ([torch.tensor([0, 3])], ValueError, "numbers from 0 to 2"),
        ([torch.tensor([0, 1]), torch.tensor([1, 1])], ValueError, "two vectors of 2 rows"),
        ([torch.tensor([0.0, 1.0])], TypeError, "integers"),
        ([[0, 1]], TypeError, "samples must be"),
    ],
)
def test_names_of_rows_are_checked(owners, error, message):
    with clip(network()) as clipper, pytest.raises(error, match=message), clipper.rows(*owners, batch_size=3):
        pass


def test_blocks_of_named_rows_may_not_be_nested():
    refused = pytest.raises(RuntimeError, match=r"a block of rows\(\) is open")
    with clip(network()) as clipper, clipper.rows(torch.tensor([0, 0]), batch_size=1), refused:
        clipper.rows(torch.tensor([0]), batch_size=1).__enter__()


def _swapped(h):
    result = h.clone()
    result[0], result[1] = h[1], h[0]
    return result


PERM = torch.tensor([1, 2, 0])
SHORT = torch.tensor([[0, 2]] * 12)  # for fewer rows than 15
MOVED = {  # moves of samples that keep their number
    "index_copy": lambda h: h.index_copy(0, PERM, h),
    "scatter": lambda h: h.scatter(0, PERM[:, None].expand_as(h), h),
    "rot90": lambda h: torch.rot90(h[:, :3], 2),
    "one-hot": lambda h: F.one_hot(PERM, 3).to(h.dtype) @ h,
    "einsum": lambda h: torch.einsum("ij,jd->id", F.one_hot(PERM, 3).to(h.dtype), h),
    "swapped slices": _swapped,
    "where": lambda h: torch.where(torch.tensor([[True], [False], [True]]), h, h[PERM]),
    "sum": lambda h: h + h[PERM],
    "flipud": torch.flipud,
    "sort": lambda h: h.sort(0).values,
    "topk": lambda h: h.topk(3, 0).values,
}
WRITTEN = {  # data that are written into a tensor like them
    "index_copy": lambda x: x.new_zeros(x.shape).index_copy(0, PERM, x),
    "index_add": lambda x: torch.zeros_like(x).index_add(0, PERM, x),
    "scatter_": lambda x: torch.zeros_like(x).scatter_(0, PERM[:, None].expand_as(x), x),
    "index_put_": lambda x: torch.zeros_like(x).index_put_((PERM,), x),
    "copy_": lambda x: torch.empty_like(x).copy_(x[PERM]),
    "add_": lambda x: torch.zeros_like(x).add_(x[PERM]),
    "out": lambda x: torch.index_select(x, 0, PERM, out=torch.empty_like(x)),
    "flipud": torch.flipud,
    "sum": lambda x: x + x[PERM],
    "complex": lambda x: torch.view_as_complex(x.view(3, -1, 2)).abs().sum(1, keepdim=True).expand(3, 6),
}


class Moves(nn.Module):
    def __init__(self, of_data, move):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6 if move is not MOVED["rot90"] else 3, 2)
        self.of_data, self.move = of_data, move

    def forward(self, x):
        return self.second(self.move(x) if self.of_data else self.move(self.first(x)))


@pytest.mark.parametrize("classic", [False, True], ids=["backward", "classic"])
@pytest.mark.parametrize(
    ("of_data", "move"),
    [(False, move) for move in MOVED.values()] + [(True, move) for move in WRITTEN.values()],
    ids=[f"of the graph: {name}" for name in MOVED] + [f"of data: {name}" for name in WRITTEN],
)
def test_moved_samples_are_found_or_refused(of_data, move, classic):
    """Norms are those of one backward for each loss, which a layer behind the move must give to the right sample."""
    torch.manual_seed(0)
    model, x = Moves(of_data, move).double(), torch.randn(3, 6, dtype=torch.float64)
    weight = model.second.weight
    outputs = model(x).square().sum(1)
    expected = [torch.autograd.grad(loss, weight, retain_graph=True)[0].norm() for loss in outputs]
    with PerSampleGradientClipper(model, ConstantFlatClipper(1.0), loss_reduction="sum", verify="never") as clipper:
        losses = model(x).square().sum(1)
        try:
            if classic:
                losses.sum().backward()
            result = clipper.clip_and_accumulate() if classic else clipper.backward(losses)
        except RuntimeError as error:
            assert "mixes samples" in str(error)  # noqa: PT017
            assert not of_data
            return
        norms = result.param_norms["second.weight"]
        assert torch.allclose(norms, torch.stack(expected), rtol=1e-8)


@pytest.mark.parametrize("take", [lambda rows: rows[:, :2], lambda rows: rows.gather(1, SHORT)])
def test_parts_of_rows_in_the_graph(take):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Flatten(0, 1), Taken(take), nn.Linear(2, 2)).double()
    x = torch.randn(3, 5, 4, dtype=torch.float64)

    def losses_of_samples():
        each = model(x).square().sum(1)
        return F.pad(each, (0, 15 - len(each))).view(3, 5).sum(1)

    losses = losses_of_samples()
    expected = [torch.autograd.grad(loss, model[3].weight, retain_graph=True)[0].norm() for loss in losses]
    with PerSampleGradientClipper(model, ConstantFlatClipper(1.0), loss_reduction="sum", verify="never") as clipper:
        result = clipper.backward(losses_of_samples())
    assert torch.allclose(result.param_norms["3.weight"], torch.stack(expected), rtol=1e-8)


class Taken(nn.Module):
    def __init__(self, take):
        super().__init__()
        self.take = take

    def forward(self, rows):
        return self.take(rows)
