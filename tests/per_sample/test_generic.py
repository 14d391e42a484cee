"""Modules that are run sample by sample: embeddings in them, state, hooks and random numbers."""

import copy
import random
import threading

import pytest
import torch
from per_sample.harness import assert_close, assert_matches_loop, loop, losses_of, norms_of, total_of
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

from torchzero_clip import ConstantFlatClipper, PerSampleGradientClipper


class Table(nn.Module):
    def __init__(self, padding_idx):
        super().__init__()
        self.weight, self.padding = nn.Parameter(torch.randn(6, 3)), padding_idx

    def forward(self, x):
        return F.embedding(x, self.weight, padding_idx=self.padding)


class Indexed(nn.Embedding):
    def forward(self, x):
        return self.weight[x]


class WithEmbedding(nn.Module):
    def __init__(self, embedding):
        super().__init__()
        self.embedding, self.scale = embedding, nn.Parameter(torch.ones(3))

    def forward(self, x):
        return self.embedding(x) * self.scale


class Padded(nn.Module):
    def __init__(self, *shape):
        super().__init__()
        self.padding_idx, self.weight = 0, nn.Parameter(torch.randn(shape))

    def forward(self, x):
        return x @ self.weight if self.weight.ndim > 1 else x * self.weight


WORDS = torch.tensor([[0, 1, 2], [0, 0, 3], [4, 5, 0], [1, 1, 1]])


@pytest.mark.parametrize(
    "model",
    [
        Table(0),
        Table(-6),
        Table(None),
        Indexed(6, 3, padding_idx=0),
        WithEmbedding(nn.Embedding(6, 3, padding_idx=0)),
        WithEmbedding(nn.EmbeddingBag(6, 3, padding_idx=0)),
    ],
    ids=["function", "negative", "none", "indexed", "module", "bag"],
)
def test_padding_gets_a_gradient_where_torch_gives_it_one(model):
    assert_matches_loop(model, WORDS)


@pytest.mark.parametrize("shape", [(5, 5), (5,)])
@pytest.mark.parametrize("count", [4, 5])
def test_an_attribute_called_padding_idx_is_no_padding(shape, count):
    assert_matches_loop(Padded(*shape), torch.randn(count, 3, 5))


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale, self.inner = nn.Parameter(torch.ones(5)), nn.Linear(5, 5)
        self.register_buffer("calls", torch.zeros(()))
        self.names, self.state = [], torch.zeros(())

    def forward(self, x):
        self.calls.add_(1)
        self.state.add_(1)
        self.names.append("call")
        return self.inner(x) * self.scale


def test_modules_run_once():
    model, hooks = Counting(), []
    model.inner.register_forward_hook(lambda module, args, output: hooks.append(1))
    _clipper = PerSampleGradientClipper(model, ConstantFlatClipper(1.0))
    for i in range(1, 3):
        model(torch.randn(4, 5))
        assert (int(model.calls), int(model.state), len(model.names), len(hooks)) == (i, i, i, i)


class Remembering(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale, self.last = nn.Parameter(torch.ones(5)), []

    def forward(self, x):
        self.last.append(x * self.scale)
        return self.last[-1]


def test_modules_that_keep_their_outputs_can_be_compared_for_every_shape():
    model = Remembering()
    model(torch.randn(4, 5))
    clipper = PerSampleGradientClipper(model, ConstantFlatClipper(1.0))
    for count in (4, 3):
        x = torch.randn(count, 5)
        assert_close(clipper.backward(model(x).sum(1)).norms, x.norm(dim=1), rtol=1e-5)


def test_every_forward_draws_as_many_random_numbers():
    model, x, states = WithDropout(), torch.randn(4, 5), []
    _clipper = PerSampleGradientClipper(model, ConstantFlatClipper(1.0))
    for _ in range(2):
        torch.manual_seed(0)
        model(x)
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


class WithDropout(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(5))

    def forward(self, x):
        return F.dropout(x) * self.scale


class Shifted(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(5))

    def forward(self, x, shift, table):
        return x * self.scale + shift.sum() + table.sum()


def test_more_inputs_of_another_size_do_not_outvote_the_batch():
    model, x = Shifted().double(), torch.randn(4, 5).double()
    others = torch.randn(7).double(), torch.randn(7, 2).double()
    clipper = PerSampleGradientClipper(model, ConstantFlatClipper(1.0))
    losses_of(model(x, *others)).mean().backward()
    norms = clipper.clip_and_accumulate().norms
    for i in range(4):
        loss = losses_of(copy.deepcopy(model)(x[i : i + 1], *others)).sum()
        assert loss.isfinite()
        clipper.discard()
        assert_close(clipper.backward(losses_of(model(x[i : i + 1], *others))).norms[0], norms[i])


def test_backward_hooks_inside_modules_run_by_vmap_are_refused_by_name():
    model = WithEmbedding(nn.Embedding(6, 3))
    model.embedding.register_full_backward_hook(lambda module, grad_input, grad_output: None)
    _clipper = PerSampleGradientClipper(model, ConstantFlatClipper(1.0), whole=(WithEmbedding,))
    with pytest.raises(ValueError, match=r"'embedding' in WithEmbedding has a backward hook"):
        model(WORDS)


class Tagger(nn.Module):
    """A recurrent network with its own order of dimensions, and a layer on all of its positions."""

    def __init__(self, *, turned):
        super().__init__()
        self.turned, self.rnn, self.head = turned, nn.LSTM(3, 4), nn.Linear(4, 2)

    def forward(self, x):
        output = self.rnn(x.transpose(0, 1))[0]
        return self.head(output.transpose(0, 1) if self.turned else output)


@pytest.mark.parametrize("count", [4, 5])
def test_a_recurrent_network_may_have_another_order_of_dimensions(count):
    assert_matches_loop(Tagger(turned=True), torch.randn(count, 5, 3))
    model = Tagger(turned=False)
    wrong = "saw 5 samples, the batch has 4" if count == 4 else "the loss of sample . gives 'head.weight'"
    refused = pytest.raises((ValueError, RuntimeError), match=wrong)
    with PerSampleGradientClipper(model, ConstantFlatClipper(1.0)) as clipper, refused:
        clipper.backward(losses_of(model(torch.randn(count, 5, 3)), 1))


@pytest.mark.parametrize("parametrized", [nn.utils.parametrizations.weight_norm, nn.utils.parametrizations.orthogonal])
def test_cached_parametrizations_get_their_gradients(parametrized):
    model = nn.Sequential(parametrized(nn.Linear(3, 3)), nn.Tanh(), nn.Linear(3, 1)).double()
    x = torch.randn(4, 3).double()
    norms = norms_of(loop(copy.deepcopy(model), [x]))
    with PerSampleGradientClipper(model, ConstantFlatClipper(1e9)) as clipper:
        for _ in range(2):
            with parametrize.cached():
                model[0](x).sum()
                result = clipper.backward(losses_of(model(x)))
            for name, norm in norms.items():
                assert_close(result.param_norms[name], norm)


class Holding(nn.Module):
    """What it holds cannot be copied."""

    def __init__(self, held):
        super().__init__()
        self.scale, self.inner, self.held = nn.Parameter(torch.ones(3)), nn.Linear(3, 3), held

    def forward(self, x):
        return self.inner(x * self.scale * (1 + random.random()))


def test_hooks_locks_and_random_numbers_of_python_may_be_in_a_module():
    lock = threading.Lock()
    model, x = Holding(lock).double(), torch.randn(4, 3).double()
    model.inner.register_forward_hook(lambda module, args, output: output * 2 if lock else output)
    model.inner.register_forward_pre_hook(lambda module, args: (args[0] * 3,))
    random.seed(1)
    norms = norms_of(loop_of_one_forward(model, x))
    random.seed(1)
    with PerSampleGradientClipper(model, ConstantFlatClipper(1e9)) as clipper:
        result = clipper.backward(losses_of(model(x)))
    for name, norm in norms.items():
        assert_close(result.param_norms[name], norm)


def loop_of_one_forward(model, x):
    losses, params = losses_of(model(x)), dict(model.named_parameters())
    rows = [torch.autograd.grad(loss, list(params.values()), retain_graph=True) for loss in losses]
    return {name: torch.stack(column) for name, column in zip(params, zip(*rows, strict=True), strict=True)}


def test_settings_are_those_of_the_call():
    model, x = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3)).double(), torch.randn(4, 3).double()
    model[1].eps = 0.5
    norms = total_of(norms_of(loop(copy.deepcopy(model), [x])))
    with PerSampleGradientClipper(model, ConstantFlatClipper(1.0)) as clipper:
        losses = losses_of(model(x))
        model[1].eps = 1e-5
        assert_close(clipper.backward(losses).norms, norms)


def test_a_model_that_gets_trainable_parameters_of_its_own_has_to_be_called_again():
    class Token(nn.Module):
        def __init__(self):
            super().__init__()
            self.token, self.head = nn.Parameter(torch.zeros(3), requires_grad=False), nn.Linear(3, 2)

        def forward(self, x):
            return self.head(x + self.token)

    model, x = Token().double(), torch.randn(4, 3).double()
    with PerSampleGradientClipper(model, ConstantFlatClipper(1.0)) as clipper:
        clipper.backward(losses_of(model(x)))
        model.token.requires_grad_(True)
        with pytest.raises(RuntimeError, match="call it once more"):
            model(x)
        norms = total_of(norms_of(loop(copy.deepcopy(model), [x])))
        assert_close(clipper.backward(losses_of(model(x))).norms, norms)


class Uses(nn.Module):
    """A module that runs whole."""

    def __init__(self, use):
        super().__init__()
        self.use, self.lin = use, nn.Linear(4, 4)

    def forward(self, *args, **kwargs):
        return self.use(self, *args, **kwargs)


def used(use):
    return PerSampleGradientClipper(Uses(use).double(), ConstantFlatClipper(1e9), whole=(Uses,))


def test_what_was_not_split_into_samples_is_refused():
    table = torch.randn(5, 4).double()
    with (
        used(lambda m, x: m.lin(x) + table) as clipper,
        pytest.raises(ValueError, match="something of the batch was not"),
    ):
        clipper._engine.attachment.model(torch.randn(5, 4).double())


def test_a_mask_of_positions_that_are_as_many_as_samples_is_refused_at_first_and_shared_later():
    def forward(m, x, mask):
        return (m.lin(x) @ x.mT).masked_fill(mask, -1e9).softmax(-1) @ x

    for lengths in ((5,), (4, 5)):
        with used(forward) as clipper:
            model = clipper._engine.attachment.model
            for length in lengths:
                x, mask = torch.randn(5, length, 4).double(), torch.ones(length, length).triu(1).bool()
                if lengths == (5,):
                    with pytest.raises(ValueError, match="among its arguments that all samples share"):
                        model(x, mask)
                    break
                norms = norms_of(loop(lambda_of(copy.deepcopy(model), mask), [x]))
                for key, found in clipper.backward(losses_of(model(x, mask))).param_norms.items():
                    assert_close(found, norms[key])


def lambda_of(model, mask):
    """The model with one mask for all samples."""
    model.forward = lambda x: type(model).forward(model, x, mask)
    return model


def test_arguments_are_known_by_their_names():
    def forward(m, x, mask=None, cond=None):
        h = m.lin(x) if cond is None else m.lin(x) * cond[:, None]
        return h if mask is None else mask.to(h) @ h

    with used(forward) as clipper:
        model = clipper._engine.attachment.model
        x, cond = torch.randn(5, 3, 4).double(), torch.randn(5, 4).double()
        clipper.backward(losses_of(model(x, mask=torch.ones(3, 3))))
        norms = norms_of(loop(copy.deepcopy(model), [x, None, cond]))
        for key, found in clipper.backward(losses_of(model(x, cond=cond))).param_norms.items():
            assert_close(found, norms[key])


def test_a_list_among_the_arguments_that_is_appended_to_is_refused():
    def forward(m, x, losses):
        losses.append(x.square().sum())
        return m.lin(x)

    with used(forward) as clipper, pytest.raises(ValueError, match="changes a list or dict among its arguments"):
        clipper._engine.attachment.model(torch.randn(5, 4).double(), [])
