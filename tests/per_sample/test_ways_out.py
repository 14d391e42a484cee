"""The first line with ``whole=`` that an error prints works, or the error says that one further out may be needed."""

import copy
import re
from functools import partial

import pytest
import torch
from per_sample.harness import (
    Net,
    assert_close,
    by_backward,
    by_classic_form,
    by_two_passes,
    clip,
    loop,
    losses_of,
    norms_by_loop,
    norms_of,
    total_of,
    weight,
    with_low_memory,
)
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


def mixing(m, x):
    return m.lin(x) - m.lin(x).mean(0)


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
    "'lin.weight' got a gradient from outside": (
        lambda: Outer(lambda m, x: m.head(x + m.lin.weight[0]) @ m.head(m.lin.weight), lin=linear(), head=linear()),
        batch,
    ),
    "'inner.p' got a gradient from outside the call": (
        lambda: Outer(lambda m, x: m.inner(x), inner=Inner(own_queries, lin=linear(), p=weight(3, 3))),
        batch,
    ),
    "'table.weight' got a gradient from outside": (
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
}


def made(make, seed=0):
    torch.manual_seed(seed)
    return make().double()


def lines(error):
    return re.findall(r"whole=\((\w+),\)", str(error))


@pytest.mark.parametrize("name", CASES)
def test_the_first_line_works(name):
    make, inputs = CASES[name]
    x = inputs()
    model = made(make)
    with clip(model) as clipper, pytest.raises((ValueError, RuntimeError), match=name) as error:
        clipper.backward(losses_of(model(x.clone())))
    kinds = {type(module).__name__: type(module) for module in model.modules()}
    assert_right(partial(made, make), x, kinds[lines(error.value)[0]])


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
    held = {"a": Outer(mixing, lin=linear()), "b": other(mixing, lin=linear())}
    model = Net(lambda m, x: m.a(x) + m.b(x), **held).double()
    with (
        clip(model),
        pytest.raises(
            RuntimeError, match=r": whole=\((?:some\.package|\S+test_ways_out)\.Outer,\), or whole=\(Net,\)$"
        ),
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


def sequence_first(batch_first, *, transposed):
    def forward(m, x):
        x = m.first(x)
        return m.last(m.layer(x.transpose(0, 1)).transpose(0, 1) if transposed else m.layer(x))

    layer = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=batch_first)
    return Net(forward, first=nn.Linear(3, 4), layer=layer, last=nn.Linear(4, 2)).double()


@pytest.mark.parametrize("count", [4, 5])  # there are 5 positions
@pytest.mark.parametrize("classic", [False, True])
def test_a_layer_with_the_other_batch_first_is_right_after_what_the_errors_say(classic, count):
    form = by_classic_form if classic else by_backward
    x = torch.randn(count, 5, 3, dtype=torch.float64)
    layer_first = "give the layer batch_first=True and remove the transposes around it"
    with pytest.raises(ValueError, match=rf"'layer' .* batch_first=True was declared: {layer_first}. If all inputs"):
        clip(sequence_first(False, transposed=True))
    both = r"mixes samples.* declare batch_first|saw 5 samples, the batch has 4.*batch_first=False"
    wrong = sequence_first(False, transposed=True)
    with pytest.raises((RuntimeError, ValueError), match=both):
        form(wrong, batch_first=False)(lambda model: losses_of(model(x)))
    model = sequence_first(True, transposed=False)
    expected = norms_by_loop(model, x)
    assert_close(form(model)(lambda model: losses_of(model(x)))[0], expected)
    # all inputs have the batch in dimension 1
    model, x = sequence_first(False, transposed=False), x.transpose(0, 1)
    with pytest.raises(
        ValueError, match=r"If all inputs of the model have the batch in dimension 1, declare batch_fir"
    ):
        clip(model)
    expected = norms_of(loop(copy.deepcopy(model), (x,), 1))
    norms, _ = form(model, batch_first=False)(lambda model: losses_of(model(x), 1))
    assert_close(norms, total_of(expected))


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(3, 5), nn.Linear(5, 1)

    def forward(self, x):
        return self.last(self.first(x).tanh())


def penalized(model, x):
    """A loss for each sample with a penalty on the gradient for its input, as for the critics of WGAN-GP."""
    x = x.clone().requires_grad_()
    output = model(x)
    (grad,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    return output.squeeze(1) + (grad.norm(dim=1) - 1).square()


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("form", [by_backward, with_low_memory, by_classic_form, by_two_passes])
@pytest.mark.parametrize("kind", ["module", "sequential"])
def test_gradient_penalties_are_right_with_the_line_that_the_error_prints(kind, form, count):
    model = Critic() if kind == "module" else nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))
    model, x = model.double(), torch.randn(count, 3, dtype=torch.float64)
    given, params = {"module": (Critic,), "sequential": ("",)}[kind], list(model.parameters())
    rows = [torch.autograd.grad(penalized(model, x)[i], params, materialize_grads=True) for i in range(count)]
    expected = torch.stack([torch.stack([grad.norm() for grad in row]).norm() for row in rows])
    line = r"whole=\(Critic,\)" if kind == "module" else r'whole=\("",\)'
    twin = copy.deepcopy(model)
    with pytest.raises(RuntimeError, match=rf"a gradient penalty: run .* sample by sample: {line}"):
        form(twin)(lambda model: penalized(model, x))
    norms, _ = form(copy.deepcopy(model), whole=given)(lambda model: penalized(model, x))
    assert_close(norms, expected)


@pytest.mark.parametrize("form", [by_backward, by_classic_form])
@pytest.mark.parametrize("documents", [2, 3, 5])
@pytest.mark.parametrize("rows", [1, 2])
def test_documents_packed_in_a_row_need_rows_of_their_own(rows, documents, form):
    model, x = Critic().double(), torch.randn(rows, 5 * documents, 3, dtype=torch.float64)

    def losses(model):
        return model(x).view(rows * documents, -1).square().mean(1)

    with pytest.raises(ValueError, match=r"Several documents packed in one row\? Put one document in each row\."):
        by_backward(copy.deepcopy(model))(losses)
    x = x.view(rows * documents, 5, 3)
    expected = norms_by_loop(model, x, losses=lambda output, _: output.flatten(1).square().mean(1))
    assert_close(form(model)(losses)[0], expected)
