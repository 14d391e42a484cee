"""LSTM, GRU and RNN equal torch's own, and one backward per sample, padded and packed."""

import copy
import itertools
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from per_sample.harness import (
    Net,
    assert_close,
    assert_matches_loop,
    by_backward,
    by_classic_form,
    by_two_passes,
    clip,
    frozen,
    loop,
    losses_of,
    norms_by_loop,
    norms_in_batch,
    norms_of,
    total_of,
    with_low_memory,
)
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pack_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

B, T, W, H = 4, 5, 3, 2
LENGTHS = torch.tensor([2, 5, 1, 4])
KINDS = {"lstm": nn.LSTM, "gru": nn.GRU, "tanh": nn.RNN, "relu": partial(nn.RNN, nonlinearity="relu")}
INPUTS = ("batch first", "sequences first", "packed")
STATES = ("none", "given", "trained")
READOUT = torch.linspace(-1, 2, T * 2 * H, dtype=torch.float64).view(T, 2 * H)


def run(rnn, x, lengths, hx, inputs):
    """The output of a recurrent layer, and its last states with the samples first."""
    x = x if rnn.batch_first else x.transpose(0, 1)
    if inputs == "packed":
        x = pack_padded_sequence(x, lengths, batch_first=rnn.batch_first, enforce_sorted=False)
    output, last = rnn(x, hx)
    if inputs == "packed":
        output = pad_packed_sequence(output, batch_first=rnn.batch_first)[0]
    last = last if isinstance(last, tuple) else (last,)
    output = output if rnn.batch_first else output.transpose(0, 1)
    return output, [state.transpose(0, 1) for state in last]


def first_states(m, y):
    """A first state for each sample from the data, or from layers that train; None without."""
    if m.states == "none":
        return None
    shape = len(y), m.rnn.num_layers * (1 + m.rnn.bidirectional), H
    given = [y.repeat(1, shape[1]), 2 * y.repeat(1, shape[1])][: 1 + isinstance(m.rnn, nn.LSTM)]
    states = given if m.states == "given" else [layer(y) for layer in m.first]
    states = [state.view(shape).transpose(0, 1).contiguous() for state in states]
    # torch takes a list too
    return (tuple(states) if m.states == "given" else states) if isinstance(m.rnn, nn.LSTM) else states[0]


def model_of(kind, *, inputs="batch first", states="none", **settings):
    """A recurrent layer, whose output and last states are returned, with their gradients also to its first states."""
    rnn = KINDS[kind](W, H, batch_first=inputs != "sequences first", **settings)
    width = H * rnn.num_layers * (1 + rnn.bidirectional)
    first = [nn.Linear(H, width) for _ in range(1 + isinstance(rnn, nn.LSTM)) if states == "trained"]

    def forward(m, x, lengths, y):
        return run(m.rnn, x, lengths, first_states(m, y), inputs)

    return Net(forward, rnn=rnn, first=nn.ModuleList(first), states=states).double()


def of_all(results, batch_dim=0):
    """One loss for each sample, which needs the outputs and the last states."""
    output, last = results
    losses = (output * READOUT[: output.shape[1], : output.shape[2]]).sum((1, 2)) + 0.3 * output.square().sum((1, 2))
    return losses + sum((i + 1) * (state.sin() * (i + 2)).sum((1, 2)) for i, state in enumerate(last))


def data():
    scale = torch.linspace(0.3, 2, B, dtype=torch.float64)[:, None]
    x = torch.randn(B, T, W, dtype=torch.float64) * scale[:, None]
    return x, LENGTHS, torch.randn(B, H, dtype=torch.float64)


def assert_right(model, batch, forms=(by_backward, with_low_memory), losses=of_all):
    """Outputs are those of torch, and norms and clipped sums those of one backward per sample."""
    grads = loop(copy.deepcopy(model), batch, losses=losses)
    norms = total_of(norms_of(grads))
    limit, output = norms.median().item() or 1.0, model(*batch)
    factors = (limit / (norms + 1e-6)).clamp(max=1)
    for form in forms:
        twin = copy.deepcopy(model)

        def each(twin):
            result = twin(*batch)
            torch.testing.assert_close(result, output, rtol=1e-12, atol=1e-12)
            return losses(result)

        total, param_norms = form(twin, limit)(each)
        assert_close(total, norms, rtol=1e-10)
        for name, param in twin.named_parameters():
            if name in grads:
                assert_close(param_norms[name], norms_of(grads)[name], rtol=1e-10)
                assert_close(param.grad, torch.tensordot(factors, grads[name], 1) / len(norms), rtol=1e-10)
            else:
                assert param.grad is None


SETTINGS = KINDS, INPUTS, STATES, (1, 2), (False, True), (False, True)
SOME = [k for k in itertools.product(*(range(len(values)) for values in SETTINGS)) if sum(k) % 3 == 0]
"""A third of all combinations, with every combination of any four settings."""


@pytest.mark.parametrize(
    ("kind", "inputs", "states", "layers", "both", "bias"),
    [tuple(list(values)[i] for i, values in zip(k, SETTINGS, strict=True)) for k in SOME],
)
def test_all_settings_equal_torch_and_one_backward_per_sample(kind, inputs, states, layers, both, bias):
    model = model_of(kind, inputs=inputs, states=states, num_layers=layers, bidirectional=both, bias=bias)
    assert_right(model, data())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("inputs", INPUTS)
def test_the_classic_form_and_two_passes(kind, inputs):
    assert_right(model_of(kind, inputs=inputs, states="trained"), data(), (by_classic_form, by_two_passes))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "names",
    [
        *(("weight_ih_l0",), ("weight_hh_l0",), ("bias_ih_l0",), ("bias_hh_l0",), ("weight_ih_l1", "weight_hh_l1")),
        ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0"),
    ],
)
def test_frozen_parameters_get_no_gradient(kind, names):
    for inputs in ("batch first", "packed"):
        model = model_of(kind, inputs=inputs, num_layers=2)
        frozen(model.rnn, *names)
        assert_right(model, data(), (by_backward,))


@pytest.mark.parametrize("kind", KINDS)
def test_weights_that_layers_share(kind):
    model = model_of(kind, num_layers=3)
    model.rnn.weight_hh_l2 = model.rnn.weight_hh_l1 = model.rnn.weight_hh_l0
    model.rnn.bias_hh_l1 = model.rnn.bias_ih_l1
    assert_right(model, data())


@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_inputs_and_first_states_are_those_of_torch(kind, inputs):
    model, (x, lengths, y) = model_of(kind, inputs=inputs, states="given", num_layers=2, bidirectional=True), data()
    found = []
    for attached in (False, True):
        leaves = [x.clone().requires_grad_(), y.clone().requires_grad_()]
        if attached:
            clipper = clip(model)
        losses = of_all(model(leaves[0], lengths, leaves[1]))
        alone = torch.autograd.grad(losses.sum(), leaves, retain_graph=True)
        clipper.backward(losses) if attached else losses.sum().backward()
        assert_close(alone, [leaf.grad for leaf in leaves], rtol=1e-12)
        found.append(alone)
    assert_close(*found, rtol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_dropout_draws_the_random_numbers_of_torch(kind, inputs, both, dtype):
    model = model_of(kind, inputs=inputs, num_layers=3, dropout=0.4, bidirectional=both)
    batch = [x.to(dtype) if x.is_floating_point() else x for x in data()]
    model, ends = model.to(dtype), []
    torch.manual_seed(0)
    output, params = model(*batch), list(model.parameters())
    ends.append(torch.get_rng_state())
    rows = [torch.autograd.grad(loss, params, retain_graph=True) for loss in of_all(output)]
    expected = norms_of({i: torch.stack(column) for i, column in enumerate(zip(*rows, strict=True))})
    clipper, error = clip(model), 1e-4 if dtype == torch.float32 else 1e-10
    torch.manual_seed(0)
    again = model(*batch)
    ends.append(torch.get_rng_state())
    torch.testing.assert_close(again, output, rtol=error, atol=error)
    assert torch.equal(*ends)
    assert_close(clipper.backward(of_all(again)).norms, total_of(expected), rtol=error, check_dtype=False)


def test_dropout_of_zero_one_layer_and_eval_draw_none():
    x = torch.randn(B, T, W)
    for settings in ({"dropout": 0.0, "num_layers": 2}, {"dropout": 0.5, "num_layers": 2}):
        model = nn.GRU(W, H, batch_first=True, **settings).train(not settings["dropout"])
        state = torch.get_rng_state()
        with clip(model):
            model(x)
        assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_samples_that_are_not_finite_do_not_change_the_others(kind, inputs):
    model, batch = model_of(kind, inputs=inputs, states="trained", num_layers=2, bidirectional=True), data()
    others = torch.tensor([0, 2, 3])
    right = copy.deepcopy(model)
    expected = clip(right, 0.5, loss_reduction="sum").backward(of_all(right(*[x[others] for x in batch])))
    batch[0][1, 0] = torch.nan
    result = clip(model, 0.5, loss_reduction="sum").backward(of_all(model(*batch)))
    assert result.nonfinite.tolist() == [False, True, False, False]
    assert_close(result.norms[others], expected.norms, rtol=1e-12)
    for param, twin in zip(model.parameters(), right.parameters(), strict=True):
        assert_close(param.grad, twin.grad, rtol=1e-12, atol=1e-12)


def proved_lengths(model, lengths):
    """The lengths of sequences in whose steps a proof ran. Steps 1, 2, 4, ... are left out."""
    found = []
    with clip(model, verify="never") as clipper:
        for length in lengths:
            calls, x = [], torch.randn(B, length, W, dtype=torch.float64)
            losses = losses_of(model(x))
            losses.register_hook(calls.append)
            assert_close(clipper.backward(losses).norms, norms_by_loop(model, x))
            found += [length] * (len(calls) > 1)
    return found


LENGTHS_OF_STEPS = 7, 5, 6, 9, 7, 11, 1  # with 1, each sample has one row, which is another kind of size


@pytest.mark.parametrize("both", [False, True], ids=["forward", "both directions"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_proof_holds_for_sequences_of_other_lengths(kind, both):
    rnn = KINDS[kind](W, H, 2, batch_first=True, bidirectional=both)
    model = Net(lambda m, x: m.head(m.rnn(x)[0].tanh()).sum(1), rnn=rnn, head=nn.Linear(H * (1 + both), 3)).double()
    assert proved_lengths(model, LENGTHS_OF_STEPS) == [7, 1]


def test_a_loop_of_cells_has_another_graph_for_each_length():
    def forward(m, x):
        state = torch.zeros(len(x), H, dtype=x.dtype)
        for row in x.unbind(1):
            state = m.cell(row, state)
        return m.head(state)

    model = Net(forward, cell=nn.GRUCell(W, H), head=nn.Linear(H, 3)).double()
    assert proved_lengths(model, LENGTHS_OF_STEPS) == [7, 5, 6, 9, 11, 1]


def test_samples_that_mix_behind_another_length_are_found():
    def forward(m, x):
        h = m.rnn(x)[0]
        return m.head(h - h.mean(0) if x.shape[1] == 6 else h).sum(1)

    model = Net(forward, rnn=nn.LSTM(W, H, batch_first=True), head=nn.Linear(H, 3)).double()
    with pytest.raises(RuntimeError, match=r"change the gradient of one row of 'rnn'"):
        proved_lengths(model, [5, 7, 6])


@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_called_twice_and_then_skipped(kind, inputs):
    rnn = KINDS[kind](W, W, batch_first=inputs != "sequences first")

    def forward(m, x, lengths, y):
        if not m.uses:
            return m.head(x.sum(1))
        x, _ = run(m.rnn, x, lengths, None, inputs)
        x, (last, *_) = run(m.rnn, x, lengths, None, inputs)
        return m.head(x.sum(1) + last.sum(1))

    model = Net(forward, rnn=rnn, head=nn.Linear(W, 2), uses=True).double()
    clipper = clip(model)
    for uses in (True, False, True):
        model.uses, batch = uses, data()
        expected = loop(copy.deepcopy(model), batch)
        result = clipper.backward(losses_of(model(*batch)))
        for name, norms in result.param_norms.items():
            assert_close(norms, norms_of(expected)[name], rtol=1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_zero_and_batches_of_no_samples(kind):
    model = KINDS[kind](W, H, 2, batch_first=True, bidirectional=True)
    clipper = clip(model)
    for count in (B, 0):
        result = clipper.backward((model(torch.randn(count, T, W))[0] * 0).sum((1, 2)))
        assert torch.equal(result.norms, torch.zeros(count))
        assert torch.equal(result.factors, torch.ones(count))
        assert all(torch.equal(param.grad, torch.zeros_like(param)) for param in model.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_the_last_state_alone_may_be_used(kind):
    def forward(m, x):
        last = m.rnn(x)[1]
        return (last[-1] if isinstance(last, tuple) else last)[-1]

    model = Net(forward, rnn=KINDS[kind](W, H, 2, batch_first=True, bidirectional=True)).double()
    assert_matches_loop(model, torch.randn(B, T, W), modes=("auto", "low", "kept"))


@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_outputs_may_be_changed_in_place(kind, inputs):
    def forward(m, x, lengths):
        x = x if m.rnn.batch_first else x.transpose(0, 1)
        if inputs == "packed":
            output = m.rnn(pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False))[0]
            output.data.mul_(2).relu_()
            output = pad_packed_sequence(output, batch_first=True)[0]
        else:
            output = m.rnn(x)[0].mul_(2).relu_()
        output = output if m.rnn.batch_first else output.transpose(0, 1)
        return (output * READOUT[: output.shape[1], :H]).sum((1, 2))

    rnn = KINDS[kind](W, H, batch_first=inputs != "sequences first")
    model, (x, lengths, _) = Net(forward, rnn=rnn).double(), data()
    expected = total_of(norms_of(loop(copy.deepcopy(model), (x, lengths), losses=lambda losses, dim: losses)))
    assert_close(clip(model).backward(model(x, lengths)).norms, expected)


def test_inputs_and_parameters_that_are_changed_in_place_raise():
    model, x = nn.GRU(W, H), torch.randn(T, B, W)
    error = r"the input of GRU was changed in place|needed for gradient computation has been modified"
    for change in (x.zero_, model.weight_hh_l0.detach().zero_):
        with clip(model, batch_first=False) as clipper:
            losses = model(x)[0].sum((0, 2))
            change()
            with pytest.raises(RuntimeError, match=error):
                clipper.backward(losses)


WAYS = {
    "backward": by_backward,
    "unverified": partial(by_backward, verify="never"),
    "low memory": with_low_memory,
    "classic": by_classic_form,
    "two passes": by_two_passes,
}
SIZES = [(1, 3), (2, 1), (2, 3), (3, 3), (3, 2), (5, 7)]
"""Numbers of samples and of positions."""


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_attention_over_outputs_and_over_last_states(kind, way, batch_first):
    is_even = (list(KINDS).index(kind) + list(WAYS).index(way) + batch_first) % 2 == 0
    dtype = torch.float32 if is_even else torch.float64

    def forward(m, x):
        output, last = m.rnn(x)
        last = last[0] if isinstance(last, tuple) else last  # its samples are in dimension 1, whatever `batch_first` is
        last = last.transpose(0, 1) if batch_first else last
        summary = m.of_states(last, last, last)[0].mean(int(batch_first), keepdim=True)
        return m.of_outputs(output, output, output, need_weights=False)[0] + summary

    for (count, length), width in itertools.product(SIZES, (2, 4)):
        rnn = KINDS[kind](W, width, 2, batch_first=batch_first)
        attention = {
            name: nn.MultiheadAttention(width, 2, batch_first=batch_first) for name in ("of_outputs", "of_states")
        }
        model = Net(forward, rnn=rnn, **attention).double()
        x = torch.randn(*((count, length) if batch_first else (length, count)), W, dtype=torch.float64)
        expected = norms_of(loop(copy.deepcopy(model), (x,), 1 - int(batch_first)))
        step = WAYS[way](model.to(dtype), batch_first=batch_first)
        norms, param_norms = step(lambda model: losses_of(model(x.to(dtype)), 1 - int(batch_first)))  # noqa: B023
        close = {"rtol": 1e-3, "atol": 1e-4} if dtype == torch.float32 else {}
        assert_close(norms.double(), total_of(expected), **close)
        for name, each in param_norms.items():
            assert_close(each.double(), expected[name], **close)


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_frozen_layer_keeps_the_samples_apart(kind, way, batch_first, count):
    """Before attention, a trainable layer of its kind, and a linear layer, and by its outputs and its last states."""

    def forward(m, x):
        output, last = m.rnn(x)
        again, _ = m.after(output, last)
        last = last[0] if isinstance(last, tuple) else last
        last = last.transpose(0, 1) if batch_first else last
        return m.attention(output, output, output)[0] + again + m.linear(last).mean(int(batch_first), keepdim=True)

    model = Net(
        forward,
        rnn=KINDS[kind](W, 4, 2, batch_first=batch_first).requires_grad_(False),
        after=KINDS[kind](4, 4, 2, batch_first=batch_first),
        attention=nn.MultiheadAttention(4, 2, batch_first=batch_first),
        linear=nn.Linear(4, 4),
    ).double()
    for length in (1, 3, 4):
        x = torch.randn(*((count, length) if batch_first else (length, count)), W, dtype=torch.float64)
        expected = norms_of(loop(copy.deepcopy(model), (x,), 1 - int(batch_first)))
        step = WAYS[way](copy.deepcopy(model), batch_first=batch_first)
        norms, _ = step(lambda model: losses_of(model(x), 1 - int(batch_first)))  # noqa: B023
        assert_close(norms, total_of(expected))


@pytest.mark.parametrize("form", [by_backward, by_classic_form])
@pytest.mark.parametrize(
    "lengths", [(4, 2, 1), (1, 3, 2), (4,), (1, 1, 1), (3, 3)], ids=["sorted", "unsorted", "one", "short", "even"]
)
def test_a_packed_sequence_may_be_the_input_of_the_model(lengths, form):
    parts = [torch.randn(length, W, dtype=torch.float64) for length in lengths]
    model = nn.LSTM(W, H, bidirectional=True).double()
    in_order = list(lengths) == sorted(lengths, reverse=True)
    packed, rows = pack_sequence(parts, enforce_sorted=in_order), []
    for part in parts:
        loss = model(part[:, None])[0].square().sum()
        rows.append(torch.stack([grad.norm() for grad in torch.autograd.grad(loss, list(model.parameters()))]).norm())

    def losses(model):
        output, _ = model(packed)
        assert isinstance(output, PackedSequence)
        return pad_packed_sequence(output)[0].square().sum((0, 2))

    for batch_first in (True, False):
        norms, _ = form(model, batch_first=batch_first)(losses)
        assert_close(norms, torch.stack(rows))


def test_selected_rows_may_be_packed():
    def forward(m, x, mask):
        packed = pack_padded_sequence(x[mask], LENGTHS[: int(mask.sum())], True, False)
        rows = pad_packed_sequence(m.rnn(packed)[0], True)[0].sum(1)
        return torch.zeros(len(x), H, dtype=x.dtype).index_add(0, mask.nonzero()[:, 0], rows)

    model, mask = Net(forward, rnn=nn.GRU(W, H, batch_first=True)).double(), torch.zeros(B, 2, dtype=torch.bool)
    mask[:2] = True
    x = torch.randn(B, 2, T, W, dtype=torch.float64)
    with clip(model, verify="never") as clipper:
        norms = clipper.backward(losses_of(model(x, mask))).norms
    assert_close(norms, norms_in_batch(model, x, mask))


@pytest.mark.parametrize("kind", KINDS)
def test_checkpointed_layers(kind):
    model = model_of(kind, inputs="packed", num_layers=2)
    batch = data()
    expected = norms_of(loop(copy.deepcopy(model), batch, losses=of_all))
    result = clip(model).backward(of_all(checkpoint(model, *batch, use_reentrant=False)))
    assert_close(result.norms, total_of(expected), rtol=1e-10)


@pytest.mark.parametrize("inputs", INPUTS)
def test_projections(inputs):
    model = model_of("lstm", inputs=inputs, num_layers=2, bidirectional=True, proj_size=1)
    assert_right(model, data(), losses=lambda results, dim=0: (results[0].square() + results[0]).sum((1, 2)))


@pytest.mark.parametrize("kind", KINDS)
def test_half_precision(kind):
    model, x = KINDS[kind](W, H, batch_first=True), torch.randn(B, T, W)
    expected = norms_by_loop(model, x)
    with clip(model.bfloat16()) as clipper:
        norms = clipper.backward(losses_of(model(x.bfloat16())[0])).norms
    assert norms.dtype == torch.float32
    assert_close(norms, expected, rtol=3e-2)


def test_autocast():
    model, x = nn.LSTM(W, H, batch_first=True), torch.randn(B, T, W)
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            model(x)
    except RuntimeError as error:  # of oneDNN, on processors without bfloat16
        pytest.skip(f"torch has no LSTM under autocast here: {str(error)[:60]}")
    expected = norms_by_loop(model, x)
    with clip(model) as clipper:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            losses = losses_of(model(x)[0].float())
        norms = clipper.backward(losses).norms
    assert norms.dtype == torch.float32
    assert_close(norms, expected, rtol=3e-2)


def test_a_backward_under_autocast_rounds_no_more_than_that_of_torch():
    model, x, errors = nn.GRU(W, H, batch_first=True), torch.randn(B, T, W), []
    expected = norms_by_loop(model, x)
    for attached in (False, True):
        with clip(model) if attached else nullcontext() as clipper:
            losses = losses_of(model(x)[0])
            with torch.autocast("cpu", dtype=torch.bfloat16):
                if attached:
                    norms = clipper.backward(losses).norms
                else:
                    rows = [torch.autograd.grad(loss, [*model.parameters()], retain_graph=True) for loss in losses]
                    norms = torch.stack([torch.stack([grad.norm() for grad in row]).norm() for row in rows])
        errors.append((norms - expected).abs().max().item())
    assert errors[1] <= errors[0]


@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated")
def test_weights_made_in_a_hook_are_refused():
    model = nn.utils.weight_norm(nn.LSTM(W, H, batch_first=True), "weight_hh_l0")
    with clip(model) as clipper, pytest.raises(RuntimeError, match=r"weight_hh_l0_.. got a gradient from outside"):
        clipper.backward(model(torch.randn(B, T, W))[0].sum((1, 2)))


def test_wrong_sizes_raise_as_in_torch():
    model = nn.LSTM(W, H, batch_first=True)
    with clip(model):
        with pytest.raises(RuntimeError, match=r"input\.size"):
            model(torch.randn(B, T, W + 1))
        with pytest.raises(RuntimeError, match=r"Expected hidden\[0\] size"):
            model(torch.randn(B, T, W), (torch.zeros(1, B + 1, H), torch.zeros(1, B, H)))
        with pytest.raises(ValueError, match="without a batch dimension"):
            model(torch.randn(T, W))
