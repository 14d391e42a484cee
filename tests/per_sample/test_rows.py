"""Rows of several samples, as of ids[mask], count for the samples that they belong to: in every step, in every form."""

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
    losses_of,
    norms_by_loop,
    norms_in_batch,
    weight,
)
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from torchzero_clip import register_rule
from torchzero_clip.per_sample.rules.registry import RULES

B, T, W = 4, 3, 4
ONE_EACH = [(0, 1), (1, 0), (2, 2), (3, 1)]
UNEVEN = [(0, 1), (0, 2), (2, 0), (3, 1)]
ONE_SAMPLE = [(1, 0), (1, 2)]
FEWER, MORE = UNEVEN[:3], [*UNEVEN, (1, 0), (1, 1), (3, 2)]


def added(rows, mask):
    return torch.zeros(len(mask), W, dtype=rows.dtype).index_add(0, mask.nonzero()[:, 0], rows)


def using(use, **held):
    """Uses layers, and has a head."""
    return Net(lambda m, *data: m.head(use(m, *data)), **held, head=nn.Linear(W, 2)).double()


def selecting(name):
    """Uses a layer on selected rows, and adds the rows of each sample."""
    use, layer = USES[name]
    return using(lambda m, *data: added(use(m.layer, *data), data[2]), layer=layer())


def scale():
    return Net(lambda m, x: torch.tanh(x * m.weight), weight=weight(W))


def matrix():
    """A parameter that is used for more than arithmetic."""
    return Net(lambda m, x: x * m.weight.outer(m.weight).sum(0)[None].cumsum(1), weight=weight(W))


class Registered(Net):
    pass


def registered():
    return Registered(scale().call, weight=weight(W))


def words():
    return nn.Embedding(9, W)


def behind(layer):
    return nn.Sequential(words().requires_grad_(False), layer)


def in_two_parts(layer, ids, x, mask):
    late = torch.arange(T) > 0
    first, then = mask & ~late, mask & late
    order = torch.cat([first.nonzero()[:, 0], then.nonzero()[:, 0]])
    rows = layer(torch.cat([ids[first], ids[then]]))
    return rows[order.argsort(stable=True)]


USES = {
    "an embedding": (lambda layer, ids, x, mask: layer(ids[mask]), words),
    "ids that were changed": (lambda layer, ids, x, mask: layer((ids[mask] + 1).clamp(max=7).long()), words),
    "a cut": (lambda layer, ids, x, mask: layer(ids[:, 0:][mask][0:]), words),
    "data": (lambda layer, ids, x, mask: layer(x[mask]), lambda: nn.Linear(W, W)),
    "data, all dimensions": (lambda layer, ids, x, mask: layer(x[mask, :]), lambda: nn.Linear(W, W)),
    "outputs of a layer": (lambda layer, ids, x, mask: layer[1](layer[0](x)[mask]), lambda: twice(nn.Linear)),
    "a frozen embedding": (lambda layer, ids, x, mask: layer(ids[mask]), lambda: behind(nn.Linear(W, W))),
    "a layer norm": (lambda layer, ids, x, mask: layer(x[mask]), lambda: nn.LayerNorm(W)),
    "a convolution": (lambda layer, ids, x, mask: layer(x[mask][:, :, None])[:, :, 0], lambda: nn.Conv1d(W, W, 1)),
    "a bare parameter": (lambda layer, ids, x, mask: layer(x[mask]), scale),
    "a parameter by the generic rule": (lambda layer, ids, x, mask: layer(x[mask]), matrix),
    "a cell": (lambda layer, ids, x, mask: layer(x[mask]), lambda: nn.GRUCell(W, W)),
    "a recurrent layer": (
        lambda layer, ids, x, mask: layer(x[mask][:, None])[0][:, 0],
        lambda: nn.GRU(W, W, batch_first=True),
    ),
    "a registered rule": (lambda layer, ids, x, mask: layer(x[mask]), registered),
    "a bag": (lambda layer, ids, x, mask: layer(torch.stack([ids, ids + 1], 2)[mask]), lambda: nn.EmbeddingBag(9, W)),
    "masked_select": (lambda layer, ids, x, mask: layer(ids.masked_select(mask)), words),
    "nonzero": (lambda layer, ids, x, mask: layer(ids[mask.nonzero(as_tuple=True)]), words),
    "where": (lambda layer, ids, x, mask: layer(ids[torch.where(mask)]), words),
    "index_select": (
        lambda layer, ids, x, mask: layer(ids.flatten().index_select(0, mask.flatten().nonzero().squeeze(1))),
        words,
    ),
    "an array of NumPy": (lambda layer, ids, x, mask: layer(ids[mask.numpy()]), words),
    "names of arguments": (
        lambda layer, ids, x, mask: layer(
            torch.cat(tensors=[ids.flatten().index_select(dim=0, index=mask.flatten().nonzero().squeeze(1))], dim=0)
        ),
        words,
    ),
    "a table": (lambda layer, ids, x, mask: layer((torch.arange(9) % 8)[ids[mask]]), words),
    "two parts": (in_two_parts, words),
    "repeats": (lambda layer, ids, x, mask: layer(ids[:, 0].repeat_interleave(mask.sum(1), 0)), words),
    "two of each sample": (
        lambda layer, ids, x, mask: layer(ids.repeat(1, 2)[mask.repeat(1, 2)].view(len(ids), -1)).sum(1),
        words,
    ),
}
BY_SAMPLE = {"a registered rule"}


def twice(kind):
    return nn.ModuleList([kind(W, W), kind(W, W)])


@pytest.fixture
def _rule():
    register_rule(Registered, lambda module, grad, x: {"weight": grad * x * (1 - torch.tanh(x * module.weight) ** 2)})
    yield
    del RULES[Registered]


pytestmark = pytest.mark.usefixtures("_rule")


def mask_of(places):
    mask = torch.zeros(B, T, dtype=torch.bool)
    mask[tuple(zip(*places, strict=True))] = True
    return mask


def batch(places):
    return torch.randint(0, 8, (B, T)), torch.randn(B, T, W, dtype=torch.float64), mask_of(places)


def step_of(form, model, **settings):
    """A function of a batch, which takes a step and returns the norms."""
    step = FORMS[form](model, **settings)
    return lambda data: step(lambda model: losses_of(model(*data)))[0]


FORMS = {
    "backward": by_backward,
    "unchecked": partial(by_backward, verify="never"),
    "classic": by_classic_form,
    "two passes": by_two_passes,
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", USES)
def test_rows_are_those_of_their_samples_also_if_there_are_as_many(name, form):
    model = selecting(name)
    step = step_of(form, model)
    for places in (ONE_EACH,) if name == "two of each sample" else (UNEVEN, ONE_EACH, UNEVEN, FEWER, MORE, ONE_SAMPLE):
        before, data = [p.grad for p in model.parameters()], batch(places)
        if name in BY_SAMPLE and places is not ONE_EACH:
            several = r"'layer.*(got rows of several samples.*layer\(x\)\[mask\]|its samples are not in dimension 0)"
            with pytest.raises((ValueError, RuntimeError), match=several):
                step(data)
            assert all(p.grad is g for p, g in zip(model.parameters(), before, strict=True))
        else:
            assert_close(step(data), norms_by_loop(model, *data))


@pytest.mark.parametrize("places", [ONE_EACH, UNEVEN, MORE], ids=["one each", "uneven", "more"])
def test_whole_is_a_way_out(places):
    model = selecting("a bare parameter")
    data = batch(places)
    assert_close(step_of("backward", model, whole=(Net,))(data), norms_by_loop(model, *data))


def with_words(use):
    return using(use, emb=words(), lin=nn.Linear(W, W), frozen=words().requires_grad_(False))


def placed(net, ids, x, mask):
    return torch.zeros_like(x).masked_scatter(mask[:, :, None], net.frozen(ids[mask])).sum(1)


def set_in_place(net, ids, x, mask):
    result = torch.zeros_like(x)
    result[mask] = net.lin(x)[mask]
    return result.sum(1)


def restored(net, ids, x, mask):
    """Two frozen experts, which take some samples each."""
    first = mask[:, 1]
    order = torch.cat([first.nonzero()[:, 0], (~first).nonzero()[:, 0]])
    return torch.cat([net.frozen(ids[first, 0]), -net.frozen(ids[~first, 0])])[order.argsort()]


RIGHT = {
    "selected from the output": lambda net, ids, x, mask: added(net.emb(ids)[mask], mask),
    "put back": placed,
    "set in place": set_in_place,
    "split by sample": lambda net, ids, x, mask: torch.stack(
        [rows.sum(0) for rows in net.frozen(ids[mask]).split(mask.sum(1).tolist())]
    ),
    "padded": lambda net, ids, x, mask: pad_sequence(
        net.frozen(ids[mask]).split(mask.sum(1).tolist()), batch_first=True
    ).sum(1),
    "experts that restore the order": restored,
    "a position of each sample": lambda net, ids, x, mask: net.lin(x)[torch.arange(len(x)), mask.int().argmax(1)],
    "the first word": lambda net, ids, x, mask: net.lin(x[torch.arange(len(x)), (ids < 9).nonzero()[::T, 1]]),
    "all samples": lambda net, ids, x, mask: net.emb(ids[(ids < 9).all(1)]).sum(1),
    "shifted ids": lambda net, ids, x, mask: net.emb(F.pad(ids[:, :-1], (1, 0))).sum(1),
    "dropped classes": lambda net, ids, x, mask: net.emb(torch.where(mask[:, 0], 8, ids[:, 0])),
    "positions of the mask": lambda net, ids, x, mask: (net.emb(mask.cumsum(1)) * mask[:, :, None]).sum(1),
    "positions": lambda net, ids, x, mask: (net.emb(torch.arange(T)) + x).sum(1),
    "times": lambda net, ids, x, mask: net.lin(torch.outer(ids[:, 0], torch.arange(W)).to(x.dtype).cos()),
    "some positions": lambda net, ids, x, mask: net.lin(x[:, torch.tensor([True, False, True])]).sum(1),
    "sorted words": lambda net, ids, x, mask: net.emb(ids.sort(1).values).sum(1),
}


@pytest.mark.parametrize("form", ["backward", "classic"])
@pytest.mark.parametrize("name", RIGHT)
def test_right_models_that_select_raise_no_alarm(name, form):
    model = with_words(RIGHT[name])
    step = step_of(form, model)
    for places in (UNEVEN, ONE_EACH, MORE):
        data = batch(places)
        assert_close(step(data), norms_by_loop(model, *data))


def test_sequences_may_come_first():
    model = with_words(
        lambda net, ids, x, mask: torch.zeros_like(x[0]).index_add(0, mask.nonzero()[:, 1], net.emb(ids[mask]))
    )

    def given(places):
        return [value.transpose(0, 1) for value in batch(places)]

    with clip(model, batch_first=False, verify="never") as clipper:
        for places in (UNEVEN, ONE_EACH, MORE):
            data = given(places)
            expected = norms_by_loop(model, *data, batch_dim=1, losses=lambda output, _: losses_of(output))
            assert_close(clipper.backward(losses_of(model(*data))).norms, expected)


UNKNOWN = {
    "a function of the user": lambda net, ids, x, mask: (
        net.lin(Reversed.apply(net.lin(x).flatten(0, 1))).sum() + x.sum(1)
    ),
}


FOUND = {
    "distinct words": lambda net, ids, x, mask: net.emb(ids.unique()).sum() + net.lin(x).sum(1),
    "noise": lambda net, ids, x, mask: net.lin(torch.linspace(-1, 2, B * W, dtype=x.dtype).view(B, W)),
    "numbers": lambda net, ids, x, mask: net.lin(torch.tensor(x[:, 0].tolist(), dtype=x.dtype)),
}
"""What only a probe tells."""


class Reversed(torch.autograd.Function):
    """Moves rows by code that no function of torch shows."""

    @staticmethod
    def forward(ctx, x):
        return torch.from_numpy(x.numpy()[::-1].copy())

    @staticmethod
    def backward(ctx, grad):
        return grad.flip(0)


def test_one_sample_is_known_behind_any_function():
    model = Net(lambda m, x: m.head(Reversed.apply(m.lin(x).flatten(1))), lin=nn.Linear(W, W), head=nn.Linear(T * W, 2))
    x = torch.randn(1, T, W, dtype=torch.float64)
    assert_close(step_of("backward", model.double())([x]), norms_by_loop(model, x))


@pytest.mark.parametrize("count", [1, B])
def test_rows_in_turn_may_be_behind_the_positions(count):
    def forward(m, x):
        rows = x.flatten(0, 1).transpose(0, 1)
        return m.head(m.lin(rows).tanh()).transpose(0, 1).unflatten(0, (len(x), -1))

    model = Net(forward, lin=nn.Linear(W, W), head=nn.Linear(W, 2)).double()
    x = torch.randn(count, 2, T, W, dtype=torch.float64)
    with clip(model, verify="never") as clipper:
        assert_close(clipper.backward(losses_of(model(x))).norms, norms_by_loop(model, x))


def test_positions_of_an_empty_batch_are_no_samples():
    net = with_words(lambda m, ids, x, mask: m.lin(m.emb(ids) + m.emb(torch.arange(T))).sum(1))
    data = [part[:0] for part in batch(ONE_EACH)]
    with clip(net) as clipper:
        assert clipper.backward(losses_of(net(*data))).norms.shape == (0,)
    assert not any(param.grad.any() for param in net.parameters() if param.requires_grad)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", [*UNKNOWN, *FOUND])
def test_rows_of_unknown_samples_are_found_or_refused(name, form):
    model, data = with_words((UNKNOWN | FOUND)[name]), batch(ONE_EACH)
    expected = norms_in_batch(model, *data)
    if name in FOUND:
        assert_close(step_of(form, model)(data), expected)
        return
    with pytest.raises(RuntimeError, match="mixes samples"):
        step_of(form, model)(data)
    assert all(param.grad is None for param in model.parameters())


def test_a_forward_that_was_interrupted_leaves_nothing_behind():
    def forward(net, ids, x, mask):
        if interrupt:
            raise KeyboardInterrupt
        return net.emb(ids).sum(1)

    interrupt, model = [True], with_words(forward)
    with clip(model) as clipper:
        with pytest.raises(KeyboardInterrupt):
            model(*batch(UNEVEN))
        interrupt.clear()
        data = batch(UNEVEN)
        assert_close(clipper.backward(losses_of(model(*data))).norms, norms_by_loop(model, *data))
    assert torch._C._len_torch_function_stack() == 0


def test_rows_of_all_samples_are_refused_in_a_block_of_rows():
    def forward(m, x, edges):
        return m.nodes(x)[:2] + m.edges(edges).sum(0)

    model = Net(forward, nodes=nn.Linear(3, 2), edges=nn.Linear(3, 2))
    nodes, edges = torch.randn(5, 3), torch.randn(7, 3)
    refused = pytest.raises(RuntimeError, match=r"the losses of samples 0, 1 change the gradient of one row of 'edges'")
    with clip(model) as clipper, clipper.rows(torch.tensor([0, 0, 1, 1, 1]), batch_size=2), refused:
        clipper.backward(model(nodes, edges).sum(1))


def test_nodes_in_a_model_of_one_layer_get_the_line_to_write():
    def forward(m, nodes, of):
        return torch.zeros(2, 2).index_add(0, of, m.layer(nodes))

    model, nodes, of = Net(forward, layer=nn.Linear(3, 2)), torch.randn(6, 3), torch.tensor([0, 0, 1, 1, 1, 1])
    line = r"saw 6 samples, the batch has 2.* `with clipper.rows\(sample_of_row, batch_size=2\):`"
    with clip(model) as clipper, pytest.raises(ValueError, match=line):
        clipper.backward(model(nodes, of).sum(1))
    with clip(model) as clipper, clipper.rows(of, batch_size=2):
        norms = clipper.backward(model(nodes, of).sum(1)).norms
    # both rows of the weight get the sum of the nodes, and both entries of the bias their number
    sums, counts = (torch.stack([x[of == i].sum(0) for i in range(2)]) for x in (nodes, torch.ones(6, 1)))
    expected = (2 * torch.cat([sums, counts], dim=1).square().sum(1)).sqrt()
    assert_close(norms, expected, rtol=1e-5)  # in float32


def test_nodes_and_edges_are_found_from_the_output():
    def forward(m, nodes, edges, of):
        messages = m.edge(nodes[edges])
        return torch.zeros(2, 4).index_add(0, of, m.node(torch.zeros_like(nodes).index_add(0, edges, messages)))

    model = Net(forward, edge=nn.Linear(4, 4), node=nn.Linear(4, 4))
    nodes, edges, of = torch.randn(5, 4), torch.tensor([0, 1, 1, 3, 4, 4, 2]), torch.tensor([0, 0, 1, 1, 1])
    expected = norms_in_batch(model, nodes, edges, of)
    with clip(model) as clipper:
        losses_of(model(nodes, edges, of)).mean().backward()
        assert_close(clipper.clip_and_accumulate(batch_size=2).norms, expected, rtol=1e-5)


def test_the_classic_form_warns_where_nodes_may_be_taken_for_samples():
    model = Net(lambda m, nodes, edges: m.lin(nodes).index_add(0, edges, nodes[edges]), lin=nn.Linear(4, 4))
    nodes, edges = torch.randn(5, 4), torch.tensor([0, 1, 1, 3, 4, 4, 2])
    with clip(model) as clipper:
        losses_of(model(nodes, edges)).mean().backward()
        with pytest.warns(UserWarning, match="each of 5 rows was taken for a sample"):
            assert len(clipper.clip_and_accumulate().norms) == 5
        losses_of(model(nodes, edges)).mean().backward()
        clipper.clip_and_accumulate(batch_size=5)  # whoever says so is not warned
        losses_of(model(nodes, edges[:5])).mean().backward()
        clipper.clip_and_accumulate()


def test_calls_with_several_numbers_of_rows_raise_also_where_gradients_are_kept():
    model = Net(lambda m, rows: torch.cat([m.lin(part).sum(0, keepdim=True) for part in rows]), lin=nn.Linear(3, 3))
    with clip(model, keep_grad_samples=True) as clipper:
        losses_of(model([torch.randn(2, 3), torch.randn(4, 3)])).mean().backward()
        with pytest.raises(ValueError, match=r"'lin' \(Linear\) saw [24] samples, the batch has 3\."):
            clipper.clip_and_accumulate(batch_size=3)


def test_a_forgotten_block_of_rows_is_named():
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    with clip(model) as clipper:
        losses = torch.zeros(2).index_add(0, torch.tensor([0, 0, 1, 1, 1]), model(torch.randn(5, 3)).squeeze(1))
        with pytest.raises(ValueError, match=r"saw 5 samples, the batch has 2\..*clipper\.rows\(.*batch_size=2\)"):
            clipper.backward(losses)


ALONE = {
    "bags": (lambda m, x: m.layer(x.long().flatten().abs(), torch.tensor([0, 2, 5])), nn.EmbeddingBag(9, W)),
    "sequences": (lambda m, x: m.layer(x.view(2, T, W))[0], nn.LSTM(W, W, batch_first=True)),
    "another order": (lambda m, x: m.layer(x[0].flip(0).roll(1, 1)), nn.Linear(W, W)),
    "no rows": (lambda m, x: m.layer(x[x > 9].view(-1, W)).sum() + m.layer(x), nn.Linear(W, W)),
    "values without samples": (
        lambda m, x: m.layer(torch.arange(5)).square().sum() + m.layer(torch.arange(6) - 0).sum() + x,
        nn.Embedding(9, W),
    ),
    "a weight": (lambda m, x: (x[0] @ m.layer).tanh().sum() + m.layer.expand(2, W, W).square().mean(), weight(W, W)),
}


@pytest.mark.parametrize("way", [by_backward, by_classic_form])
@pytest.mark.parametrize("name", ALONE)
def test_all_rows_of_a_batch_of_one_sample_are_its_own(name, way):
    use, layer = ALONE[name]
    model, x = Net(lambda m, x: use(m, x).square().sum()[None], layer=layer).double(), torch.randn(1, 2 * T, W).double()
    params = list(model.parameters())
    norm = torch.stack([grad.norm() for grad in torch.autograd.grad(model(x).sum(), params)]).norm()
    step = way(model)
    for _ in range(2):
        assert_close(step(lambda m: m(x))[0], norm[None])
