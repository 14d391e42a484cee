"""Layers, small models and published models equal one backward per sample: in every mode, and in every way to clip."""

import copy
import functools
import itertools
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from per_sample.harness import (
    Net,
    assert_close,
    assert_matches_loop,
    batch,
    by_backward,
    by_classic_form,
    by_two_passes,
    clip,
    losses_of,
    norms_by_loop,
    norms_in_batch,
    norms_of,
    total_of,
    with_low_memory,
)
from per_sample.layers import LAYERS, MODELS
from per_sample.published import SAMPLES
from per_sample.table import TABLE
from torch import Tensor, nn
from versions import TORCH

UNUSED = {"masked_spec_embed", "mask_token", "logit_scale"}  # parameters of pretraining
PUBLISHED = [pytest.mark.slow, pytest.mark.peers, pytest.mark.filterwarnings("ignore")]
EVEN = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")


def made(entry, device="cpu"):
    """The model, the inputs and the settings of an entry."""
    make_model, make_input, *settings = entry
    model, inputs = make_model(), make_input()
    inputs = inputs if isinstance(inputs, tuple) else (inputs,)
    inputs = [x.to(device) if isinstance(x, Tensor) else x for x in inputs]
    return model.to(device), inputs, {} if not settings else settings[0]


@pytest.mark.quick_cases(20)
@EVEN
@pytest.mark.parametrize("name", [*LAYERS, *MODELS])
def test_equals_one_backward_per_sample(name):
    model, inputs, settings = made({**LAYERS, **MODELS}[name])
    assert_matches_loop(model, *inputs, **settings)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@EVEN
@pytest.mark.parametrize("name", LAYERS)
def test_equals_one_backward_per_sample_on_a_gpu(name):
    model, inputs, _ = made(LAYERS[name], "cuda")
    assert_matches_loop(model, *inputs, modes=("auto", "low"))


@pytest.mark.skipif(TORCH < (2, 11), reason="this torch reads beyond the offsets in embedding_bag, and may crash")
@pytest.mark.parametrize("include_last", [False, True])
@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_bags_of_different_sizes_are_samples(mode, include_last):
    bag = nn.EmbeddingBag(6, 3, mode=mode, padding_idx=2, include_last_offset=include_last).double()
    index, starts = torch.tensor([0, 1, 1, 2, 5, 2, 3, 0]), [0, 3, 3, 4]  # the second bag is empty
    offsets = torch.tensor([*starts, len(index)] if include_last else starts)
    expected = []
    for part in index.tensor_split(starts[1:]):
        loss = losses_of(bag(part[None])).sum() if len(part) else bag.weight.sum() * 0
        expected += torch.autograd.grad(loss, bag.weight)
    for memory in ("auto", "low"):
        with clip(bag, 1e9, loss_reduction="sum", memory=memory) as clipper:
            bag.zero_grad()
            result = clipper.backward(losses_of(bag(index, offsets)))
        assert_close(result.norms, torch.stack(expected).flatten(1).norm(dim=1))
        assert_close(bag.weight.grad, torch.stack(expected).sum(0))


def test_a_bag_of_one_sample_is_one_sample():
    model = nn.EmbeddingBag(9, 4)
    clipper = clip(model)
    for offsets in ([0], [0, 2]):
        output = model(torch.tensor([1, 2, 3, 4, 5]), torch.tensor(offsets))
        assert output.shape == (len(offsets), 4)
        assert clipper.backward(output.sum(1)).norms.shape == (len(offsets),)


def test_a_layer_may_be_called_on_some_samples_only():
    def forward(m, x):
        hidden = m.first(x)
        return torch.cat([m.second(hidden[:2]), hidden[2:, :2]])

    model, x = Net(forward, first=nn.Linear(3, 4), second=nn.Linear(4, 2)).double(), batch()
    for form in (by_backward, by_classic_form):
        assert_close(form(copy.deepcopy(model))(lambda model: losses_of(model(x)))[0], norms_in_batch(model, x))


def distances(m, x):
    """Attention scores with a bias for each distance between two positions, as in T5."""
    positions = torch.arange(x.shape[1])
    bias = m.bias((positions[:, None] - positions[None]).clamp(-4, 4) + 4)
    return (x @ m.head(x).transpose(1, 2) + bias.permute(2, 0, 1)).flatten(1).sum(1)


@pytest.mark.parametrize(("count", "length"), [(4, 4), (4, 6)])
def test_biases_of_distances_are_right_whatever_the_size_of_the_batch(count, length):
    model, x = Net(distances, bias=nn.Embedding(9, 1), head=nn.Linear(3, 3)).double(), torch.randn(count, length, 3)
    expected = norms_by_loop(model, x.double(), losses=lambda losses, dim: losses)
    with clip(model) as clipper:
        assert_close(clipper.backward(model(x.double())).norms, expected)


# published models


class Truth(NamedTuple):
    """The model before the step, its batch, and what one backward for each sample gives.

    ``grads`` has the gradients of each parameter, with the samples first. ``limit`` is the median of the norms.
    ``buffers`` has the buffers of the model after one forward of the batch.
    """

    model: nn.Module
    batch: Any
    grads: dict[str, Tensor]
    limit: float
    buffers: dict[str, Tensor]


@functools.cache
def truth(name):
    entry = TABLE[name]
    if entry.published:
        pytest.importorskip("transformers")
    torch.manual_seed(0)
    model, batch = entry.model(), entry.batch()
    rows = [grads_of_one(copy.deepcopy(model), entry, batch, i) for i in range(SAMPLES)]
    grads = {key: torch.stack([row[key] for row in rows]) for key in rows[0]}
    twin = copy.deepcopy(model)
    entry.losses(twin, batch)
    return Truth(model, batch, grads, total_of(norms_of(grads)).median().item(), dict(twin.named_buffers()))


def grads_of_one(model, entry, batch, index):
    entry.losses(model, entry.sample(batch, index)).sum().backward()
    params = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in params.items()}


def marks(name):
    """One process makes the truth about a model once."""
    return [*(PUBLISHED if TABLE[name].published else ()), pytest.mark.xdist_group(f"model {name}")]


OTHERS = itertools.cycle((by_two_passes, by_classic_form, with_low_memory))  # each model takes one of them
FORMS = [(name, form) for name in TABLE for form in (by_backward, next(OTHERS))]


@pytest.mark.filterwarnings("ignore:the arguments of the forward have several sizes")
@pytest.mark.parametrize(
    ("name", "form"),
    [
        pytest.param(name, form, marks=[*marks(name), *([pytest.mark.slow] * (k % 2))])
        for k, (name, form) in enumerate(FORMS)
    ],
)
def test_norms_and_clipped_gradients_are_those_of_one_backward_per_sample(name, form):
    entry, (model, batch, expected, limit, buffers) = TABLE[name], truth(name)
    model = copy.deepcopy(model)
    total, param_norms = form(model, limit, whole=entry.whole)(lambda model: entry.losses(model, batch))

    close = functools.partial(
        torch.testing.assert_close, rtol=entry.tolerance, atol=entry.tolerance / 10 * limit, check_dtype=False
    )
    norms = norms_of(expected)
    close(total, total_of(norms))
    factors = (limit / (total_of(norms) + 1e-6)).clamp(max=1)
    for key, param in model.named_parameters():
        if key not in expected:
            assert param.grad is None
            continue
        close(param_norms.get(key, torch.zeros(SAMPLES)), norms[key])
        grad = torch.zeros_like(param) if param.grad is None else param.grad
        close(grad, torch.tensordot(factors, expected[key], 1) / SAMPLES)
    for key, buffer in model.named_buffers():
        close(buffer, buffers[key])


@pytest.mark.parametrize("name", [pytest.param(name, marks=marks(name)) for name in TABLE])
def test_every_parameter_of_the_model_gets_a_gradient(name):
    without = {key.rpartition(".")[2] for key, grads in truth(name).grads.items() if not grads.any()}
    assert without <= UNUSED


# the table in the docs

PAGE = Path(__file__).parents[2] / "docs" / "per_sample_layers.md"
BEGIN, END = "<!-- the table of models, which a test compares -->\n", "<!-- end of the table of models -->"


def line(name, entry):
    """What the page says, with the modules that the table of the package runs whole."""
    model = entry.model()
    by_table = clip(copy.deepcopy(entry.model()), whole=entry.whole).whole
    given = [item if isinstance(item, str) else item.__name__ for item in entry.whole]
    kinds = sorted({type(model.get_submodule(path)).__name__ for path, why in by_table.items() if why != "whole="})
    whole = f"right with `whole=({given[0]},)`, refused without" if given else "right"
    whole = f"right, `{kinds[0]}` runs whole" if kinds else whole
    return f"| {name} | {whole} |"


def groups():
    lines = {name: line(name, entry) for name, entry in TABLE.items()}
    plain = [name for name, text in lines.items() if text.endswith("| right |")]
    rows = [f"| {', '.join(plain)} | right |", *(text for name, text in lines.items() if name not in plain)]
    return "\n".join(["| model | result |", "| --- | --- |", *rows]) + "\n"


@pytest.mark.slow
@pytest.mark.peers
@pytest.mark.filterwarnings("ignore")
def test_the_table_in_the_docs_is_what_is_found():
    pytest.importorskip("transformers")
    text = PAGE.read_text()
    assert text[text.index(BEGIN) + len(BEGIN) : text.index(END)].strip() == groups().strip()


@pytest.mark.parametrize("name", [name for name, entry in TABLE.items() if entry.whole])
def test_models_that_need_whole_are_refused_with_the_line_to_write(name):
    torch.manual_seed(0)
    entry = TABLE[name]
    model = entry.model()
    refused = pytest.raises((ValueError, RuntimeError), match=rf"whole=\({entry.whole[0].__name__},\)")
    with clip(model) as clipper, refused:
        clipper.backward(entry.losses(model, entry.batch()))
