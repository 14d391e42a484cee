"""Parameters that a module uses itself, on rows in no order: each row gets a copy, and the proof groups them again."""

import copy

import pytest
import torch
from per_sample.harness import (
    Net,
    assert_close,
    assert_step,
    by_backward,
    by_classic_form,
    clip,
    losses_of,
    norms_in_batch,
    weight,
)
from torch import distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from torchzero_clip import ConstantFlatClipper, PrivateGradientClipper

W = 4
FORMS = {"unchecked": lambda model: by_backward(model, verify="never"), "classic": by_classic_form}


def lin():
    return nn.Linear(W, W)


def pooled(x, mask, rows):
    return torch.zeros(len(x), W, dtype=x.dtype).index_add(0, mask.nonzero()[:, 0], rows)


def of_tokens(use, *, data=False, **held):
    """Uses a parameter on the tokens that a mask chooses, of data or of the output of a layer."""

    def forward(m, x, mask):
        tokens = x[mask] if data else m.first(x)[mask]
        return m.head(pooled(x, mask, use(m, tokens).tanh()))

    return Net(forward, first=lin(), head=lin(), **held)


def of_experts(use, **held):
    """Uses the parameters of an expert on its tokens, of which there may be none."""

    def forward(m, x, mask):
        tokens = m.first(x).flatten(0, 1)
        chosen, out = m.router(tokens).argmax(-1), torch.zeros_like(tokens)
        for i in range(3):
            index = (chosen == i).nonzero()[:, 0]
            out = out.index_add(0, index, use(m, i, tokens[index]))
        return m.head(out.view(x.shape)).sum(1)

    return Net(forward, first=lin(), router=nn.Linear(W, 3), head=lin(), **held)


def shrinking(cell):
    """A cell over sequences of several lengths, the longest first, down to one."""

    def forward(m, x, mask):
        lengths = mask.sum(1)
        order = lengths.argsort(descending=True)
        x, lengths = x[order], lengths[order]
        states = [x.new_zeros(len(x), W) for _ in range(2)]
        for time in range(int(lengths.max())):
            count = int((lengths > time).sum())
            now = [state[:count] for state in states]
            found = (
                m.cell(x[:count, time], tuple(now))
                if isinstance(m.cell, nn.LSTMCell)
                else (m.cell(*_first(x, now, time)),)
            )
            states = [torch.cat([new, old[count:]]) for new, old in zip(found, states, strict=False)]
        return m.head(states[0][order.argsort()])

    return Net(forward, cell=cell, head=lin())


def _first(x, states, time):
    return x[: len(states[0]), time], states[0]


MODELS = {
    "a slope": lambda: of_tokens(lambda m, x: m.slope(x), slope=nn.PReLU(W)),
    "a slope of data": lambda: of_tokens(lambda m, x: m.slope(x), data=True, slope=nn.PReLU()),
    "a scale of data": lambda: of_tokens(lambda m, x: x * m.p, data=True, p=weight(W)),
    "a function of a parameter": lambda: of_tokens(lambda m, x: x * m.p.sigmoid(), p=weight(W)),
    "a condition": lambda: of_tokens(lambda m, x: torch.where(x > 0, x, m.p), p=weight(W)),
    "a linear function": lambda: of_tokens(lambda m, x: F.linear(x, m.p, m.b), p=weight(W, W), b=weight(W)),
    "a linear function of data": lambda: of_tokens(lambda m, x: F.linear(x, m.p), data=True, p=weight(W, W)),
    "a linear function of a normalized weight": lambda: of_tokens(
        lambda m, x: F.linear(x, F.normalize(m.p), m.b), p=weight(W, W), b=weight(W)
    ),
    "a frozen bias": lambda: of_tokens(
        lambda m, x: F.linear(x, m.p, m.b), p=weight(W, W), b=weight(W).requires_grad_(False)
    ),
    "a product": lambda: of_tokens(lambda m, x: x @ m.p.T, p=weight(W, W)),
    "a product with data": lambda: of_tokens(lambda m, x: x @ m.p, data=True, p=weight(W, W)),
    "a norm": lambda: of_tokens(lambda m, x: F.layer_norm(x, (W,), m.p, m.b), p=weight(W), b=weight(W)),
    "a bilinear layer": lambda: of_tokens(lambda m, x: m.inner(x, x.sin()), inner=nn.Bilinear(W, W, W)),
    "a cell": lambda: of_tokens(lambda m, x: m.cell(x, x.sin()), cell=nn.GRUCell(W, W)),
    "distances": lambda: of_tokens(lambda m, x: x * torch.cdist(x, m.p).sum(1, keepdim=True), p=weight(3, W)),
    "stacked experts": lambda: of_experts(
        lambda m, i, x: F.linear(x, m.p[i]).relu() + m.b[i], p=weight(3, W, W), b=weight(3, W)
    ),
    "lists of experts": lambda: of_experts(
        lambda m, i, x: F.linear(x, m.p[i]), p=nn.ParameterList([weight(W, W) for _ in range(3)])
    ),
    "slopes of experts": lambda: of_experts(
        lambda m, i, x: m.experts[i](x), experts=nn.ModuleList(nn.Sequential(lin(), nn.PReLU(W)) for _ in range(3))
    ),
    "GRU cell": lambda: shrinking(nn.GRUCell(W, W)),
    "LSTM cell": lambda: shrinking(nn.LSTMCell(W, W)),
}


def batches(sizes):
    for count, length in sizes:
        mask = torch.rand(count, length) < 0.5
        mask[torch.arange(count), torch.randint(length, (count,))] = True
        yield torch.randn(count, length, W, dtype=torch.float64), mask


def assert_right(model, sizes, form, **settings):
    own = copy.deepcopy(model)
    step = FORMS[form](own) if not settings else by_backward(own, **settings)
    for x, mask in batches(sizes):
        expected = norms_in_batch(model, x, mask)
        assert_close(step(lambda m, x=x, mask=mask: losses_of(m(x, mask)))[0], expected)


@pytest.mark.quick_cases(14)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", MODELS)
def test_a_parameter_on_rows_in_no_order_is_right(name, form):
    # as many samples as features, and twice as many rows as samples in one step
    assert_right(MODELS[name]().double(), [(2, 5), (4, 3), (2, 4), (3, 3)], form)


@pytest.mark.parametrize("kind", [nn.GRUCell, nn.LSTMCell])
def test_a_cell_that_runs_whole_may_get_one_row_of_the_batch(kind):
    assert_right(shrinking(kind(W, W)).double(), [(3, 4), (4, 4), (2, 5)], "unchecked", whole=(kind,))


def test_an_expert_without_tokens_gets_zeros():
    model = of_experts(lambda m, i, x: torch.where(x > 0, x, m.p[i]), p=weight(3, W)).double()
    model.router.bias.data = torch.tensor([9.0, 0, 0], dtype=torch.float64)
    assert_right(model, [(3, 2), (2, 2)], "unchecked")


def test_samples_that_a_parameter_on_rows_mixes_are_refused():
    model = of_tokens(lambda m, x: m.slope(x - x.mean(0)), slope=nn.PReLU()).double()
    (x, mask), *_ = batches([(3, 4)])
    with clip(model) as clipper, pytest.raises(RuntimeError, match="mixes samples"):
        clipper.backward(losses_of(model(x, mask)))


TABLES = {
    "of a layer": lambda m, t: m.layer(t),
    "of two layers": lambda m, t: m.second(m.layer(t).tanh()),
    "of a slope": lambda m, t: m.slope(t),
    "in a product": lambda m, t: t @ m.p,
    "in a linear function": lambda m, t: F.linear(t, m.p),
}


def with_table(use, make):
    held = {"layer": lin(), "second": lin(), "slope": nn.PReLU(W), "p": weight(W, W)}
    model = Net(lambda m, x: m.head((m.first(x) + use(m, make(m, x.shape[1]))).tanh()).sum(1), **held)
    model.first, model.head = lin(), lin()
    model.register_buffer("table", torch.randn(9, W))
    return model.double()


def waves(m, length):
    return torch.sin(torch.arange(length).double()[:, None] / torch.arange(1, W + 1))


def assert_sequences_right(model, sizes, form="unchecked"):
    own = copy.deepcopy(model)
    step = FORMS[form](own)
    for count, length in sizes:
        x = torch.randn(count, length, W, dtype=torch.float64)
        assert_close(step(lambda m, x=x: losses_of(m(x)))[0], norms_in_batch(model, x))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", TABLES)
def test_a_table_for_all_samples_that_was_learned_may_have_as_many_rows_as_samples(name, form):
    assert_sequences_right(with_table(TABLES[name], waves), [(3, 4), (3, 3), (4, 4), (2, 2), (2, 4), (2, 3)], form)


def test_a_part_of_a_buffer_may_have_as_many_rows_as_samples_in_the_first_step():
    model = with_table(TABLES["of two layers"], lambda m, length: m.table[:length])
    assert_sequences_right(model, [(3, 3), (3, 3), (4, 2), (2, 2)])


def test_positions_that_select_rows_of_a_parameter_may_be_as_many_as_samples():
    forward = lambda m, x: m.head((m.first(x) + m.p[torch.arange(x.shape[1])]).tanh()).sum(1)  # noqa: E731
    assert_sequences_right(Net(forward, first=lin(), head=lin(), p=weight(9, W)).double(), [(3, 3), (3, 2), (2, 2)])


def test_layers_that_all_get_several_samples_are_not_taken_for_layers_of_a_table():
    model = Net(
        lambda m, x, mask: pooled(x, mask, m.second(m.first(x[mask]).tanh())), first=lin(), second=lin()
    ).double()
    x, mask = torch.randn(4, 5, W).double(), torch.arange(20).view(4, 5) % 3 != 0
    with clip(model) as clipper, pytest.raises(RuntimeError, match="mixes samples"):
        clipper.backward(losses_of((z := model(x, mask)) - z.mean(0)))


def test_a_table_that_is_not_the_same_in_the_next_step_is_refused():
    for use in (TABLES["of a layer"], TABLES["in a product"]):
        model = with_table(use, lambda m, length: torch.randn(length, W, dtype=torch.float64))
        with clip(model) as clipper:
            clipper.backward(losses_of(model(torch.randn(3, 4, W).double())))
            with pytest.raises(RuntimeError, match="mixes samples"):
                clipper.backward(losses_of(model(torch.randn(3, 4, W).double())))


def test_a_table_among_the_arguments_of_the_model_is_refused():
    model = Net(lambda m, x, t: m.head(m.first(x) + t @ m.p), first=lin(), head=lin(), p=weight(W, W)).double()
    x, table = torch.randn(3, 4, W).double(), torch.randn(4, W).double()
    with clip(model) as clipper, pytest.raises(RuntimeError, match=r"mixes samples.*Net"):
        clipper.backward(losses_of(model(x, table)))


def test_a_layer_of_a_table_may_get_samples():
    def forward(m, x):
        return m.head(x.mean(1) + m.layer(waves(m, 4)).sum(0)) if x.ndim == 3 else m.head(m.layer(x))

    model = Net(forward, layer=lin(), head=lin()).double()
    with clip(model) as clipper:
        for shape in ((3, 4, W), (3, W), (3, 4, W)):
            assert_step(clipper, model, torch.randn(shape, dtype=torch.float64))


def test_groups_of_rows_may_have_a_dimension_as_large_as_the_batch():
    def use(m, x):
        return F.layer_norm(x.view(-1, 2, 2), (2, 2), m.p).flatten(1)

    model = of_tokens(use, p=weight(2, 2)).double()
    mask = torch.tensor([[1, 1, 0, 1], [0, 1, 1, 0]]).bool()
    for form in FORMS.values():
        x, step = torch.randn(2, 4, W).double(), form(copy.deepcopy(model))
        assert_close(step(lambda m, x=x: losses_of(m(x, mask)))[0], norms_in_batch(model, x, mask))


def test_a_function_of_a_parameter_and_of_a_tensor_that_was_changed_later_is_refused():
    def use(m, x):
        scale = m.p * m.table
        m.table.add_(1.0)
        return x * scale

    model = of_tokens(use, p=weight(W)).double()
    model.register_buffer("table", torch.ones(W, dtype=torch.float64))
    (x, mask), *_ = batches([(3, 4)])
    with clip(model) as clipper, pytest.raises(RuntimeError, match="modified by an inplace operation"):
        clipper.backward(losses_of(model(x, mask)))


def test_a_module_without_samples_that_is_called_alone_is_refused():
    model = Net(lambda m, x: x @ m.inner(), inner=Net(lambda m: m.lin(m.p), lin=lin(), p=weight(W, W)))
    with clip(model), pytest.raises(ValueError, match="without a common batch dimension"):
        model.inner()


def test_linear_functions_of_data_and_of_tables_in_private_training():
    """All samples share a table, which no proof finds out there."""
    of_data = Net(lambda m, x: m.head(F.linear(x, m.p)), head=lin(), p=weight(W, W)).double()
    for model in (of_data, with_table(TABLES["in a linear function"], waves)):
        x = torch.randn(3, 4, W).double()
        expected = norms_in_batch(model, x)
        clipper = PrivateGradientClipper(model, ConstantFlatClipper(1.0), noise_multiplier=0.0, expected_batch_size=3)
        assert_close(clipper.backward(losses_of(model(x))).norms, expected)


@pytest.mark.slow
def test_a_product_with_a_table_in_a_sharded_model(tmp_path):
    """There too, no proof finds out what all samples share."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = with_table(lambda m, t: t * m.scale, waves)
        model.scale = nn.Parameter(torch.linspace(0.5, 2, W).double())
        x = torch.randn(3, 4, W).double()
        expected = norms_in_batch(model, x)
        dist.init_device_mesh("cpu", (1,))
        with clip(fully_shard(model)) as clipper:
            assert_close(clipper.backward(losses_of(model(x))).norms, expected)
    finally:
        dist.destroy_process_group()
