"""Samples that are not in the first dimension of what a layer gets, or not in arguments: followed, or refused."""

import copy
import dataclasses
from collections.abc import Callable

import pytest
import torch
from per_sample.harness import Net, assert_close, by_backward, by_classic_form, losses_of, norms_in_batch, weight
from torch import nn
from torch.nn import functional as F

from torchzero_clip.per_sample.arguments import tensors_held

W = 4
FORMS = {"unchecked": lambda model: by_backward(model, verify="never"), "classic": by_classic_form}
FIRST, SECOND = torch.arange(3), torch.tensor([1, 0, 2])
MASK = torch.tensor([[True, True, False], [False, False, False], [False, True, False]])
COUNTS = torch.tensor([2, 0, 1])


def words():
    return torch.randint(0, 9, (3, 4))


def data(*shape):
    return torch.randn(shape or (3, 3, W), dtype=torch.float64)


def bag():
    return nn.EmbeddingBag(9, W, mode="sum")


def lin(width=W):
    return nn.Linear(width, W)


def two_bags_of_one_sample(m, ids):
    rows = m.bag(ids[[0, 2]].flatten()[:6], torch.tensor([0, 2, 4]))
    return torch.zeros(3, W, dtype=rows.dtype).index_add(0, torch.tensor([0, 0, 2]), rows)


def empty_bag(m, ids):
    return m.bag(ids.flatten(), torch.tensor([0, 0, 4, 8]))[1:]


def pairs_written(m, x):
    out = x.new_zeros(3, 3, W, 3)
    out[:, FIRST, :, SECOND] = m.first(x).transpose(0, 1)
    return m.last(out).sum((1, 2))


def owners(rows):
    """The rows of each sample, of the two, none and one that they have."""
    return torch.zeros(3, W, dtype=rows.dtype).index_add(0, MASK.nonzero()[:, 0], rows)


RIGHT = {
    "bags of samples in another order": lambda: (
        Net(lambda m, ids: m.bag(ids.flip(0).flatten(), torch.arange(0, 12, 4)).flip(0), bag=bag()),
        words(),
    ),
    "several bags of a sample": lambda: (Net(two_bags_of_one_sample, bag=bag()), words()),
    "more bags than samples": lambda: (
        Net(lambda m, ids: m.bag(ids.flatten(), torch.arange(0, 12, 2)).view(3, 2, W).sum(1), bag=bag()),
        words(),
    ),
    "two indices apart": lambda: (
        Net(lambda m, x: m.last(m.first(x)[:, FIRST, :, SECOND]).transpose(0, 1), first=lin(), last=lin(3)),
        data(3, 5, 3, W),
    ),
    "two indices apart, written": lambda: (Net(pairs_written, first=lin(), last=lin(3)), data()),
    "a constant at a mask of data": lambda: (
        Net(
            lambda m, x, mask: m.lin(x).sum(1) + owners(m.words(torch.arange(3).expand(3, 3)[mask])),
            lin=lin(),
            words=nn.Embedding(9, W),
        ),
        data(),
        MASK,
    ),
    "a constant selected by a mask of data": lambda: (
        Net(
            lambda m, x, mask: m.lin(x).sum(1) + owners(m.words(torch.arange(3).expand(3, 3).masked_select(mask))),
            lin=lin(),
            words=nn.Embedding(9, W),
        ),
        data(),
        MASK,
    ),
    "a table at two indices": lambda: (
        Net(lambda m, i, j: m.lin(m.table[i, j]), lin=lin(), table=data(9, 9, W)),
        torch.randint(0, 9, (3,)),
        torch.randint(0, 9, (3,)),
    ),
    "padding": lambda: (
        Net(lambda m, x: m.lin(F.pad(m.first(x), (0, 0, 1, 1))).sum(1), first=lin(), lin=lin()),
        data(),
    ),
    "padded and cut": lambda: (
        Net(
            lambda m, x: m.last(F.pad(m.first(x), (0, 0, 0, 0, 1, 0))[1:].flip(0)).flip(0).sum(1),
            first=lin(),
            last=lin(),
        ),
        data(),
    ),
    "a reduction before the samples": lambda: (
        Net(lambda m, x: m.lin(x[None].expand(2, -1, -1, -1).logsumexp(0)).sum(1), lin=lin()),
        data(),
    ),
    "a roll of all elements": lambda: (
        Net(lambda m, x: m.last(m.first(x).roll(3 * W)).roll(-3 * W).sum(1), first=lin(), last=lin()),
        data(),
    ),
    "a parameter times a table of one row": lambda: (
        Net(lambda m, x: m.lin(x) + m.slope * torch.arange(3.0).double()[None, :, None], lin=lin(), slope=weight(W)),
        data(),
    ),
    "a row of ones for a module by the generic rule": lambda: (
        Net(lambda m, x: m.lin(x) + m.other(torch.ones(1, *x.shape[1:], dtype=x.dtype)), lin=lin(), other=cumulated()),
        data(),
    ),
    "zeros for each sample": lambda: (
        Net(lambda m, x: m.lin(x) + m.other(torch.zeros(x.shape, dtype=x.dtype)), lin=lin(), other=lin()),
        data(),
    ),
    "zeros expanded to the batch": lambda: (
        Net(lambda m, x: m.lin(x).sum(1) + m.other(torch.zeros(1, W).to(x).expand(3, -1)), lin=lin(), other=lin()),
        data(),
    ),
}


def cumulated():
    return Net(lambda m, x: x * m.weight.outer(m.weight).sum(0)[None].cumsum(1), weight=weight(W))


def moved(move: Callable):
    return lambda: (Net(lambda m, x: m.lin(move(x)), lin=lin()), data())


UNKNOWN = {
    "an empty bag": lambda: (Net(empty_bag, bag=bag()), words()),
    "a bag with words of two samples": lambda: (
        Net(lambda m, ids: m.bag(ids.flatten(), torch.tensor([0, 5, 8])), bag=bag()),
        words(),
    ),
    "tables": lambda: (
        Net(lambda m, ids: m.lin(m.tables[:, ids]).transpose(0, 1), lin=lin(), tables=data(3, 9, W)),
        torch.randint(0, 9, (3,)),
    ),
    "index_select of tables": lambda: (
        Net(lambda m, ids: m.lin(m.tables.index_select(1, ids)).transpose(0, 1), lin=lin(), tables=data(3, 9, W)),
        torch.randint(0, 9, (3,)),
    ),
    "constants repeated as data say": lambda: (
        Net(
            lambda m, x, counts: m.lin(x).sum(1) + owners(m.other(m.table.repeat_interleave(counts, 0))),
            lin=lin(),
            other=lin(),
            table=data(3, W),
        ),
        data(),
        COUNTS,
    ),
    "ones for positions": lambda: (
        Net(lambda m, x: m.lin(x) + m.other(torch.ones(x.shape[1:], dtype=x.dtype)), lin=lin(), other=lin()),
        data(),
    ),
    "a parameter times a table": lambda: (
        Net(lambda m, x: m.lin(x) + m.slope * torch.arange(3.0).double()[:, None], lin=lin(), slope=weight(W)),
        data(),
    ),
    "ones for a module by the generic rule": lambda: (
        Net(lambda m, x: m.lin(x) + m.other(torch.ones(x.shape[1:], dtype=x.dtype)), lin=lin(), other=cumulated()),
        data(),
    ),
    "padding before the first sample": moved(lambda x: F.pad(x, (0, 0, 0, 0, 1, -1))),
    "one sample scattered": moved(lambda x: torch.zeros_like(x).select_scatter(x[0], 0, 2)),
    "a sample scattered into zeros": moved(lambda x: x.new_zeros(x.shape).select_scatter(x[2], 0, 2)),
    "samples scattered": moved(lambda x: torch.zeros_like(x).slice_scatter(x[:1], 0, 2, 3)),
    "a reduction along samples": lambda: (
        Net(lambda m, x: m.lin(x.transpose(0, 1)[None].expand(3, -1, -1, -1).logsumexp(2)).sum(1), lin=lin()),
        data(),
    ),
    "the smallest of all samples": lambda: (
        Net(
            lambda m, x: m.last(m.first(x).kthvalue(2, 0, keepdim=True).values.expand(3, 3, W)), first=lin(), last=lin()
        ),
        data(),
    ),
    "a permutation behind a dimension": lambda: (
        Net(lambda m, x: m.lin(torch.eye(3).to(x)[SECOND] @ x.transpose(0, 1)).transpose(0, 1), lin=lin()),
        data(),
    ),
    "outer products": lambda: (
        Net(lambda m, x: m.lin(torch.outer(torch.ones(3).to(x), x)).transpose(0, 1), lin=lin(3)),
        data(3),
    ),
    "distances": lambda: (
        Net(lambda m, x: m.last(torch.cdist(m.points, m.first(x))).T, first=lin(), last=lin(3), points=data(3, W)),
        data(3, W),
    ),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", RIGHT)
def test_norms_are_those_of_one_backward_for_each_sample(name, form):
    model, *inputs = RIGHT[name]()
    model = model.double()
    expected = norms_in_batch(model, *inputs)
    assert_close(FORMS[form](model)(lambda m: losses_of(m(*inputs)))[0], expected)


AS_ONE_ROW = r"all samples share the rows.*give them a first dimension of size 1: x\[None\]"
REFUSED = {
    "a parameter times a table": AS_ONE_ROW,  # with as many rows as samples, as the next ones
    "ones for a module by the generic rule": AS_ONE_ROW,
    "ones for positions": AS_ONE_ROW,
    "the smallest of all samples": "mixes samples",
    "strides": "mixes samples",
    "outer products": "saw 3 samples, the batch has 4|must match",
    "distances": "saw 3 samples, the batch has 4|mixes samples",
}
"""What a probe refuses too."""


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", UNKNOWN)
def test_samples_are_found_or_refused(name, form):
    model, *inputs = UNKNOWN[name]()
    step, expected = FORMS[form](model.double()), norms_in_batch(model, *inputs)
    if name == "outer products" and form == "classic":
        pytest.skip("no dimension of the output is that of the arguments")
    refused = REFUSED.get(name)
    if refused is None:
        assert_close(step(lambda m: losses_of(m(*inputs)))[0], expected)
        return
    with pytest.raises((ValueError, RuntimeError), match=refused):
        step(lambda m: losses_of(m(*inputs)))
    assert all(param.grad is None for param in model.parameters())


def branches(m, x, kinds):
    """The layer gets the data of each kind by themselves, such as those of one sample."""
    result = torch.zeros_like(x)
    for kind in (0, 1):
        result = result.index_put((kinds == kind,), m.other(2 * x[kinds == kind]))
    return m.lin(result)


def row_added(row):
    return lambda m, x, kinds: (m.lin(x) + m.other(row.clone())).tanh()


ONE_ROW = {
    "floats that all samples share": lambda: (row_added(data(1, 3, W)), lin(), (3, W)),
    "an image that all samples share": lambda: (row_added(data(1, 2, 5, W)), nn.Conv2d(2, 2, 3, padding=1), (2, 5, W)),
    "words that all samples share": lambda: (row_added(torch.tensor([[2, 0, 2]])), nn.Embedding(9, W), (3, W)),
    "data of one sample": lambda: (branches, nn.Sequential(lin(), nn.Tanh()), (3, W)),
    "data of one position": lambda: (
        lambda m, x, kinds: branches(m, x.flatten(0, 1), torch.arange(3 * len(x)) == 4).view(x.shape),
        nn.Sequential(lin(), nn.Tanh()),
        (3, W),
    ),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ONE_ROW)
def test_a_row_is_of_one_sample_or_of_all(name, form):
    forward, other, shape = ONE_ROW[name]()
    model = Net(forward, lin=lin(), other=other).double()
    step = FORMS[form](model)
    for count in (4, 4, 3, 5, 1, 4):
        inputs = data(count, *shape), (torch.arange(count) == 1).long()
        expected = norms_in_batch(model, *inputs)
        assert_close(step(lambda m, inputs=inputs: losses_of(m(*inputs)))[0], expected)


def of_two_outputs(outputs):
    return losses_of(outputs[0]) + 3 * losses_of(outputs[1])


def two_outputs(m, x):
    row = m.other(m.table.clone())
    return (m.lin(x) + row).tanh(), (m.lin(x) * row).sin()


def hooked_output(m, x):
    output = (m.lin(x) + m.other(m.table.clone())).tanh()
    if output.requires_grad:
        output.register_hook(lambda grad: 3 * grad)
    return output


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", [(1, 5, W), (5, W)], ids=str)
@pytest.mark.parametrize(("forward", "losses"), [(two_outputs, of_two_outputs), (hooked_output, losses_of)])
def test_samples_give_to_what_they_share_all_that_comes_through_outputs(forward, losses, shape, form):
    model = Net(forward, lin=lin(), other=lin(), table=data(*shape)).double()
    step = FORMS[form](model)
    for count in (4, 4, 3):
        x = data(count, 5, W)
        expected = norms_in_batch(model, x, losses=losses)
        assert_close(step(lambda m, x=x: losses(m(x)))[0], expected)


def test_bags_whose_offsets_are_arguments_may_have_words_of_any_number():
    model, index = nn.Sequential(bag()).double()[0], torch.randint(0, 9, (3,))
    offsets = torch.tensor([0, 0, 2])  # as many words as bags
    expected = norms_in_batch(model, index, offsets)
    assert_close(by_backward(model, verify="never")(lambda m: losses_of(m(index, offsets)))[0], expected)


@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    mask: torch.Tensor


class WithSlots:
    __slots__ = ("inner",)

    def __init__(self, inner):
        self.inner = inner


BATCHES = {
    "a dataclass": lambda: Batch(data(), MASK),
    "an object in a list": lambda: [Batch(data(), MASK)],
    "an object in an object": lambda: WithSlots({"batch": Batch(data(), MASK)}),
}
USES = {
    "another order": lambda m, batch: m.lin(batch.x.flip(0)).flip(0).sum(1),
    "positions first": lambda m, batch: m.lin(batch.x.transpose(0, 1)).tanh().sum(0),
    "a mask": lambda m, batch: owners(m.lin(batch.x[batch.mask])),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("kind", BATCHES)
def test_tensors_in_objects_are_arguments(kind, use):
    held = BATCHES[kind]()

    def forward(m, held):
        inner = held.inner["batch"] if isinstance(held, WithSlots) else held
        return USES[use](m, inner[0] if isinstance(inner, list) else inner)

    model = Net(forward, lin=lin()).double()
    expected = norms_in_batch(model, held)
    assert_close(by_backward(copy.deepcopy(model), verify="never")(lambda m: losses_of(m(held)))[0], expected)


def test_tensors_in_objects_beside_others_do_not_change_the_number_of_samples():
    held = Batch(data(7, W), MASK)
    model = Net(lambda m, x, held: m.lin(x).sum(1) + owners(m.lin(x[held.mask])), lin=lin()).double()
    x = data()
    expected = norms_in_batch(model, x, held)
    assert_close(by_backward(model, verify="never")(lambda m: losses_of(m(x, held)))[0], expected)


def backwards_by_views(m, ids):
    result = torch.zeros_like(ids)
    for row, other in zip(result.unbind(0), ids.flip(0).unbind(0), strict=True):
        row.copy_(other)
    return m.head(m.table(result))


def turned_in_place(m, ids):
    return m.head(m.table(ids.clone()[:, :3].contiguous().t_()))


def other_data(m, ids):
    result = ids.clone()
    result.data = ids.flip(0)
    return m.head(m.table(result))


def positions_written_in_turn(m, ids):
    h = m.table(ids[:, :3])
    result = torch.zeros_like(h) * h
    for i in range(3):
        result[i] = h[:, i]
    return m.head(result)


def by_strides(m, ids):
    return m.head(m.table(ids[:, :3]).as_strided((3, 3, W), (W, 3 * W, 1)))


def halves_written_by_slices(m, ids):
    h = m.table(ids[:, :3])
    result = h.new_zeros(6, 3, W)
    result[:3] = h
    result[3:] = h.tanh()
    return m.head(result)


def halves_in_turn(m, ids):
    h = m.table(ids[:, :3])
    result = h.new_zeros(6, 3, W)
    result[0::2] = h
    result.view(3, 2, 3, W)[:, 1].copy_(h.tanh())
    return m.head(result)


def changed_through_a_view_with_gaps(m, ids):
    h = m.table(ids).transpose(1, 2)
    h[:, ::2].mul_(2.0)
    return m.head(h.transpose(1, 2))


def plain(m, ids):
    return m.head(m.table(ids[:, :3]))


def both_halves(m, ids):
    h = m.table(ids[:, :3])
    return torch.cat([m.head(h), m.head(h.tanh())], 1)


def with_gaps(m, ids):
    return m.head(m.table(ids) * torch.tensor([2.0, 1.0, 2.0, 1.0]).double())


def squares(output):
    """One loss for each sample, whatever the order of rows."""
    return output.square().flatten(1).sum(1).view(-1, 3).sum(0)


WRITTEN = {  # a forward, and one that gives each sample the same gradient
    backwards_by_views: lambda m, ids: m.head(m.table(ids)),
    turned_in_place: plain,
    other_data: lambda m, ids: m.head(m.table(ids)),
    positions_written_in_turn: plain,
    by_strides: plain,
    halves_written_by_slices: both_halves,
    halves_in_turn: both_halves,
    changed_through_a_view_with_gaps: with_gaps,
}


@pytest.mark.parametrize("form", ["unchecked", "classic"])
@pytest.mark.parametrize("forward", WRITTEN)
def test_a_memory_knows_whose_entries_it_has_whatever_wrote_them(forward, form):
    """A sample is what its loss is made of, whatever order the data have been put into."""
    model = Net(forward, table=nn.Embedding(9, W), head=lin()).double()
    ids = words()
    expected, step = norms_in_batch(model, ids, losses=squares), FORMS[form](model)
    if forward is halves_in_turn or (forward is halves_written_by_slices and form == "classic"):
        # words are in two losses, or in the classic form no dimension of the output has the samples
        with pytest.raises((RuntimeError, ValueError), match=r"mixes samples|samples are not known"):
            step(lambda m: squares(m(ids)))
        return
    assert_close(step(lambda m: squares(m(ids)))[0], expected)


class Strange:
    """Makes its own attributes."""

    __slots__ = ("later",)

    def __getattr__(self, name):
        raise RuntimeError(name)


class Linked:
    """A batch that refers to its dataset, whose items refer to the dataset."""

    def __init__(self, x, items=1000):
        self.x, self.dataset = x, [Item(self) for _ in range(items)]


class Item:
    def __init__(self, batch):
        self.batch, self.values = batch, torch.zeros(2)


@pytest.mark.parametrize("other", [torch, Strange()], ids=["a module", "an object with attributes of its own making"])
def test_objects_that_are_no_batch_are_not_searched(other):
    model, x = Net(lambda m, x, other: m.head(x), head=lin()).double(), data(3, W)
    expected = norms_in_batch(Net(lambda m, x: m.head(x), head=model.head), x)
    assert_close(by_backward(model)(lambda m: losses_of(m(x, other)))[0], expected)


def test_a_batch_that_refers_to_its_dataset_is_searched_only_near_it():
    batch = Linked(data(3, W))
    assert len(tensors_held(batch)) <= 101
    assert tensors_held(batch)[0] is batch.x
    assert len(tensors_held(Linked(data(3, W), items=2))) == 3  # each once


def test_a_sum_of_unknown_samples_times_0_is_no_error():
    model = Net(lambda m, x: m.head(m.first(x) + 0.0 * m.unused(x).sum()), head=lin(), first=lin(), unused=lin())
    x = data(3, W)
    expected = norms_in_batch(model.double(), x)
    assert_close(by_backward(model, verify="never")(lambda m: losses_of(m(x)))[0], expected)


def test_one_sample_of_one_position():
    model = Net(lambda m, x: m.head(m.words(x) + m.places(torch.arange(x.shape[1]))), words=nn.Embedding(9, W))
    model.places, model.head = nn.Embedding(4, W), lin()
    x = torch.tensor([[3]])
    expected = norms_in_batch(model.double(), x)
    assert_close(by_backward(model)(lambda m: losses_of(m(x)))[0], expected)
