"""One row of input that stands for all samples."""

import copy
import random

import pytest
import torch
from per_sample.harness import (
    Net,
    assert_close,
    assert_matches_loop,
    assert_step,
    clip,
    losses_of,
    norms_in_batch,
    weight,
)
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


def uses(use, layer=None, *, frozen=False):
    """Uses the output of a layer whose input is one row for all samples."""
    held = {"layer": layer or nn.Linear(3, 3), "head": nn.Linear(3, 2).requires_grad_(not frozen)}
    model = Net(lambda m, x: m.head(use(x, m.layer(m.row))), **held)
    model.register_buffer("row", torch.randn(1, 4, 3))
    return model


def scale():
    return Net(lambda m, x: torch.tanh(x * m.weight), weight=weight(3))


def added_in_place(x, row):
    x = x.clone()
    x += row
    return x


def set_to(x, row):
    x = x.clone()
    x[:, 1:3] = row[:, :2]
    return x


RIGHT = {
    "added": lambda x, row: x + row,
    "added to": lambda x, row: row + x,
    "multiplied": lambda x, row: x * row,
    "subtracted": lambda x, row: torch.sub(row, x),
    "divided": lambda x, row: row / (x.square() + 1),
    "in place": added_in_place,
    "in place by a function": lambda x, row: (y := x.clone()).add_(row) * 0 + y,
    "scaled": lambda x, row: x + 0.5 * row - row / 3,
    "converted": lambda x, row: x + row.to(x.dtype).double(),
    "expanded": lambda x, row: torch.sin(row.expand(len(x), -1, -1)) + x,
    "twice": lambda x, row: (x + row) * row,
    "sum": lambda x, row: x * row.sum(0),
    "mean": lambda x, row: x * row.mean(0, keepdim=True),
    "first": lambda x, row: x * row[0],
    "squeezed": lambda x, row: x * row.squeeze(0),
    "both": lambda x, row: (x + row) * row[0],
    "nonlinear": lambda x, row: x + torch.tanh(row),
    "sliced": lambda x, row: x[:, :2] * row[:, :2],
    "indexed": lambda x, row: x * row[:, torch.tensor([3, 1, 0, 2])],
    "concatenated": lambda x, row: x * torch.cat([row[:, 2:], row[:, :2]], 1),
    "split": lambda x, row: torch.cat([x[:, :2] * row.split(2, 1)[0], x[:, 2:] * row.unbind(1)[3][:, None]], 1),
    "repeated": lambda x, row: torch.cat([x, row.repeat(len(x), 1, 1)], 1)[:, 2:6],
    "a class token": lambda x, row: torch.cat([row[:, :1].expand(len(x), -1, -1), x[:, 1:]], 1),
    "of all samples alone": lambda x, row: x * (row.flatten() @ row.flatten()),
    "a matrix product": lambda x, row: x @ (row[0].t() @ row[0]),
    "in a condition": lambda x, row: torch.where(x > 0, row, x),
    "joined": lambda x, row: torch.stack([x, row.expand_as(x)], 1).amax(1),
    "an attention": lambda x, row: F.scaled_dot_product_attention(x[:, None], row[None], row[None])[:, 0],
    "set": lambda x, row: set_to(x, row),
    "changed": lambda x, row: x + row.clone().mul_(2) * row,
    "beside other dimensions": lambda x, row: (x.transpose(0, 1) * row[0][:, None]).transpose(0, 1),
    "complex": lambda x, row: x + torch.fft.fft(row, dim=1).real,
}
WRONG = {
    "einsum": lambda x, row: x * torch.einsum("btd,otd->td", x, row),
    "cat": lambda x, row: x + torch.cat([x[:, 0], x.flatten(0, 1), row[0]]).mean(0),
}


@pytest.mark.parametrize("layer", [nn.Linear(3, 3), nn.LayerNorm(3), scale(), nn.Conv1d(4, 4, 1)], ids=str)
@pytest.mark.parametrize("use", RIGHT)
def test_arithmetic_with_one_row_for_all_samples_is_right(use, layer):
    assert_matches_loop(uses(RIGHT[use], layer), torch.randn(5, 4, 3), modes=("auto", "low"))


def test_layers_behind_one_row_for_all_samples_are_right():
    behind = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3), scale(), nn.Linear(3, 3))
    assert_matches_loop(uses(RIGHT["added"], behind), torch.randn(5, 4, 3))


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("use", WRONG)
def test_other_uses_of_one_row_for_all_samples_are_refused_by_name(use, frozen):
    model, x = uses(WRONG[use], frozen=frozen).double(), torch.randn(5, 4, 3).double()
    expected = model(x).detach()
    clipper = clip(model)
    output = model(x)
    assert_close(output, expected)
    with pytest.raises(RuntimeError, match=rf"'layer' \(Linear\) returned one row.*{use}.*expand"):
        clipper.backward(losses_of(output))
    assert all(param.grad is None for param in model.parameters())


def test_a_random_function_of_a_row_draws_once_for_all_samples():
    model, x = uses(lambda x, row: x * F.dropout(row)).double(), torch.randn(5, 4, 3).double()
    torch.manual_seed(3)
    expected = norms_in_batch(model, x)
    with clip(model, 1e9) as clipper:
        torch.manual_seed(3)
        assert_close(clipper.backward(losses_of(model(x))).norms, expected)


def test_wrong_arguments_of_functions_of_rows_get_the_errors_of_torch():
    for use, message in (
        (lambda x, row: x + row[:, :3], "must match the size"),
        (lambda x, row: x @ row, "cannot be multiplied"),
        (lambda x, row: torch.add(x, row, out=torch.zeros_like(x)), "out=... arguments don't support"),
    ):
        model = uses(use).double()
        with clip(model), pytest.raises(RuntimeError, match=message):
            model(torch.randn(5, 4, 3).double())


def test_a_row_that_is_multiplied_by_data_of_samples_in_place_is_refused():
    model = bare(lambda m, x: m.lin(x) * m.p.clone().mul_(2 * x[:, 0]), 4, 3).double()  # as many rows as samples
    with clip(model) as clipper, pytest.raises(RuntimeError, match=r"uses a parameter in 'mul_?'.*whole=\(Net,\)"):
        clipper.backward(losses_of(model(torch.randn(4, 4, 3).double())))


def test_a_row_that_is_added_to_a_tensor_of_no_sample_at_places_of_samples_is_added_once_and_refused():
    def forward(m, x):
        places = x[:, 0, 0].argsort()
        total = x.new_zeros(9, 3).index_put_((places,), m.p, accumulate=True)
        return m.lin(x) * total[places][:, None]

    model, x = bare(forward, 3).double(), torch.randn(5, 4, 3).double()
    expected = model(x).detach()
    with clip(model) as clipper:
        assert_close(output := model(x), expected)
        with pytest.raises(RuntimeError, match=r"uses a parameter in 'index_put_'.*whole"):
            clipper.backward(losses_of(output))


def test_rows_that_are_written_into_a_tensor_of_no_sample_are_refused_outside_of_the_module_that_holds_them():
    model = uses(lambda x, row: x * set_to(torch.zeros_like(row), row).square()).double()
    with clip(model) as clipper, pytest.raises(RuntimeError, match="'__setitem__' cannot tell samples apart"):
        clipper.backward(losses_of(model(torch.randn(5, 4, 3).double())))


def test_the_output_for_one_row_has_one_row():
    model = uses(lambda x, row: x + row.new_ones(row.shape))
    _clipper = clip(model)
    seen = []
    model.layer.register_forward_hook(lambda module, args, output: seen.append(output.shape))
    model(torch.randn(5, 4, 3))
    assert seen == [(1, 4, 3)]


def bare(use, *shape):
    """A module with a forward of its own and one parameter."""
    return Net(use, lin=nn.Linear(3, 3), p=weight(*shape))


class Cubed(torch.autograd.Function):
    """A function in the older form, which no mode of torch sees and vmap cannot run."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, grad):
        return 3 * ctx.saved_tensors[0] ** 2 * grad


BARE = {
    "a class token": (lambda m, x: torch.cat([m.p.expand(len(x), -1, -1), m.lin(x)], 1), (1, 1, 3)),
    "a layer scale": (lambda m, x: x + m.p * m.lin(x), (3,)),
    "a gate of functions": (lambda m, x: m.lin(x) * torch.sigmoid(m.p).cumsum(0), (3,)),
    "an operation that is not for rows": (lambda m, x: m.lin(x) @ m.p, (3, 3)),
    "in a list": (lambda m, x: torch.stack([m.lin(x), x + m.p], 1).flatten(1, 2), (3,)),
    "set in place": (lambda m, x: m.lin(x).index_fill(1, torch.tensor([0]), 0.0) + m.p[None, None], (3,)),
    "a function of it alone": (lambda m, x: m.lin(x) @ F.linear(m.p, m.p), (3, 3)),
    "an attribute of it": (lambda m, x: m.lin(x) * (m.p if m.p.is_leaf else 2 * m.p), (3,)),
    "the weight of a submodule": (lambda m, x: nn.functional.linear(x, weight=m.lin.weight) * m.p, (3,)),
    "a layer norm": (lambda m, x: nn.functional.layer_norm(m.lin(x), (3,), m.p, eps=1e-3) * m.p, (3,)),
    "a table of words": (lambda m, x: m.lin(x) + m.p[(x[..., 0] > 0).long()], (2, 3)),
    "a mask": (lambda m, x: masked(m.lin(x), x[..., 0] > 0, m.p), (3,)),
    "normalized": (lambda m, x: m.lin(x) @ nn.functional.normalize(m.p), (3, 3)),
    "values for the batch": (lambda m, x: m.lin(x) * m.p.to(x) @ x.mT @ m.lin(x), (3,)),
    "indices beside a row": (lambda m, x: m.lin(x) + m.p[m.p.sum(1).topk(4).indices], (4, 3)),
    "changed through a view": (lambda m, x: m.lin(x) * doubled(m.p * 2), (4, 3)),
    "by a function without vmap": (
        lambda m, x: m.lin(x) + torch.sparse.mm(torch.eye(4).to_sparse().to(x), m.p),
        (4, 3),
    ),
    "with a tensor that trains outside of the model": (lambda m, x: m.lin(x) * (m.p * OUTSIDE.to(x)).cumsum(0), (4, 3)),
}
OUTSIDE = torch.linspace(1, 2, 3, requires_grad=True)
ALONE = {
    "tanh": torch.tanh,
    "sum from the start": lambda row: row.cumsum(0),
    "roll": lambda row: row.roll(1, 0),
    "sort": lambda row: row.sort(0).values,
    "softmax": lambda row: row.softmax(-1) * 2,
    "turn": lambda row: row.mT.contiguous().mT,
    "index": lambda row: row[torch.tensor([2, 0, 3, 1])],
    "unbind": lambda row: torch.stack(row.unbind()[::-1]),
    "in place": lambda row: row.clone().mul_(2),
    "in place, a part": lambda row: doubled(row * 1),
    "product": lambda row: row @ row.mT @ row / 4,
    "choice": lambda row: torch.where(row > 0, row, 0.5 * row),
    "largest first": lambda row: row.gather(0, row.argsort(0, descending=True)),
    "norm": lambda row: row / (1 + row.norm()),
    "pad": lambda row: F.pad(row, (0, 0, 1, 0))[1:],
    "whole and half": lambda row: torch.cat(row.chunk(2)),
}
JOINS = {
    "sum": lambda x, row: x + row,
    "product": lambda x, row: x * row,
    "matrix product": lambda x, row: x @ row.mT @ row,
    "tokens": lambda x, row: torch.cat([row.expand(len(x), -1, -1), x], 1),
    "choice": lambda x, row: torch.where(x > 0, x, row),
    "attention": lambda x, row: F.scaled_dot_product_attention(x[:, None], row[None, None], row[None, None])[:, 0],
    "linear": lambda x, row: F.linear(x, row, row[:, 0]),
    "in place": lambda x, row: x.clone().add_(row),
}


def clamped(m):
    with torch.no_grad():
        m.p.clamp_(-0.5, 0.5)
    return m.p.exp()


def looked_at(m):
    with torch.no_grad():
        assert m.p.isfinite().all()
    return m.p.tanh()


def replaced(m):
    m.p.data = m.p.data.clamp(max=0.5)
    return m.p.exp()


def changed_twice(m):
    first = m.p.exp()
    with torch.no_grad():
        m.p.clamp_(-0.5, 0.5)
    return first + m.p.exp()


def without_a_gradient(m):
    row = m.p.exp()
    m.p.grad, m.p.requires_grad, row.grad = None, True, None
    return row * m.p


def in_a_loop(m):
    row, total = m.p.softmax(0), 0
    for _ in range(3):
        total = total + row * row.sum()
    return total


@pytest.mark.parametrize("use", [clamped, looked_at, replaced, changed_twice, without_a_gradient, in_a_loop])
def test_parameters_may_be_read_and_changed_without_gradients_in_the_forward(use):
    model, x = bare(lambda m, x: m.lin(x) * use(m), 4, 3).double(), torch.randn(5, 4, 3).double()
    model.p.data[0, 0] = 2.0
    expected = norms_in_batch(model, x)
    with clip(model, 1e9) as clipper:
        assert_close(clipper.backward(losses_of(model(x))).norms, expected)


CHANGES = {
    "a part": lambda m: m.p[0].mul_(2),
    "by an argument": lambda m: F.relu(m.p, inplace=True),
    "by a module": lambda m: m.act(m.p),
    "its data": lambda m: m.p.to(m.p.dtype) * setattr(m.p, "data", 2 * m.p.data),
}


@pytest.mark.parametrize("count", [1, 5])
@pytest.mark.parametrize("name", CHANGES)
def test_a_parameter_that_is_changed_with_gradients_is_refused_and_stays_as_it_is(name, count):
    model = bare(lambda m, x: m.lin(x) * CHANGES[name](m), 4, 3)
    model.act = nn.LeakyReLU(inplace=True)
    before = model.p.detach().clone()
    with clip(model), pytest.raises(RuntimeError, match=r"in ?place"):
        model(torch.randn(count, 4, 3))
    assert model.p.equal(before)


def test_data_of_a_row_may_not_be_set():
    def use(m, x):
        row = 2 * m.p
        row.data = row.data * 3
        return m.lin(x) * row

    with clip(model := bare(use, 4, 3)), pytest.raises(RuntimeError, match=r"assignment to .data.*whole"):
        model(torch.randn(5, 4, 3))


def test_a_parameter_that_changes_before_the_backward_is_named():
    model = bare(lambda m, x: m.lin(x) * m.p.square(), 4, 3)
    with clip(model) as clipper:
        losses = losses_of(model(torch.randn(5, 4, 3)))
        with torch.no_grad():
            model.p.add_(1)
        with pytest.raises(RuntimeError, match=r"^Net: a parameter.*was changed in place after it was used"):
            clipper.backward(losses)


def test_a_value_of_a_forward_with_another_number_of_samples_is_refused():
    def use(m, x):
        old, m.kept = m.kept, m.p.exp()
        return m.lin(x) * (m.p if old is None else m.p + old)

    model = bare(use, 4, 3)
    model.kept = None
    with clip(model):
        model(torch.randn(5, 4, 3))
        with pytest.raises(ValueError, match="a value of an earlier forward"):
            model(torch.randn(6, 4, 3))


def test_a_sparse_tensor_of_a_parameter_is_refused_by_name():
    model = bare(lambda m, x: m.lin(x) * m.p.to_sparse().to_dense(), 4, 3)
    with clip(model) as clipper, pytest.raises(RuntimeError, match=r"Net uses a parameter in 'to_sparse'.*whole"):
        clipper.backward(losses_of(model(torch.randn(5, 4, 3))))


def test_a_checkpoint_with_functions_of_rows_runs_as_often_as_without_them():
    """Their gradients are computed by nested backwards, each of which would run the checkpoint again."""
    counts = []
    for use in (lambda h, p: h * p, lambda h, p: h * p.tanh() + p.softmax(-1)):
        calls = []

        def inner(m, x, use=use, calls=calls):
            calls.append(1)
            return use(F.dropout(m.lin(x), 0.1), m.p)

        block = Net(inner, lin=nn.Linear(3, 3), p=weight(4, 3))
        model = Net(lambda m, x: checkpoint(m.block, x, use_reentrant=False), block=block)
        with clip(model) as clipper:
            for _ in range(3):
                clipper.backward(losses_of(model(torch.randn(5, 4, 3))))
        counts.append(len(calls))
    assert counts[0] == counts[1]


def test_what_a_row_needs_may_not_change_in_a_checkpoint():
    def inner(m, x):
        scale = m.p * m.table
        m.table.add_(1.0)
        return m.lin(x) * scale

    block = bare(inner, 4, 3)
    block.register_buffer("table", torch.ones(4, 3))
    model = Net(lambda m, x: checkpoint(m.block, x, use_reentrant=False), block=block)
    with clip(model) as clipper, pytest.raises(RuntimeError, match=r"changed in place|modified by an inplace"):
        clipper.backward(losses_of(model(torch.randn(5, 4, 3))))


@pytest.mark.parametrize("seed", range(40))
def test_chains_of_functions_of_rows_are_right(seed):
    draw = random.Random(seed)
    before, after = (draw.choices([*ALONE.values()], k=draw.randrange(3)) for _ in range(2))
    join = draw.choice([*JOINS.values()])

    def use(m, x):
        row = m.p
        for function in before:
            row = function(row)
        for function in after:
            row = function(row + m.q) if function is after[0] else function(row)
        return join(m.lin(x), row)

    model = Net(use, lin=nn.Linear(3, 3), p=weight(4, 3), q=weight(3))
    # indices and masks with the size of the batch count as data
    sizes = [5] if {ALONE["choice"], ALONE["largest first"]} & {*before, *after} else [3, 4, 5]
    assert_matches_loop(model, torch.randn(draw.choice(sizes), 4, 3), modes=("auto", "low"))


OF_AUTOGRAD = {
    "alone": lambda m, x: m.lin(x) * Cubed.apply(m.p),
    "beside arithmetic": lambda m, x: m.lin(x) @ Cubed.apply(m.p).diag() + m.p,
    "of a row": lambda m, x: m.lin(x) * Cubed.apply(2 * m.p),
}


def doubled(row):
    """A row whose first entry is changed in place through a view, after another view of it was made."""
    views = row.view(row.shape), row[0]
    views[1].mul_(2)
    return row + views[0]


def masked(x, mask, value):
    x = x.clone()
    x[mask] = value
    return x


@pytest.mark.parametrize("name", OF_AUTOGRAD)
def test_functions_of_autograd_get_no_parameter_beside_layers(name):
    model, x = bare(OF_AUTOGRAD[name], 3), torch.randn(5, 4, 3)
    twin = copy.deepcopy(model)
    with clip(twin) as clipper:
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"^(Net uses a parameter|'p' got a gradient).*whole=\(Net,\)"):
                clipper.backward(losses_of(twin(x)))
    assert_matches_loop(model, x, modes=("auto", "low"), whole=(Net,))


def test_checkpoints_get_a_module_that_holds_the_parameter():
    def forward(m, x):
        return checkpoint(m.function or (lambda h: m.lin(h) * m.p), x, use_reentrant=False)

    held = {"function": None, "lin": nn.Linear(3, 3), "p": weight(3)}
    with clip(model := Net(forward, **held)), pytest.raises(RuntimeError, match=r"^Net uses.*checkpoint.*a module"):
        model(torch.randn(5, 3))
    held["function"] = Net(lambda m, h: m.lin(h) * m.p, lin=held["lin"], p=held["p"])
    for model in (Net(forward, **held), Net(lambda m, x: checkpoint(m.inner, x, use_reentrant=False), inner=scale())):
        assert_matches_loop(model, torch.randn(5, 3), modes=("auto", "low"))


@pytest.mark.parametrize("count", [1, 4, 5])
@pytest.mark.parametrize("name", BARE)
def test_parameters_beside_layers_are_right(name, count):
    use, shape = BARE[name]
    losses = (lambda output, dim: losses_of(output[:, :4])) if name == "the weight of a submodule" else losses_of
    model = bare(use, *shape)
    if name == "the weight of a submodule":
        model.lin.bias.requires_grad_(False)
    assert_matches_loop(model, torch.randn(count, 4, 3), modes=("auto", "low"), losses=losses)


def test_a_class_token_may_be_joined_to_sequences_that_come_first():
    def forward(m, x):
        return torch.cat([m.p[:1].expand(-1, x.shape[1], -1), m.lin(x)]) * m.p

    for x in (torch.randn(3, 5, 3), torch.randn(3, 4, 3)):
        assert_matches_loop(bare(forward, 4, 1, 3), x, batch_first=False, modes=("auto", "low"))


def test_a_random_mask_has_samples():
    def forward(m, x):
        torch.manual_seed(len(x))
        return masked(m.lin(x), torch.rand(len(x), 4) < 0.5, m.p)

    model = bare(forward, 3).double()
    own = copy.deepcopy(model)
    with clip(own, 1e9) as clipper:
        for count in (5, 4, 3):
            x = torch.randn(count, 4, 3).double()
            assert_close(clipper.backward(losses_of(own(x))).norms, norms_in_batch(model, x))


def test_a_size_that_was_not_the_batch_is_not_taken_for_it_later():
    def forward(m, x):
        h = torch.cat([m.lin(x), x[:, :1]], 1)
        return h * m.p.expand(h.shape[1], 3)

    model = bare(forward, 1, 3).double()
    with clip(model, 1e9) as clipper:
        for length in (2, 3, 4):  # 4 samples: as many as positions in the second step
            assert_step(clipper, model, torch.randn(4, length, 3).double())


@pytest.mark.parametrize("hook", ["register_hook", "retain_grad"])
def test_hooks_of_a_row_are_refused_and_those_of_a_parameter_are_too(hook):
    def positions(m, x):
        row = m.lin(m.p[None])
        getattr(row, hook)(*([abs] if hook == "register_hook" else []))
        return x + row

    model = bare(positions, 4, 3)
    with clip(model), pytest.raises((RuntimeError, ValueError)):
        model(torch.randn(5, 4, 3))


def test_an_input_may_be_changed_in_place():
    def forward(m, x):
        x = x.clone()
        x += m.p
        return m.lin(x) @ torch.ones(3, 3, dtype=x.dtype) + x @ m.p.diag()

    assert_matches_loop(bare(forward, 3), torch.randn(5, 4, 3), modes=("auto", "low"))


def test_a_use_may_change():
    def forward(m, x):
        return m.lin(x) * m.p if not m.turned else m.lin(x) * (x @ m.p.diag())

    model, x = bare(forward, 3).double(), torch.randn(5, 4, 3).double()
    with clip(model, 1e9) as clipper:
        for model.turned in (False, True):
            assert_step(clipper, model, x)


def attention(use=lambda m, q, mask: F.scaled_dot_product_attention(q, q, q, attn_mask=mask)):
    """A module that uses what its submodule makes of a parameter alone, as tables of relative positions are used."""
    mask = Net(lambda m, n: m.table[None, None] * n, table=weight(4, 4))
    return Net(lambda m, x: use(m, m.lin(x)[:, None], m.mask(1.0)).squeeze(1), lin=nn.Linear(3, 3), mask=mask)


ESCAPES = {
    "register_hook": attention(lambda m, q, mask: q * mask[..., :3] if mask.register_hook(abs) else q),
}


@pytest.mark.parametrize("name", ESCAPES)
def test_a_row_of_a_parameter_that_left_its_module_is_refused_by_an_ordinary_error(name):
    model, x = copy.deepcopy(ESCAPES[name]).double(), torch.randn(5, 4, 3).double()
    with clip(model, 1e9) as clipper:
        for _ in range(2):
            with pytest.raises(RuntimeError, match=rf"^'mask' \(Net\) returned .*'{name}'.*x.expand.*whole=\(Net,\)"):
                model(x)
        norms = (clipper.backward(model.lin(x).sum((1, 2)))).norms  # the clipper goes on
        assert_close(norms, (3 * (x.sum(1).square().sum(1) + 16)).sqrt())


@pytest.mark.parametrize("whole", [(), (Net,)])
def test_a_row_of_a_parameter_that_left_its_module_is_right(whole):
    where = attention(lambda m, q, mask: torch.where(mask[..., :3] > 0, mask[..., :3], q))
    for model in (attention(), where):
        assert_matches_loop(model, torch.randn(5, 4, 3), modes=("auto", "low"), whole=whole)


def test_a_row_of_a_parameter_in_the_loss_is_right():
    model, x = Net(lambda m, x: (m.lin(x), 2 * m.p), lin=nn.Linear(3, 3), p=weight(3, 3)), torch.randn(5, 3)
    assert_matches_loop(model, x, modes=("auto", "low"), losses=lambda output, dim: losses_of(output[0] @ output[1]))


def test_a_module_with_parameters_may_use_a_row_of_another_one():
    inner = Net(lambda m: m.table * 1.0, table=weight(3, 3))
    model = Net(lambda m, x: m.lin(x) @ m.inner() * m.p, lin=nn.Linear(3, 3), inner=inner, p=weight(3))
    assert_matches_loop(model, torch.randn(5, 4, 3), modes=("auto", "low"))
