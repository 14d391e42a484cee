"""Models as people write them, with as many samples as of anything else by chance: right without a line of the user."""

import copy

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
    norms_in_batch,
    weight,
)
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

T, W = 4, 4
FORMS = {
    "unchecked": lambda model: by_backward(model, verify="never"),
    "classic": by_classic_form,
    "two passes": by_two_passes,
}


def lin(given=W, wanted=W):
    return nn.Linear(given, wanted)


def data(count, *shape):
    return torch.randn(count, *shape, dtype=torch.float64)


def distances():
    return (torch.arange(T)[:, None] - torch.arange(T)).abs().double()


def sequences(count):
    return (data(count, T, W),)


def images(count):
    return (data(count, W, T, T),)


def padded(count):
    mask = torch.arange(T) >= torch.randint(1, T + 1, (count, 1))
    return data(count, T, W), mask


def graphs(count):
    """One graph of all samples: nodes, edges in both directions, and the sample of each node."""
    sizes = torch.randint(1, 4, (count,))
    of = torch.arange(count).repeat_interleave(sizes)
    first = sizes.cumsum(0) - sizes
    edges = [(first[i] + a, first[i] + b) for i in range(count) for a in range(sizes[i]) for b in range(sizes[i])]
    return data(len(of), W), torch.tensor(edges).T, of


def frozen(module):
    return module.requires_grad_(False)


def by_hand(m, x):
    """LoRA on rows of several samples."""
    rows = x.flatten(0, 1)
    return (m.base(rows) + m.up(m.down(rows))).view(x.shape)


def attention_with_padding(m, x, mask):
    h = x + m.first(x)
    h, _ = m.attention(h, h, h, key_padding_mask=mask, need_weights=False)
    return m.last(h)


def windows(m, x):
    """Shifted windows, as Swin has them."""
    h = m.first(x).roll((-1, -1), (1, 2))
    h = h.view(len(x), 2, T // 2, 2, T // 2, W).permute(0, 1, 3, 2, 4, 5).reshape(-1, (T // 2) ** 2, W)
    h = m.last(h).view(len(x), 2, 2, T // 2, T // 2, W).permute(0, 1, 3, 2, 4, 5).reshape(len(x), T, T, W)
    return h.roll((1, 1), (1, 2))


def heads(m, x):
    q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in m.qkv(x).chunk(3, -1))
    scores = (q @ k.transpose(-2, -1)).masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), -9.0)
    return m.last((scores.softmax(-1) @ v).transpose(1, 2).reshape(x.shape))


def capacity(m, x):
    """Experts with places, as in GShard: sums of products put tokens to places and back."""
    tokens = m.first(x)
    gates = m.router(tokens).softmax(-1)
    chosen = F.one_hot(gates.argmax(-1), 2)
    place = (chosen.cumsum(1) - 1).clamp(max=T - 1)
    dispatch = (F.one_hot(place, T) * chosen[..., None]).to(x.dtype)
    put = torch.einsum("bsec,bsm->ebcm", dispatch, tokens)
    done = torch.stack([expert(part) for expert, part in zip(m.experts, put, strict=True)])
    return torch.einsum("bsec,ebcm->bsm", dispatch * gates[..., None], done)


def convolved(m, nodes, edges, of):
    """A graph convolution with a bias, and the sum of the nodes of each sample."""
    source, target = edges
    degree = torch.zeros(len(nodes), dtype=nodes.dtype).index_add(0, target, torch.ones_like(target).to(nodes.dtype))
    h = m.first(nodes)
    weight = (degree[source] * degree[target]).rsqrt()
    h = torch.zeros_like(h).index_add(0, target, h[source] * weight[:, None]) + m.bias
    h = m.last(h.relu())
    return torch.zeros(int(of.max()) + 1, W, dtype=h.dtype).index_add(0, of, h)


def doubled(m, x):
    h = m.first(x)
    both = h.new_zeros(2 * len(h), *h.shape[1:])
    both[: len(h)], both[len(h) :] = h, h.tanh()
    return sum(m.last(both).chunk(2))


def in_turn(m, x):
    h = m.first(x)
    both = h.new_zeros(2 * len(h), *h.shape[1:])
    both[0::2], both[1::2] = h, h.tanh()
    return m.last(both).view(len(h), 2, *h.shape[1:]).sum(1)


def column_by_column(m, x):
    h, result = m.first(x), torch.empty_like(x)
    for i in range(T):
        result[:, i] = m.last(h[:, i]) + (result[:, i - 1].detach() if i else 0.0)
    return result


def changed_by_its_own_parts(m, x):
    h = m.first(x).clone()
    h[:, 0] += x[:, 1]
    h.view(-1, W)[::2] *= 0.5
    h[..., -1] = h[..., 0].detach()
    return m.last(h)


def constants_at_a_mask(m, x):
    h = m.first(x).clone()
    h[x < 0] = 0.5
    return m.last(h)


def lists_of_positions(m, x):
    h = m.first(x).clone()
    h[:, [0, 2]] = x[:, [1, 3]]
    h[[0]] = 0.5
    return m.last(h)


def some_tokens(m, x):
    """A mixture of depths: only some tokens of each sample run through a layer."""
    chosen = x.sum(-1).topk(2).indices.sort().values[..., None].expand(-1, -1, W)
    return m.last(x.scatter_add(1, chosen, m.first(x.gather(1, chosen))))


def pooled(m, x):
    of = torch.arange(len(x)).repeat_interleave(T)
    rows = m.first(x.flatten(0, 1))
    return m.last(torch.zeros_like(x[:, 0]).scatter_add(0, of[:, None].expand_as(rows), rows))


def spectrum(m, x):
    return m.last(torch.fft.fft(torch.fft.fft(m.first(x)), dim=1).real)


def cells_of_diagonals(m, x):
    return m.last(torch.diag_embed(m.first(x).mean(1)).reshape(-1, 1)).view(len(x), -1)


def buffers(m, x):
    """A tensor of zeros for each sample, with one row that is not zero."""
    result = []
    for row in m.first(x):
        result.append(row.new_zeros(T, W))
        result[-1][0] = row[0]
    return torch.stack([m.last(part) for part in result])


def put(i, row):
    return torch.zeros(T, W, dtype=row.dtype).index_copy(0, torch.tensor([i]), row)


def beside(i, rows):
    return [rows[0] if j == i else torch.zeros(W, dtype=rows.dtype) for j in range(T)]


MODELS = {
    "changed by its own parts": (changed_by_its_own_parts, sequences, {}),
    "constants at a mask": (constants_at_a_mask, sequences, {}),
    "lists of positions": (lists_of_positions, sequences, {}),
    "some tokens": (some_tokens, sequences, {}),
    "pooled": (pooled, sequences, {}),
    "spectrum": (spectrum, sequences, {}),
    "cells of diagonals": (cells_of_diagonals, sequences, {"last": lin(1, W)}),
    "distances": (lambda m, x: m.last(torch.cdist(m.first(x), x)), sequences, {}),
    "buckets": (lambda m, x: m.last(m.first(x) + torch.bucketize(x, torch.zeros(1).to(x))), sequences, {}),
    "InstanceNorm": (lambda m, x: m.last(m.norm(m.first(x)).movedim(1, -1)), images, {"norm": nn.InstanceNorm2d(W)}),
    "InstanceNorm with weights": (
        lambda m, x: m.last(m.norm(m.first(x)).movedim(1, -1)),
        images,
        {"norm": nn.InstanceNorm2d(W, affine=True)},
    ),
    "InstanceNorm by batch_norm": (
        lambda m, x: m.last(
            F.batch_norm(m.first(x).reshape(1, -1, T, T), None, None, training=True).view(-1, W, T, T).movedim(1, -1)
        ),
        images,
        {},
    ),
    "LoRA by hand": (by_hand, sequences, {"base": frozen(lin()), "down": lin(W, 2), "up": lin(2, W)}),
    "frozen attention": (
        attention_with_padding,
        padded,
        {"attention": frozen(nn.MultiheadAttention(W, 2, batch_first=True))},
    ),
    "normalized": (lambda m, x: m.last(F.normalize(m.first(F.normalize(x, dim=-1)), dim=-1)), sequences, {}),
    "einsum of data": (lambda m, x: m.last(torch.einsum("bij,bkj->bik", x, x)), sequences, {}),
    "einsum of positions": (
        lambda m, x: m.last(torch.einsum("bij,ik->bkj", m.first(x), torch.ones(T, T, dtype=x.dtype).triu())),
        sequences,
        {},
    ),
    "tensordot of data": (lambda m, x: m.last(torch.tensordot(x, torch.eye(W).to(x), 1)), sequences, {}),
    "windows": (windows, lambda count: (data(count, T, T, W),), {}),
    "attention by hand": (heads, sequences, {"qkv": lin(W, 3 * W)}),
    "halves": (doubled, sequences, {}),
    "halves in turn": (in_turn, sequences, {}),
    "column by column": (column_by_column, sequences, {}),
    "nodes of two": (
        lambda m, x: m.last(torch.cat([m.first(x), m.first(x).flip(1)]).view(2, -1, T, W)).sum(0),
        sequences,
        {},
    ),
    "numbers of samples": (
        lambda m, x: m.last(m.first(x) * torch.arange(1.0, len(x) + 1).to(x).view(-1, 1, 1)),
        sequences,
        {},
    ),
    "a tensor of numbers": (lambda m, x: m.last(m.first(x) * x.new_tensor([[1.0, 2.0, 3.0, 4.0]])), sequences, {}),
    "classes 0, 1, 2, ...": (  # each row is of its sample, though all of them look like positions
        lambda m, x, y: m.last((m.first(x) + m.table(y)).tanh()),
        lambda count: (data(count, W), torch.arange(count)),
        {"table": nn.Embedding(8, W)},
    ),
    "classes beside": (
        lambda m, x, y: m.last((m.first(x) * m.table(y).softmax(-1)).tanh()),
        lambda count: (data(count, W), torch.arange(count)),
        {"table": nn.Embedding(8, W)},
    ),
    "classes joined": (
        lambda m, x, y: m.last(torch.cat([m.first(x), m.table(y)], 1)[:, 2:-2]),
        lambda count: (data(count, W), torch.arange(count)),
        {"table": nn.Embedding(8, W)},
    ),
    "positions as an argument": (
        lambda m, x, at: m.last((m.first(x) + m.table(at)).tanh()),
        lambda count: (data(count, T, W), torch.arange(T)),
        {"table": nn.Embedding(8, W)},
    ),
    "upsampled": (lambda m, x: m.last(F.interpolate(m.first(x), scale_factor=2)[..., ::2, ::2]), images, {}),
    "another order behind a frozen encoder": (
        lambda m, x: m.last(m.first(e := m.encoder(x)).tanh() + m.first(e.flip(0)).flip(0)),
        sequences,
        {"encoder": nn.TransformerEncoderLayer(W, 1, W, 0.0, batch_first=True).requires_grad_(False).eval()},
    ),
    "another order behind frozen attention, positions first": (
        lambda m, x: (
            m.last(m.first(e := m.attend(*[x.transpose(0, 1)] * 3)[0]) + m.first(e.flip(1)).flip(1))
            .transpose(0, 1)
            .contiguous()
        ),
        sequences,
        {"attend": nn.MultiheadAttention(W, 1).requires_grad_(False).eval()},
    ),
    "a frozen batch norm": (
        lambda m, x: m.last(m.norm(m.first(x).mT).mT),
        sequences,
        {"norm": nn.BatchNorm1d(W).requires_grad_(False).eval()},
    ),
    "functions of elements": (lambda m, x: m.last(F.softshrink(m.first(x).atan()).sinh()), sequences, {}),
    "vmap along positions": (
        lambda m, x: m.last(torch.vmap(torch.tanh, in_dims=1)(m.first(x))).transpose(0, 1),
        sequences,
        {},
    ),
    "vmap of an index": (
        lambda m, x: m.last(torch.vmap(lambda row, at: row[at])(m.first(x), x.sum(-1).argsort(-1))),
        sequences,
        {},
    ),
    "masks of weights": (
        lambda m, x: torch.einsum("btw,twv->bv", m.last(m.first(x)), m.weight * m.mask),
        sequences,
        {"weight": weight(T, W, W), "mask": nn.Buffer(torch.ones(T, W, W))},
    ),
    "a checkpoint with a change in place": (
        lambda m, x: m.last(checkpoint(m.inner, m.first(x).flatten(0, 1), use_reentrant=False).view_as(x)),
        sequences,
        {"inner": nn.Sequential(lin(), nn.ReLU(inplace=True), lin())},
    ),
    "the larger one": (lambda m, x: m.last(torch.max(m.first(x), x)), sequences, {}),
    "slopes of positions": (  # which are one row also if there is one sample
        lambda m, x: m.last(torch.einsum("hts,bsw->bthw", m.slopes[:, None, None] * -distances()[None], m.first(x))),
        sequences,
        {"slopes": weight(2)},
    ),
    "users and items": (
        lambda m, user, item: (m.table(user) * m.last(m.items(item))).sum(-1, keepdim=True),
        lambda count: (torch.arange(count), torch.arange(count)),
        {"table": nn.Embedding(8, W), "items": nn.Embedding(8, W)},
    ),
    "cosine": (
        lambda m, x: m.last(F.cosine_similarity(m.first(x)[:, :, None], x[:, None], dim=-1)),
        sequences,
        {},
    ),
}


# models whose sizes tell wrong samples, if there are T of them
BY_CHANCE = {
    "sliding windows": (
        lambda m, x: m.last(m.first(x)),
        lambda count: (data(2 * count + T, W).unfold(0, T, 2)[:count].mT,),
    ),
    "steps and next steps": (
        lambda m, x, y: m.last(torch.cat([m.first(x), m.first(y)], -1)),
        lambda count: (lambda x: (x[:-1], x[1:]))(data(count + 1, W)),
    ),
    "weights of positions": (lambda m, x, w: m.last(w @ m.first(x)), lambda count: (data(count, T, W), data(T, T))),
    "sums over positions": (
        lambda m, x, w: m.last(torch.einsum("ts,bsd->btd", w, m.first(x))),
        lambda count: (data(count, T, W), data(T, T)),
    ),
    "a buffer for each sample": (buffers, sequences),
    "a padded sequence for each sample": (
        lambda m, x: torch.stack([m.last(m.first(F.pad(row[:1], (0, 0, 0, T - 1)))) for row in x]),
        sequences,
    ),
    "a row put into zeros for each sample": (
        lambda m, x: torch.stack([m.last(m.first(put(i, row[:1]))) for i, row in enumerate(x)]),
        sequences,
    ),
    "a row beside zeros for each sample": (
        lambda m, x: torch.stack([m.last(m.first(torch.stack(beside(i, row)))) for i, row in enumerate(x)]),
        sequences,
    ),
    "rows of a table of samples": (
        lambda m, x: m.last(F.embedding(torch.arange(len(x)).flip(0), m.first(x[:, 0]))).flip(0),
        sequences,
    ),
    "as many quantiles as samples": (
        lambda m, x: m.last(m.first(x).quantile(torch.linspace(0.1, 0.9, T).double(), 1)).transpose(0, 1),
        sequences,
    ),
    "one of as many quantiles as samples": (
        lambda m, x: m.last(m.first(x).nanquantile(torch.linspace(0.1, 0.9, T).double(), 1)[1]),
        sequences,
    ),
}


def made(name):
    torch.manual_seed(0)
    forward, inputs, held = MODELS[name]
    of_images = inputs is images
    layers = {"first": nn.Conv2d(W, W, 1) if of_images else lin(), "last": lin()}
    if name == "upsampled":
        layers["last"] = nn.Conv2d(W, W, 1)
    return Net(forward, **{**layers, **copy.deepcopy(held)}).double(), inputs


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", MODELS)
def test_norms_are_those_of_one_backward_for_each_sample(name, form):
    model, inputs = made(name)
    step = FORMS[form](copy.deepcopy(model))
    for count in (3, 4, 1, 5, 8):
        given = inputs(count)
        expected = norms_in_batch(model, *given)
        assert_close(step(lambda m, given=given: losses_of(m(*given)))[0], expected)


@pytest.mark.parametrize("name", BY_CHANCE)
def test_sizes_that_are_equal_by_chance_tell_nothing(name):
    forward, inputs = BY_CHANCE[name]
    torch.manual_seed(0)
    last = lin(2 * W) if name == "steps and next steps" else lin()
    model = Net(forward, first=lin(), last=last).double()
    given = inputs(T)
    expected = norms_in_batch(model, *given)
    step = by_backward(copy.deepcopy(model), verify="never")
    assert_close(step(lambda m: losses_of(m(*given)))[0], expected)
    assert_close(by_classic_form(model)(lambda m: losses_of(m(*given)))[0], expected)


def test_nodes_of_graphs_need_the_sample_of_each_node_only():
    model = Net(convolved, first=lin(), last=lin(), bias=weight(W)).double()
    own = copy.deepcopy(model)
    with clip(own, verify="always") as clipper:
        for count in (3, 4, 5, 8):
            nodes, edges, of = graphs(count)
            with clipper.rows(of, batch_size=count):
                losses = losses_of(own(nodes, edges, of))
            assert_close(clipper.backward(losses).norms, norms_in_batch(model, nodes, edges, of))


def test_numbers_that_had_other_values_are_of_samples():
    """Also in a module that runs whole. Positions stay positions."""

    def forward(m, x, kind, at):
        return m.last((m.first(x) + m.table(at)) * m.kinds(kind)[:, None])

    held = {"table": nn.Embedding(8, W), "kinds": nn.Embedding(8, W)}
    model = Net(forward, first=lin(), last=lin(), **held).double()
    for settings in ({}, {"whole": (Net,)}):
        step = by_backward(copy.deepcopy(model), verify="never", **settings)
        for kind in (torch.tensor([3, 1, 5]), torch.arange(3), torch.arange(2)):
            given = data(len(kind), T, W), kind, torch.arange(T)
            expected = norms_in_batch(model, *given)
            assert_close(step(lambda m, given=given: losses_of(m(*given)))[0], expected)


def joined(m, rows):
    hidden = m.first(torch.cat(rows)).tanh()
    return m.last(torch.stack([part.mean(0) for part in hidden.split([len(part) for part in rows])]))


def in_turn_of_samples(m, rows):
    return m.last(torch.cat([m.first(part).sum(0, keepdim=True) for part in rows]))


@pytest.mark.parametrize("forward", [joined, in_turn_of_samples])
@pytest.mark.parametrize("verify", ["never", "always"])
def test_sequences_in_a_list_may_have_one_length_by_chance(forward, verify):
    """The common length may equal the number of samples or not, and there may be one sequence."""
    model = Net(forward, first=lin(), last=lin()).double()
    step = by_backward(copy.deepcopy(model), verify=verify)
    for lengths in ((1, 3), (2, 1, 1, 1), (3, 3), (2, 2), (3,), (1, 1)):
        rows = [data(length, W) for length in lengths]
        expected = norms_in_batch(model, rows)
        assert_close(step(lambda m, rows=rows: losses_of(m(rows)))[0], expected)


def test_an_empty_batch_may_come_where_a_weight_of_a_submodule_is_used():
    model = Net(lambda m, x: F.linear(m.first(x).relu(), m.first.weight.T, m.bias), first=lin(), bias=weight(W))
    with clip(model.double()) as clipper:
        for count in (3, 0, 2):
            given = sequences(count)
            expected = norms_in_batch(model, *given) if count else torch.zeros(0, dtype=torch.float64)
            assert_close(clipper.backward(losses_of(model(*given))).norms, expected)


def sums_of_edges(m, nodes, edges, of):
    messages = m.first(nodes[edges[0]] - 2 * nodes[edges[1]]).tanh()
    return m.last(torch.zeros(int(of.max()) + 1, W, dtype=nodes.dtype).index_add(0, of[edges[1]], messages))


def attention(m, nodes, edges, of):
    h, (source, target) = m.first(nodes), edges
    weights = ((h * m.source).sum(-1)[source] + (h * m.target).sum(-1)[target]).exp()
    total = torch.zeros(len(h), dtype=h.dtype).index_add(0, target, weights)
    h = torch.zeros_like(h).index_add(0, target, h[source] * (weights / total[target])[:, None]) + m.bias
    return m.last(torch.zeros(int(of.max()) + 1, W, dtype=h.dtype).index_add(0, of, h.relu()) + m.table(of.bincount()))


GRAPHS = {
    "convolution": (convolved, ["bias"]),
    "attention": (attention, ["source", "target", "bias"]),
    "edges": (sums_of_edges, []),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_graphs_without_rows_are_found_by_a_probe(name):
    forward, own = GRAPHS[name]
    held = {"first": lin(), "last": lin(), "table": nn.Embedding(8, W), **{key: weight(W) for key in own}}
    model = Net(forward, **held).double()
    nodes = data(7, W)
    # as many edges as samples; sample 1 has no edge
    few = nodes[:4], torch.tensor([[0, 1, 3], [1, 0, 3]]), torch.tensor([0, 0, 1, 2])
    for verify in ("never", "always"):
        own = copy.deepcopy(model)
        with clip(own, verify=verify) as clipper:
            for given in (graphs(3), graphs(5), few, (nodes[:0], few[1][:, :0], few[2][:0]), graphs(3)):
                expected = norms_in_batch(model, *given) if len(given[2]) else torch.zeros(0)
                losses = losses_of(own(*given)) if len(given[2]) else own.first(given[0]).sum(1)
                assert_close(clipper.backward(losses).norms, expected.double())
