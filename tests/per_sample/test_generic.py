"""Modules that are run sample by sample: state, hooks, random numbers, and what they must not do."""

import copy
import random
import threading

import pytest
import torch
from per_sample.harness import (
    Net,
    assert_close,
    assert_matches_loop,
    assert_step,
    batch,
    clip,
    loop,
    losses_of,
    norms_of,
    total_of,
    weight,
)
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrize


def test_modules_run_once():
    def forward(m, x):
        m.calls.add_(1)
        m.state.add_(1)
        m.names.append("call")
        return m.inner(x) * m.scale

    model, hooks = Net(forward, scale=weight(5), inner=nn.Linear(5, 5), names=[], state=torch.zeros(())), []
    model.register_buffer("calls", torch.zeros(()))
    model.inner.register_forward_hook(lambda module, args, output: hooks.append(1))
    _clipper = clip(model)
    for i in range(1, 3):
        model(torch.randn(4, 5))
        assert (int(model.calls), int(model.state), len(model.names), len(hooks)) == (i, i, i, i)


def test_modules_that_keep_their_outputs_can_be_compared_for_every_shape():
    def forward(m, x):
        m.last.append(x * m.scale)
        return m.last[-1]

    model = Net(forward, scale=weight(5, value=1.0), last=[])
    model(torch.randn(4, 5))
    clipper = clip(model)
    for count in (4, 3):
        x = torch.randn(count, 5)
        assert_close(clipper.backward(model(x).sum(1)).norms, x.norm(dim=1), rtol=1e-5)


def test_a_module_may_draw_numbers_from_a_generator_of_its_own():
    def forward(m, x):
        return x * m.scale * (torch.rand(x.shape, generator=m.generator) > 0.5)

    model = Net(forward, scale=weight(5, value=1.0), generator=torch.Generator().manual_seed(0))
    clipper, x = clip(model, whole=(Net,)), torch.randn(4, 5)
    output = model(x)
    assert_close(clipper.backward(output.sum(1)).norms, output.detach().norm(dim=1), rtol=1e-5)


def test_a_module_that_mixes_samples_and_cannot_run_three_times_is_found():
    runs = []

    def forward(m, x):
        runs.append(1)
        if len(runs) > 2:
            raise RuntimeError("the third run")
        return x * m.scale + x.mean(0, keepdim=True)

    model = Net(forward, scale=weight(5, value=1.0))
    with clip(model, whole=(Net,)), pytest.raises(ValueError, match="it mixes samples"):
        model(torch.randn(4, 5))


@pytest.mark.parametrize("whole", [(), (Net,)])
def test_random_numbers_of_generic_modules_are_drawn_once_in_every_forward(whole):
    model, x, states = Net(lambda m, x: F.dropout(x) * m.scale, scale=weight(3, value=1.0)).double(), batch(), []
    clipper = clip(model, whole=whole)
    for _ in range(2):
        torch.manual_seed(0)
        state = torch.get_rng_state()
        output = model(x)  # what was kept times 2 times 1: the gradient of the sum with respect to the scale
        states.append(torch.get_rng_state())
        assert not torch.equal(states[-1], state)
        assert_close(clipper.backward(output.sum(1)).norms, output.detach().norm(dim=1))
        assert len({tuple(row) for row in (output == 0).tolist()}) > 1
    assert torch.equal(*states)


def test_an_input_that_only_looks_like_a_batch_is_none():
    for length in (5, 4):
        model, x = Net(lambda m, x, bias: x * m.scale + bias, scale=weight(3, value=1.0)), torch.randn(5, length, 3)
        with clip(model) as clipper:
            norms = clipper.backward(model(x, torch.randn(length, 3)).sum((1, 2))).norms
        assert_close(norms, x.sum(1).norm(dim=1), rtol=1e-5)


def test_backward_hooks_inside_modules_run_by_vmap_are_refused_by_name():
    model = Net(lambda m, x: m.embedding(x) * m.scale, embedding=nn.Embedding(6, 3), scale=weight(3))
    model.embedding.register_full_backward_hook(lambda module, grad_input, grad_output: None)
    _clipper = clip(model, whole=(Net,))
    with pytest.raises(ValueError, match=r"'embedding' in Net has a backward hook"):
        model(torch.tensor([[0, 1, 2], [0, 0, 3]]))


@pytest.mark.parametrize("count", [4, 5])
def test_a_recurrent_network_may_have_another_order_of_dimensions(count):
    def forward(m, x):
        return m.head(m.rnn(x.transpose(0, 1))[0]).transpose(0, 1)

    model = Net(forward, rnn=nn.LSTM(3, 4), head=nn.Linear(4, 2))
    assert_matches_loop(model, torch.randn(count, 5, 3), modes=("auto", "low"))


def test_nested_tensors_are_refused_by_name():
    parts = [torch.randn(2, 3), torch.randn(4, 3)]
    for layer in (nn.Linear(3, 2), nn.LayerNorm(3)):
        x = torch.nested.nested_tensor(parts, layout=torch.jagged)
        with clip(layer), pytest.raises(ValueError, match=r"got a nested tensor: pad it, with x.to_padded_tensor"):
            layer(x)


@pytest.mark.parametrize("parametrized", [nn.utils.parametrizations.weight_norm, nn.utils.parametrizations.orthogonal])
def test_cached_parametrizations_get_their_gradients(parametrized):
    model = nn.Sequential(parametrized(nn.Linear(3, 3)), nn.Tanh(), nn.Linear(3, 1)).double()
    x = torch.randn(4, 3).double()
    norms = norms_of(loop(copy.deepcopy(model), [x]))
    with clip(model, 1e9) as clipper:
        for _ in range(2):
            with parametrize.cached():
                model[0](x).sum()
                result = clipper.backward(losses_of(model(x)))
            for name, norm in norms.items():
                assert_close(result.param_norms[name], norm)


def test_hooks_locks_and_random_numbers_of_python_may_be_in_a_module():
    lock = threading.Lock()  # cannot be copied
    model = Net(
        lambda m, x: m.inner(x * m.scale * (1 + random.random())), scale=weight(3), inner=nn.Linear(3, 3), held=lock
    ).double()
    x = torch.randn(4, 3).double()
    model.inner.register_forward_hook(lambda module, args, output: output * 2 if lock else output)
    model.inner.register_forward_pre_hook(lambda module, args: (args[0] * 3,))
    random.seed(1)
    losses, params = losses_of(model(x)), dict(model.named_parameters())
    rows = [torch.autograd.grad(loss, list(params.values()), retain_graph=True) for loss in losses]
    random.seed(1)
    with clip(model, 1e9) as clipper:
        result = clipper.backward(losses_of(model(x)))
    for name, column in zip(params, zip(*rows, strict=True), strict=True):
        assert_close(result.param_norms[name], torch.stack(column).flatten(1).norm(dim=1))


def used(use):
    """A clipper of a model that is run whole, and the model."""
    model = Net(use, lin=nn.Linear(4, 4)).double()
    return clip(model, 1e9, whole=(Net,)), model


def test_what_was_not_split_into_samples_is_refused():
    table = torch.randn(5, 4).double()
    clipper, model = used(lambda m, x: m.lin(x) + table)
    with clipper, pytest.raises(ValueError, match="something of the batch was not"):
        model(torch.randn(5, 4).double())


def test_a_mask_of_positions_that_are_as_many_as_samples_is_refused_at_first_and_shared_later():
    def forward(m, x, mask):
        return (m.lin(x) @ x.mT).masked_fill(mask, -1e9).softmax(-1) @ x

    def given(length):
        return torch.randn(5, length, 4).double(), torch.ones(length, length).triu(1).bool()

    clipper, model = used(forward)
    with clipper, pytest.raises(ValueError, match="among its arguments that all samples share"):
        model(*given(5))
    clipper, model = used(forward)
    with clipper:
        for length in (4, 5):
            x, mask = given(length)
            twin = copy.deepcopy(model)
            twin.call = lambda m, x, mask=mask: forward(m, x, mask)
            norms = norms_of(loop(twin, [x]))
            for key, found in clipper.backward(losses_of(model(x, mask))).param_norms.items():
                assert_close(found, norms[key])


def test_arguments_are_known_by_their_names():
    def forward(m, x, mask=None, cond=None):
        h = m.lin(x) if cond is None else m.lin(x) * cond[:, None]
        return h if mask is None else mask.to(h) @ h

    clipper, model = used(forward)
    with clipper:
        x, cond = torch.randn(5, 3, 4).double(), torch.randn(5, 4).double()
        clipper.backward(losses_of(model(x, mask=torch.ones(3, 3))))
        assert_step(clipper, model, x, None, cond, output=model(x, cond=cond))


def test_results_of_a_sample_that_are_written_into_a_tensor_of_all_are_right():
    def forward(m, x):
        table = torch.zeros(3, 3, dtype=x.dtype)
        table[torch.arange(3), torch.tensor([1, 2, 0])] = m.p
        return x @ table

    assert_matches_loop(Net(forward, p=weight(3)), torch.randn(5, 4, 3))


CHANGES = {
    "copy_": lambda p: p.copy_(2 * p),
    "a view": lambda p: p[1:].mul_(2),
    "arithmetic": lambda p: p.__iadd__(1),
    "an item": lambda p: p.__setitem__(0, 1.0),
}


@pytest.mark.parametrize("count", [1, 5])
@pytest.mark.parametrize("by_loop", [False, True])
@pytest.mark.parametrize("name", CHANGES)
def test_a_module_that_changes_its_parameter_is_refused_by_name_and_does_not_change_it(name, by_loop, count):
    def forward(m, x):
        x = x[:, x[0] > -9] if by_loop else x
        with torch.no_grad():
            CHANGES[name](m.p)
        return x * m.p

    model = Net(forward, p=weight(3))
    before = model.p.clone()
    with clip(model, whole=(Net,)), pytest.raises(ValueError, match=r"^Net changes a parameter in place"):
        model(torch.randn(count, 3))
    assert torch.equal(model.p, before)


def test_a_list_among_the_arguments_that_is_appended_to_is_refused():
    def forward(m, x, losses):
        losses.append(x.square().sum())
        return m.lin(x)

    clipper, model = used(forward)
    with clipper, pytest.raises(ValueError, match="changes a list or dict among its arguments"):
        model(torch.randn(5, 4).double(), [])


class Cache:
    """As those of transformers, which have this method."""

    def __init__(self, *values):
        self.values = list(values)

    def get_seq_length(self):
        return sum(value.shape[1] for value in self.values)

    def update(self, value):
        self.values.append(value)
        return torch.cat(self.values, 1)


def test_a_cache_may_be_empty_and_one_with_values_of_the_batch_is_refused():
    held = {"scale": weight(4), "inner": nn.Linear(4, 4)}
    model = Net(lambda m, x, cache: m.inner(cache.update(x * m.scale)), **held).double()
    x = torch.randn(5, 3, 4).double()
    expected = total_of(norms_of(loop(Net(lambda m, x: m.inner(x * m.scale), **held), [x])))
    with clip(model, whole=(Net,)) as clipper:
        assert_close(clipper.backward(losses_of(model(x, Cache()))).norms, expected)
        with pytest.raises(ValueError, match=r"^Net runs sample by sample, and got a cache.*use_cache=False"):
            model(x, Cache(x))
    # vmap cannot run it, and one by one, each sample would append to what the samples before it left
    model = Net(lambda m, x, cache: cache.update(m.gru(x)[0]).mean(1), gru=nn.GRU(4, 4, batch_first=True)).double()
    with clip(model, whole=(Net,)), pytest.raises(ValueError, match="use_cache=False"):
        model(x, Cache())


class Token(Net):
    """Has no samples among its arguments."""


def test_a_module_without_samples_is_compared_too():
    model = Net(lambda m, x: m.lin(x) * m.token(), lin=nn.Linear(4, 4), token=Token(lambda m: m.p * 2, p=weight(4)))
    for batch_first in (True, False):
        x = torch.randn(3, 5, 4)
        assert_matches_loop(model, x, batch_first=batch_first, whole=(Token,), modes=("auto", "low"))


@pytest.mark.parametrize(("kind", "states"), [(nn.GRUCell, 1), (nn.LSTMCell, 2)])
@pytest.mark.parametrize("shape", [(4,), (1, 4)])
def test_a_first_state_that_is_expanded_from_a_parameter_has_samples(kind, states, shape):
    def forward(m, x):
        state = tuple(p.expand(len(x), -1) for p in (m.first, m.second)[:states])
        for i in range(x.shape[1]):
            found = m.cell(x[:, i], state if states == 2 else state[0])
            state = found if states == 2 else (found,)
        return state[0]

    held = {"cell": kind(3, 4), "first": weight(*shape), "second": weight(*shape)}
    assert_matches_loop(Net(forward, **held), torch.randn(5, 3, 3), modes=("auto", "low", "kept"))
