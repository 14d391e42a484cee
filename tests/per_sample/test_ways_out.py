"""The first line with ``whole=`` that an error prints works, or the error says that one further out may be needed."""

import re
from functools import partial

import pytest
import torch
from per_sample.harness import Net, assert_close, clip, loop, losses_of, norms_by_loop, norms_of, weight
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence


class Outer(Net):
    pass


class Middle(Net):
    pass


class Inner(Net):
    pass


def linear():
    return nn.Linear(3, 3)


def row_by_row(m, x):
    return torch.stack([m.lin(row) for row in x])


def selected(m, x):
    mask = x[..., 0] > 0
    rows = [x[mask]] * (2 if isinstance(m.lin, nn.Bilinear) else 1)
    return torch.zeros_like(x).index_put((mask,), m.lin(*rows))


def packed_selection(m, x):
    mask = x[..., 0] > 0
    rows = PackedSequence(x[mask], mask.sum()[None])
    return torch.zeros_like(x).index_put((mask,), m.rnn(rows)[0].data)


def positions(m, x):
    return torch.where(x > 0, m.table(torch.arange(x.shape[1])), x)


def biases(m, x):
    return m.table(torch.arange(x.shape[1])[:, None] - torch.arange(x.shape[1]) + T).sum(-1) @ m.lin(x)


def queries(m, x):
    """Learned queries that are the weight of an embedding, as in DETR."""
    query = m.table.weight.unsqueeze(0).repeat(len(x), 1, 1)
    return (query @ m.lin(x).mT).softmax(-1) @ x


def own_queries(m, x):
    return (m.lin(m.p) @ x.mT).softmax(-1) @ x


def cell(m, x, state):
    return m.rnn(x, state)


def with_context(m, x):
    m.inner.context = x
    return m.inner(x)


def masked(m, x):
    return m.inner(x, x.new_ones(x.shape[1], x.shape[1]))  # for positions, as many as samples


class Same(torch.autograd.Function):
    """A function of which the clipper does not know what it does with rows."""

    @staticmethod
    def forward(ctx, x):
        return torch.from_numpy(x.numpy().copy())

    @staticmethod
    def backward(ctx, grad):
        return grad


def folded(m, x):
    return m.lin(x.flatten(0, 1)).view(x.shape)


def folded_unseen(m, x):
    return m.lin(Same.apply(m.lin(x.flatten(0, 1)))).view(x.shape)


def windows(m, x):
    """Calls a block on parts of the sequences, which are in one dimension with the samples."""
    return m.middle(x.reshape(-1, 2, 3)).reshape(x.shape)


def packing(m, x):
    lengths = torch.full((len(x),), x.shape[1])
    return pad_packed_sequence(m.rnn(pack_padded_sequence(x, lengths, batch_first=True))[0], batch_first=True)[0]


def old_weight_norm(m, x):
    return m.lin(x)


def normed():
    with pytest.warns(FutureWarning, match="weight_norm"):
        return nn.utils.weight_norm(linear())


def table(rows=9):
    return nn.Embedding(rows, 3)


B, T = 4, 6


def batch(length=T):
    return torch.randn(B, length, 3).double()


def chosen(*places):
    """A batch whose first number is positive in some places only, given by sample and position."""
    x = batch()
    x[..., 0] = -x[..., 0].abs()
    for place in places:
        x[place][0] = 1
    return x


def inner(use):
    return Inner(use, p=weight(3, 3))


def relative():
    return Net(lambda m, n: m.table[None] * n, table=weight(T, 3))


CASES = {
    "has no batch dimension": (lambda: Outer(row_by_row, lin=linear()), lambda: batch()[:, 0]),
    "made of parameters alone, such as 'lin.weight'": (
        lambda: Outer(lambda m, x: m.head(x + m.lin.weight[0]) @ m.head(m.lin.weight), lin=linear(), head=linear()),
        batch,
    ),
    "made of parameters alone, such as 'inner.p'": (
        lambda: Outer(lambda m, x: m.inner(x), inner=Inner(own_queries, lin=linear(), p=weight(3, 3))),
        batch,
    ),
    "made of parameters alone, such as 'table.weight'": (
        lambda: Outer(
            lambda m, x: m.inner(x, m.table.weight[:, 0].expand(len(x), -1)),
            inner=Inner(cell, rnn=nn.GRUCell(3, 3)),
            table=table(3),
        ),
        lambda: batch()[:, 0],
    ),
    "If the model uses it, run": (lambda: Outer(queries, lin=linear(), table=table(5)), batch),
    "from outside the call of its layer": (
        lambda: Outer(lambda m, x: m.lin(x) @ m.lin.weight.T, lin=linear()),
        batch,
    ),
    "'inner.p' got a gradient from outside": (
        lambda: Outer(
            lambda m, x: m.inner(x) @ m.inner.p,
            inner=Inner(lambda m, x: m.lin(x) * m.p[0], lin=linear(), p=weight(3, 3)),
        ),
        batch,
    ),
    "make another tensor of it": (lambda: Outer(old_weight_norm, lin=normed()), batch),
    "samples are not known. Say": (lambda: Outer(folded_unseen, lin=linear()), batch),
    "samples are not known": (
        lambda: Outer(windows, middle=Middle(lambda m, x: m.lin(Same.apply(m.lin(x))).cumsum(1), lin=linear())),
        batch,
    ),
}
FURTHER = {"samples are not known"}


def made(make, seed=0):
    torch.manual_seed(seed)
    return make().double()


def lines(error):
    return re.findall(r"whole=\((\w+),\)", str(error))


@pytest.mark.parametrize("name", CASES)
def test_the_first_line_works_or_the_error_says_that_a_module_further_out_may(name):
    make, inputs = CASES[name]
    x = inputs()
    model = made(make)
    lost = name.startswith("samples are not known")  # a probe would find them
    with clip(model) as clipper:
        backward = (lambda losses: losses.mean().backward()) if lost else clipper.backward
        with pytest.raises((ValueError, RuntimeError), match=name) as error:
            backward(losses_of(model(x.clone())))
    kinds = {type(module).__name__: type(module) for module in model.modules()}
    found = lines(error.value)
    if name in FURTHER:
        assert "the module around it, or one further out," in str(error.value)
        found = found[1:]
    assert_right(partial(made, make), x, kinds[found[0]])


def assert_right(make, x, whole):
    """The norms with ``whole=`` are those of one backward for each sample, which may change its input."""
    rows = [norms_of(loop(make(), [x[i : i + 1].clone()])) for i in range(len(x))]
    model = make()
    with clip(model, 1e9, whole=(whole,)) as clipper:
        norms = clipper.backward(losses_of(model(x.clone()))).param_norms
    assert set(norms) == set(rows[0])
    for key, value in norms.items():
        assert_close(value, torch.cat([row[key] for row in rows]))


NEEDLESS = {
    "rows of a module with two inputs": (
        lambda: Outer(selected, lin=nn.Bilinear(3, 3, 3)),
        lambda: chosen((0, 1), (0, 2), (2, 0), (3, 1)),
    ),
    "positions in a condition": (lambda: Outer(positions, table=table()), batch),
    "distances between positions": (lambda: Outer(biases, lin=linear(), table=table(2 * T)), lambda: batch(B)),
    "a row that left its module": (
        lambda: Outer(lambda m, x: torch.where(x > 0, m.inner(1.0), x), inner=relative()),
        batch,
    ),
    "a tensor of the batch in an attribute": (
        lambda: Outer(with_context, inner=inner(lambda m, x: x @ m.p @ m.p + m.context)),
        batch,
    ),
    "a mask with as many positions as samples": (
        lambda: Outer(masked, inner=inner(lambda m, x, mask: mask @ x @ m.p @ m.p)),
        lambda: batch(B),
    ),
    "rows that values have selected": (
        lambda: Outer(selected, lin=linear()),
        lambda: chosen((0, 1), (0, 2), (2, 0), (3, 1)),
    ),
    "a PackedSequence of rows": (
        lambda: Outer(packed_selection, rnn=nn.LSTM(3, 3)),
        lambda: chosen((0, 1), (1, 0), (1, 2), (2, 1), (3, 3)),
    ),
    "24 rows for 4 samples": (lambda: Outer(folded, lin=linear()), batch),
    "12 rows for 4 samples": (
        lambda: Outer(windows, middle=Middle(lambda m, x: m.lin(x).cumsum(1), lin=linear())),
        batch,
    ),
}


@pytest.mark.parametrize("name", NEEDLESS)
def test_rows_of_several_samples_need_no_way_out(name):
    make, inputs = NEEDLESS[name]
    x = inputs()
    model = made(make)
    with clip(model, verify="never") as clipper:
        assert_close(clipper.backward(losses_of(model(x.clone()))).norms, norms_by_loop(made(make), x.clone()))


def test_a_class_whose_name_another_one_has_is_written_in_full():
    other = type("Outer", (Net,), {"__module__": "some.package"})
    held = {"a": Outer(folded_unseen, lin=linear()), "b": other(folded_unseen, lin=linear())}
    model = Net(lambda m, x: m.a(x) + m.b(x), **held).double()
    with (
        clip(model),
        pytest.raises(ValueError, match=r": whole=\(\S+\.test_ways_out\.Outer,\), or whole=\(Net,\)$"),
    ):
        losses_of(model(batch())).mean().backward()


def test_a_forward_without_tensors_is_refused_without_a_line():
    def forward(m, batch):
        return m.inner(batch) * batch[0]

    model = Net(forward, inner=Net(lambda m, batch: m.p.sin().outer(m.p), p=weight(3)))
    with (
        clip(model, whole=("inner",)),
        pytest.raises(ValueError, match=r"Pass the tensors of the batch to the model") as error,
    ):
        model("x")
    assert "whole=" not in str(error.value)


@pytest.mark.parametrize("batch_first", [True, False])
def test_losses_of_tokens_are_averaged_by_the_line_of_the_error(batch_first):
    model, x = linear().double(), batch(9)

    def losses():
        return model(x if batch_first else x.transpose(0, 1)).square().sum(2).flatten()

    with clip(model, batch_first=batch_first) as clipper:
        with pytest.raises(ValueError, match=r"Linear saw 4 samples, the batch has 36. One loss for each tok") as error:
            clipper.backward(losses())
        line = str(error.value).rpartition("sample: ")[2]
        norms = clipper.backward(eval(line, {"losses": losses()})).norms
    each = [torch.autograd.grad(model(row).square().sum(1).mean(), [*model.parameters()]) for row in x]
    assert_close(norms, torch.stack([torch.stack([grad.norm() for grad in grads]).norm() for grads in each]))


def test_each_gradient_from_outside_gets_the_way_out_of_its_cause():
    model, x = Outer(lambda m, x: m.lin(x), lin=linear()), batch().float()
    output = model(x)
    with clip(model):
        with pytest.raises(RuntimeError, match=r"apart. The forward may have run before .* run it again") as error:
            losses_of(output).sum().backward()
        assert not lines(error.value)
        with pytest.raises(RuntimeError, match=r"For a penalty on parameters, use weight_decay$"):
            (losses_of(model(x)).sum() + model.lin.weight.square().sum()).backward()
