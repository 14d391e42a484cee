"""Inputs that all samples share are found by a proof, and a checkpoint runs its layers again as in the forward."""

import copy

import pytest
import torch
from per_sample.harness import (
    Net,
    assert_close,
    assert_step,
    by_backward,
    by_classic_form,
    by_two_passes,
    clip,
    first_tensor,
    loop,
    losses_of,
    norms_in_batch,
    norms_of,
    total_of,
    weight,
    with_low_memory,
)
from per_sample.layers import LAYERS
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from torchzero_clip import register_rule

W = 4


def row(m, x):
    return x * m.of_row(torch.ones(1, 1, dtype=x.dtype))


def table(m, x):
    return x + m.of_table(m.buffer[: x.shape[1]])


def computed(m, x):
    return x + m.of_table(torch.arange(x.shape[1] * W, dtype=x.dtype).sin().view(-1, W))


def positions(m, x):
    return x + m.embedding(torch.arange(x.shape[1]))


def distances(m, x):
    places = torch.arange(x.shape[1])
    return x + m.embedding((places[:, None] - places).abs()).sum(1)


STEPS = [(5, 3, False), (5, 3, False), (4, 6, False), (3, 3, False), (5, 3, True), (2, 5, False)]
KINDS = [row, table, computed, positions, distances]
WAYS = [by_backward, by_classic_form, by_two_passes, with_low_memory]


def make(kind):
    net = Net(
        lambda m, x: m.head(checkpoint(kind, m, m.first(x), use_reentrant=False)),
        first=nn.Linear(W, W),
        of_row=nn.Linear(1, W),
        of_table=nn.Linear(W, W),
        embedding=nn.Embedding(9, W),
        head=nn.Linear(W, 3),
    )
    net.register_buffer("buffer", torch.randn(9, W))
    return net.double()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_they_may_be_in_a_checkpoint(kind, way):
    model = make(kind)
    step = way(model)
    # other lengths, as many positions as samples once, and frozen parameters
    for count, length, is_frozen in STEPS:
        model.first.requires_grad_(not is_frozen)
        x = torch.randn(count, length, W, dtype=torch.float64)
        expected = norms_of(loop(copy.deepcopy(model), (x,)))
        norms, param_norms = step(lambda model, x=x: losses_of(model(x)))
        assert_close(norms, total_of(expected))
        for name, norm in param_norms.items():
            assert_close(norm, expected[name])


def beside(layer, inputs):
    """A model with a layer that gets nothing but a buffer, and so works on rows that all samples share."""

    def forward(m, x):
        output = first_tensor(m.layer(m.buffer))
        return m.first(x) * output.sum() + m.first(x).square() * output.square().mean()

    net = Net(forward, first=nn.Linear(W, 3), layer=layer)
    net.register_buffer("buffer", inputs)
    return net.double()


REFUSED = {"lstm, batch first", "lstm, two layers, both directions", "gru", "rnn behind linear", "transformer layer"}
"""Layers that refuse rows that all samples share."""

AS_MANY = {
    "layer norm, nothing to train",
    "bare parameters",
    "bare parameters behind linear",
    "padding in a module with bare parameters",
}
"""Where as many rows as samples are taken for theirs in the first step."""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("way", [by_backward, by_classic_form])
@pytest.mark.parametrize("rows", [1, 3, 5])
@pytest.mark.parametrize("name", LAYERS)
def test_every_layer_takes_rows_that_all_samples_share_or_refuses_them_by_name(name, rows, way):
    layer, inputs = (make() for make in LAYERS[name])
    model = beside(layer, inputs[:rows])
    step = way(model)
    for count in (5, 5, 3, 6):
        x = torch.randn(count, W, dtype=torch.float64)
        expected = norms_of(loop(copy.deepcopy(model), (x,)))

        def losses(model, x=x):
            return losses_of(model(x))

        # in the first step, PReLU takes rows for samples, because it is not known yet that the table is shared
        if name in REFUSED or (name == "prelu" and rows > 1) or (name in AS_MANY and rows == 5):
            with pytest.raises((RuntimeError, ValueError), match=r"(?s)(mixes samples|share them).*whole="):
                step(losses)
            return
        norms, param_norms = step(losses)
        assert_close(norms, total_of(expected))
        for param, norm in param_norms.items():
            assert_close(norm, expected[param])


def behind_shared(norm):
    """Data meets the rows of a shared table, and then the samples mix."""

    def forward(m, x):
        first = m.first(x)
        y = m.second(m.norm(m.of_table(m.buffer) + x))
        return first + y - y.mean(0)

    net = Net(forward, norm=norm, **{name: nn.Linear(W, W) for name in ("first", "of_table", "second")})
    net.register_buffer("buffer", torch.randn(5, W))
    return net.double()


@pytest.mark.parametrize("way", [by_backward, by_classic_form])
@pytest.mark.parametrize("norm", [nn.Identity(), nn.GroupNorm(2, W), nn.LayerNorm(W)])
def test_samples_that_mix_behind_a_shared_table_and_data_are_found(norm, way):
    step = way(behind_shared(norm))
    for _ in range(3):
        with pytest.raises(RuntimeError, match="mixes samples"):
            step(lambda model: losses_of(model(torch.randn(5, W, dtype=torch.float64))))


def assert_steps(model, *batches, **settings):
    """Steps with these batches are those of one backward per sample."""
    batch_dim = 0 if settings.get("batch_first", True) else 1
    clipper = clip(model, **settings)
    for x in batches:
        assert_step(clipper, model, x, batch_dim=batch_dim)


def doubles(*shape):
    return torch.randn(*shape, dtype=torch.float64)


@pytest.mark.parametrize("table", [(5, 2, W), (3, 2, W), (1, 3, W), (7, 1, W)])
def test_a_bare_weight_may_meet_a_shared_table_in_sequences_first(table):
    net = Net(
        lambda m, x: m.first(x) * m.bare(m.buffer).sum(),
        first=nn.Linear(W, W),
        bare=Net(lambda m, x: F.linear(x, m.weight), weight=weight(W, W)),
    )
    net.register_buffer("buffer", torch.randn(table))
    assert_steps(net.double(), doubles(7, 5, W), doubles(7, 5, W), doubles(7, 3, W), batch_first=False)


class MixesRows(nn.Linear):
    def forward(self, x):
        return F.linear(x + x.mean(0), self.weight)


def test_a_module_that_runs_whole_is_compared_with_more_than_one_row():
    """With one row it mixes nothing, which says nothing of the next steps."""
    net = Net(
        lambda m, x: m.first(x) * (1 + m.mix(m.of_table(m.table)).square().sum()),
        first=nn.Linear(W, W),
        of_table=nn.Linear(W, W),
        mix=MixesRows(W, W),
    ).double()
    clipper = clip(net, whole=("mix",))
    net.table = doubles(1, W)
    clipper.backward(losses_of(net(doubles(5, W))))
    net.table = doubles(3, W)
    with pytest.raises((RuntimeError, ValueError), match="mixes samples"):
        clipper.backward(losses_of(net(doubles(5, W))))


@pytest.mark.parametrize(
    "norm", [nn.GroupNorm(2, W), nn.InstanceNorm1d(W, affine=True), nn.BatchNorm1d(W).eval()], ids=type
)
def test_a_batch_without_samples_beside_a_shared_table(norm):
    table = torch.randn(3, W, 2) if isinstance(norm, nn.InstanceNorm1d) else torch.randn(3, W)
    model = beside(norm, table).eval()
    clipper = clip(model)
    for count in (5, 0, 4):
        x = doubles(count, W)
        if count:
            assert_step(clipper, model, x)
        else:
            assert clipper.backward(losses_of(model(x))).norms.shape == (0,)


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = weight(W)

    def forward(self, x, scale=None):
        return torch.tanh(x) * self.weight * (1 if scale is None else scale)


def gradients_of_scaled(module, grad, x, scale=None):
    grads = grad * torch.tanh(x) * (1 if scale is None else scale)
    return {"weight": grads.flatten(1, -2).sum(1) if grads.ndim > 2 else grads}


@pytest.mark.parametrize("count", [1, 2, 7])
@pytest.mark.parametrize(
    "use",
    [
        lambda m: m.layer(m.buffer),
        lambda m: m.layer(m.buffer, torch.arange(4.0, dtype=torch.float64)[None]),
        lambda m: m.layer(m.buffer, torch.tensor(2.0, dtype=torch.float64)),
        lambda m: m.layer(m.of_table(m.buffer)),
    ],
    ids=["alone", "with a row", "with a number", "behind a layer"],
)
def test_a_registered_rule_may_get_rows_that_all_samples_share(use, count):
    register_rule(Scaled, gradients_of_scaled)
    net = Net(
        lambda m, x: m.first(x) * (1 + use(m).square().sum()),
        first=nn.Linear(W, W),
        of_table=nn.Linear(W, W),
        layer=Scaled(),
    )
    net.register_buffer("buffer", torch.randn(count, W))
    assert_steps(net.double(), doubles(5, W), doubles(5, W), doubles(3, W))


@pytest.mark.parametrize("count", [1, 2, 5, 10])
def test_attention_among_rows_of_a_layer_that_all_samples_share(count):
    net = Net(
        lambda m, x: m.first(x) * (1 + m.attention(*[m.of_table(m.buffer)] * 3)[0].square().sum()),
        first=nn.Linear(W, W),
        of_table=nn.Linear(W, W),
        attention=nn.MultiheadAttention(W, 2, batch_first=True),
    )
    net.register_buffer("buffer", torch.randn(count, 3, W))
    assert_steps(net.double(), doubles(5, W), doubles(5, W), doubles(3, W))


def test_groups_of_one_value():
    net = nn.Sequential(nn.Linear(3, W), nn.GroupNorm(W, W), nn.Linear(W, 2)).double()
    x = doubles(5, 3)
    with_one = copy.deepcopy(net)
    result = clip(net).backward(losses_of(net(x)))
    each = norms_in_batch(with_one, x)  # torch refuses a single sample
    assert_close(result.norms, each)


def bags(mode, rows, **settings):
    net = beside(nn.EmbeddingBag(7, 5, mode=mode, **settings), torch.zeros(1))
    net.buffer = torch.randint(0, 7, (rows, 3))
    if mode == "sum":
        net.layer.register_forward_pre_hook(
            lambda layer, args, kwargs: (
                args,
                {"per_sample_weights": torch.arange(1.0, 3 * rows + 1).view(rows, 3).double()},
            ),
            with_kwargs=True,
        )
    return net


@pytest.mark.parametrize("rows", [1, 2, 5])
@pytest.mark.parametrize(("mode", "settings"), [("sum", {}), ("mean", {}), ("mean", {"padding_idx": 2})])
def test_bags_that_all_samples_share(mode, settings, rows):
    assert_steps(bags(mode, rows, **settings), *(doubles(count, W) for count in (5, 5, 3, 6)))


def test_bags_in_one_vector_that_all_samples_share_are_refused_by_name():
    model = beside(nn.EmbeddingBag(7, 5), torch.zeros(1))
    model.buffer = torch.randint(0, 7, (6,))
    model.layer.register_forward_pre_hook(lambda layer, args: (*args, torch.tensor([0, 2])))
    with pytest.raises(RuntimeError, match=r"(?s)'layer' \(EmbeddingBag\).*whole="):
        by_backward(model)(lambda model: losses_of(model(torch.randn(5, W, dtype=torch.float64))))
