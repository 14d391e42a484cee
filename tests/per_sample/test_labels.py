"""Labels of random chains of functions: tensors whose entries are their own samples say whether they are right."""

import random

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from torchzero_clip.per_sample.samples.following import Following
from torchzero_clip.per_sample.samples.labels import LOST, simplest, wider
from torchzero_clip.per_sample.samples.provenance import Provenance

NONE = -1.0  # the value of entries of no sample


def batch(rng, count, *, graph):
    """A tensor with the samples in some dimension, contiguous or not, whose entries are their samples."""
    dims = [rng.choice((1, 2, 3, count)) for _ in range(rng.randint(0, 3))]
    place = rng.randint(0, min(1, len(dims)))
    shape = [*dims[:place], count, *dims[place:]]
    x = torch.arange(float(count)).view(-1, *[1] * (len(shape) - place - 1)).expand(shape).clone()
    if rng.random() < 0.3:  # with gaps, or in another order
        order = rng.sample(range(len(shape)), len(shape))
        wide = x.permute(order).repeat_interleave(2, -1).contiguous()[..., ::2]
        x = wide.permute([order.index(dim) for dim in range(len(shape))])
    return (x.requires_grad_() * 1 if graph else x), place


def some(rng, size, among=None):
    return torch.tensor([rng.randrange(size if among is None else among) for _ in range(size)])


def dim_of(rng, x):
    return rng.randrange(x.ndim)


def cut(rng, size):
    first = rng.randrange(size)
    return slice(first, rng.randint(first + 1, size), rng.choice((None, 1, 2)))


VIEWS = {
    "permute": lambda rng, x: x.permute(rng.sample(range(x.ndim), x.ndim)),
    "transpose": lambda rng, x: x.transpose(dim_of(rng, x), dim_of(rng, x)),
    "flatten": lambda rng, x: x.flatten(*sorted((dim_of(rng, x), dim_of(rng, x)))),
    "reshape": lambda rng, x: x.reshape(-1, rng.choice([n for n in range(1, 7) if x.numel() % n == 0])),
    "unsqueeze": lambda rng, x: x.unsqueeze(dim_of(rng, x)),
    "squeeze": lambda rng, x: x.squeeze(),
    "expand": lambda rng, x: x.expand(rng.randint(1, 3), *x.shape),
    "select": lambda rng, x: x.select(d := dim_of(rng, x), rng.randrange(x.shape[d])),
    "slice": lambda rng, x: x[(slice(None),) * (d := dim_of(rng, x)) + (cut(rng, x.shape[d]),)],
    "narrow": lambda rng, x: x.narrow(d := dim_of(rng, x), 0, rng.randint(1, x.shape[d])),
    "unbind": lambda rng, x: rng.choice(x.unbind(dim_of(rng, x))),
    "split": lambda rng, x: rng.choice(x.split(rng.randint(1, 3), dim_of(rng, x))),
    "chunk": lambda rng, x: rng.choice(x.chunk(rng.randint(1, 3), dim_of(rng, x))),
    "diagonal": lambda rng, x: x.diagonal(0, 0, 1),
    "as_strided": lambda rng, x: x.as_strided(x.shape[1:], x.stride()[1:], x.storage_offset() + x.stride(0)),
    "unfold": lambda rng, x: x.unfold(d := dim_of(rng, x), rng.randint(1, x.shape[d]), rng.randint(1, 2)),
}
COPIES = {
    "clone": lambda rng, x: x.clone(),
    "contiguous": lambda rng, x: x.contiguous(),
    "relu": lambda rng, x: x.clamp(min=-1),
    "the larger": lambda rng, x: torch.fmax(x, x),
    "index": lambda rng, x: x[some(rng, x.shape[0])],
    "index behind": lambda rng, x: x[:, some(rng, x.shape[1])],
    "two indices": lambda rng, x: x[some(rng, 3, x.shape[0]), some(rng, 3, x.shape[1])],
    "two indices apart": lambda rng, x: x[some(rng, 3, x.shape[0]), :, some(rng, 3, x.shape[2])],
    "mask": lambda rng, x: x[torch.tensor([rng.random() < 0.7 for _ in range(x.numel())]).view(x.shape)],
    "mask of rows": lambda rng, x: x[torch.tensor([rng.random() < 0.7 for _ in range(x.shape[0])])],
    "index_select": lambda rng, x: x.index_select(d := dim_of(rng, x), some(rng, x.shape[d])),
    "gather": lambda rng, x: x.gather(d := dim_of(rng, x), some(rng, x.numel(), x.shape[d]).view(x.shape)),
    "take": lambda rng, x: x.take(some(rng, 4, x.numel())),
    "flip": lambda rng, x: x.flip(dim_of(rng, x)),
    "flips": lambda rng, x: x.flip(0, -1),
    "roll": lambda rng, x: x.roll(rng.randint(-2, 2), dim_of(rng, x)),
    "roll of all": lambda rng, x: x.roll(rng.randint(-2, 2)),
    "rot90": lambda rng, x: torch.rot90(x, rng.randint(1, 3)),
    "repeat": lambda rng, x: x.repeat(rng.randint(1, 2), *[1] * x.ndim),
    "tile": lambda rng, x: x.tile(2),
    "repeat_interleave": lambda rng, x: x.repeat_interleave(rng.randint(1, 2), dim_of(rng, x)),
    "repeats of each": lambda rng, x: x.repeat_interleave(some(rng, x.shape[0], 3), 0),
    "cat": lambda rng, x: torch.cat([x, x.flip(0)], dim_of(rng, x)),
    "cat of the same": lambda rng, x: torch.cat((x, x), dim=dim_of(rng, x)),
    "cat with nothing": lambda rng, x: torch.cat([torch.tensor([]), x.narrow(0, 0, 0), x]),
    "cat with none": lambda rng, x: torch.cat([torch.full_like(x, NONE).detach().cpu() + 0, x], dim_of(rng, x)),
    "stack": lambda rng, x: torch.stack([x, x], rng.randint(0, x.ndim)),
    "hstack": lambda rng, x: torch.hstack((x, x)),
    "pad": lambda rng, x: F.pad(x, [rng.randint(0, 2) for _ in range(2 * rng.randint(1, x.ndim))], value=NONE),
    "max": lambda rng, x: x.amax(dim_of(rng, x)),
    "softmax": lambda rng, x: x.cummax(dim_of(rng, x)).values,
    "new": lambda rng, x: x.new_full((len(x) * 2, *x.shape[1:]), NONE).index_copy(0, some(rng, len(x), 2 * len(x)), x),
    "scatter": lambda rng, x: torch.full_like(x, NONE).scatter(
        d := dim_of(rng, x), some(rng, x.numel(), x.shape[d]).view(x.shape), x
    ),
    "index_put": lambda rng, x: x.index_put((some(rng, len(x)),), x.flip(0)),
    "masked_scatter": lambda rng, x: x.masked_scatter(x < rng.randrange(3), x.flip(0)),
    "where": lambda rng, x: torch.where(x < rng.randrange(3), x, x),
    "einsum": lambda rng, x: torch.einsum("i...->...i", x),
    "pixel": lambda rng, x: x.movedim(0, -1),
    "tril": lambda rng, x: nn.functional.dropout(x, 0.0),
}


def written(x, write):
    """A copy that was changed in place."""
    result = x.clone()
    write(result)
    return result


def into(x, write, times=1):
    """What was written into memory of no sample."""
    result = x.new_full((times * len(x), *x.shape[1:]), NONE)
    write(result)
    return result


def set_(result, index, value):
    result[index] = value


CHANGES = {
    "add_": lambda rng, x: written(x, lambda y: y.mul_(1.0)),
    "halves": lambda rng, x: into(x, lambda y: (set_(y, slice(len(x)), x), set_(y, slice(len(x), None), x * 1)), 2),
    "half": lambda rng, x: into(x, lambda y: set_(y, slice(len(x)), x), 2),
    "in turn": lambda rng, x: into(x, lambda y: (set_(y, slice(0, None, 2), x), set_(y, slice(1, None, 2), x)), 2),
    "positions": lambda rng, x: into(
        x, lambda y: [set_(y, (slice(None), i), x[:, x.shape[1] - 1 - i]) for i in range(x.shape[1])]
    ),
    "rows in another order": lambda rng, x: into(x, lambda y: [y[i].copy_(x[-1 - i]) for i in range(len(x))]),
    "by a view": lambda rng, x: written(x, lambda y: y.transpose(0, -1).narrow(0, 0, 1).copy_(x.transpose(0, -1)[-1:])),
    "by a flat view": lambda rng, x: written(x, lambda y: y.view(-1)[: len(x)].copy_(x.flip(0).reshape(-1)[: len(x)])),
    "set at an index": lambda rng, x: written(x, lambda y: set_(y, some(rng, len(x)), x.flip(0))),
    "set at a mask": lambda rng, x: written(x, lambda y: set_(y, x < 1, x.flip(0)[x < 1])),
    "swap": lambda rng, x: written(x, lambda y: (set_(y, 0, x[-1]), set_(y, -1, x[0]))),
    "index_copy_": lambda rng, x: into(x, lambda y: y.index_copy_(0, torch.randperm(len(x)), x)),
    "fill_": lambda rng, x: written(x, lambda y: y[:, :1].clamp_(min=-1)),
    "t_": lambda rng, x: written(x.squeeze(), lambda y: y.transpose_(0, -1)),
    "unseen": lambda rng, x: written(x.detach(), turn_unseen),
    "a later view": lambda rng, x: view_and_write(x),
}


def turn_unseen(y):
    with torch._C.DisableTorchFunction():
        y.copy_(y.flip(0))


def view_and_write(x):
    y = x.clone()
    view = y.transpose(0, -1)
    y[0] = x[-1]
    return view


FUNCTIONS = VIEWS | COPIES | CHANGES


def chain(seed):
    """Compare the labels with the entries after each of some random functions. Returns how many were told, and lost."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    count = rng.choice((2, 3, 4))
    x, place = batch(rng, count, graph=rng.random() < 0.5)
    provenance = Provenance(count, place, [], {})
    with Following(provenance):
        rows = torch.arange(count).view(-1, *[1] * (x.ndim - place - 1))[(None,) * place]
        provenance.note(x, simplest(rows, x.shape, count))
        told = lost = 0
        names = []
        for _ in range(rng.randint(1, 6)):
            name = rng.choice([*FUNCTIONS])
            names.append(name)
            try:
                y = FUNCTIONS[name](rng, x)
            except (RuntimeError, IndexError, ValueError, TypeError):  # it is not for this shape
                continue
            if not y.ndim or y.numel() > 3000:
                continue
            with torch._C.DisableTorchFunction():
                labels = provenance.of(y)
                values = y.detach()
                if labels is LOST:
                    lost += 1
                    break
                expected = values.long()
                labels = wider(labels, y.shape, count).expand(y.shape)
                wrong = (labels != expected) & (expected >= 0)
                assert not wrong.any(), (seed, names, tuple(y.shape), labels, expected)
                told += 1
            x = y
    return told, lost


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("first", range(0, 800, 200))
def test_labels_of_random_chains_are_the_samples_of_the_entries_or_lost(first):
    told, lost = zip(*(chain(seed) for seed in range(first, first + 200)), strict=True)
    assert sum(lost) < sum(told) / 8


ADDITIONS = {
    "index_add": lambda rng, z, index, x: z.index_add(0, index, x),
    "times a number": lambda rng, z, index, x: z.index_add(0, index, x, alpha=rng.choice((0.5, 2, -1))),
    "in place": lambda rng, z, index, x: z.index_add_(0, index, x),
    "scatter_add": lambda rng, z, index, x: z.scatter_add(0, index[:, None].expand_as(x), x),
    "reduce": lambda rng, z, index, x: z.scatter_reduce(0, index[:, None].expand_as(x), x, "sum"),
    "accumulate": lambda rng, z, index, x: z.index_put((index,), x, accumulate=True),
    "one for all": lambda rng, z, index, x: z.index_put((index,), x[:1], accumulate=True),
}


def addition(name, seed):
    """Compare the labels of sums of rows with their samples. Return False if the labels are lost."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    count, rows, size = rng.choice((2, 3, 7)), rng.randint(1, 9), rng.randint(1, 7)
    of, before = torch.randint(count, (rows,)), torch.randint(-1, count, (size,))
    index = rng.choice((torch.randint(size, (rows,)), of % size))
    if rng.random() < 0.5:
        before[:] = LOST  # none of these rows has a sample
    x, z = torch.ones(rows, 2), torch.ones(size, 2)
    provenance = Provenance(count, 0, [], {})
    for tensor, labels in ((x, of), (z, before)):
        if bool((labels >= 0).any()):
            provenance.note(tensor, labels[:, None])
    with Following(provenance):
        result = ADDITIONS[name](rng, z, index, x)
    labels = provenance.of(result)
    of = of[:1].expand(rows) if name == "one for all" else of
    pairs = [(row, sample) for row, sample in enumerate(before.tolist()) if sample >= 0]
    pairs += [*zip(index.tolist(), of.tolist(), strict=True)]
    samples = {row: {sample for other, sample in pairs if other == row} for row, _ in pairs}
    if labels is LOST:
        assert any(len(found) > 1 for found in samples.values())
        return False
    labels = wider(labels, result.shape, count).expand(result.shape)
    for row, found in samples.items():
        assert {*labels[row].tolist()} == found
    return True


@pytest.mark.parametrize("name", ADDITIONS)
def test_labels_of_sums_of_rows_are_right_or_lost_where_different_samples_are_added_up(name):
    told = [addition(name, seed) for seed in range(100)]
    assert any(told)
    assert not all(told)


def test_labels_that_an_index_decides_are_not_those_of_the_call_before():
    x, provenance = torch.arange(2.0), Provenance(2, 0, [], {})
    with Following(provenance):
        provenance.note(x, 1)
        for index in ([0, 1], [1, 0]):
            y = x.gather(0, torch.tensor(index))
            assert wider(provenance.of(y), y.shape, 2).tolist() == index


def test_an_item_at_an_index_of_true_is_put_not_added():
    x, y = torch.arange(3.0).view(3, 1).expand(3, 2).clone(), torch.zeros(3, 2)
    provenance = Provenance(3, 0, [x], {})
    with Following(provenance):
        y[True] = x.flip(0)
    assert wider(provenance.of(y), y.shape, 3).flatten().tolist() == [2, 1, 0]


def test_a_change_through_a_view_of_another_dtype_is_lost():
    x = torch.arange(3.0).view(3, 1, 1).expand(3, 2, 2).clone()
    provenance = Provenance(3, 0, [x], {})
    with Following(provenance):
        z = torch.view_as_complex(x)
        z[0] = z[2]
    assert provenance.of(x) is provenance.of(z) is LOST


def test_a_sum_has_the_samples_of_each_part_that_has_some():
    rows, provenance = torch.randn(3, 2), Provenance(2, 0, [], {})
    with Following(provenance):
        provenance.note(rows, torch.tensor([[1], [0], [1]]))
        before, after = torch.cat([torch.zeros(3, 2), rows]), torch.cat([rows, torch.zeros(3, 2)])
        both = before + after
        assert wider(provenance.of(both), both.shape, 2).flatten().tolist() == [1, 0, 1, 1, 0, 1]
        # each part agrees with zeros, but two parts name different samples
        clash = torch.addcmul(before, after, torch.cat([rows.flip(0)[[1, 0, 2]], torch.zeros(3, 2)]))
        assert provenance.of(clash) is LOST


@pytest.mark.parametrize("function", [torch.quantile, torch.nanquantile])
def test_the_samples_of_several_quantiles_are_lost(function):
    x, provenance = torch.randn(3, 2, 2), Provenance(2, 1, [], {})
    with Following(provenance):
        provenance.note(x, 2)  # the samples are in dimension 1
        y = function(x, torch.tensor([0.2, 0.8]), dim=0, keepdim=True)
        one = function(x, 0.5, dim=2)
    assert provenance.of(y) is LOST
    assert provenance.of(one) == 1


def test_products_whose_right_factor_is_called_sum_over_its_rows():
    x, provenance = torch.randn(3, 3), Provenance(3, 0, [], {})
    with Following(provenance):
        provenance.note(x, 3)
        y = x.__rmatmul__(torch.randn(3, 3))
    assert provenance.of(y) is LOST


def test_labels_of_tensors_without_elements():
    x, weight, provenance = torch.randn(0, 3, 4), torch.randn(2, 4), Provenance(3, 1, [], {})
    with Following(provenance):
        provenance.note(x, torch.tensor([[[0], [1], [1]]]))
        assert torch.nn.functional.linear(x, weight).shape == (0, 3, 2)


def test_a_mask_of_samples_that_broadcasts_selects_lost_entries():
    table, mask, provenance = torch.randn(3, 3), torch.tensor([True, False, True]), Provenance(3, 0, [], {})
    with Following(provenance):
        provenance.note(mask, 1)
        assert provenance.of(torch.masked_select(table, mask)) is LOST
        assert wider(provenance.of(table[mask]), (2, 3), 3).flatten().tolist() == [0, 2]
