"""Modules that run sample by sample with all that is in them: which ones, and that they are right."""

import copy
import importlib

import pytest
import torch
from per_sample.harness import Net, assert_matches_loop, clip, weight
from torch import nn
from torch.utils.checkpoint import checkpoint

from torchzero_clip import GradSampleModuleFastGradientClipping
from torchzero_clip.per_sample import whole
from torchzero_clip.per_sample.whole import TABLE, TESTED


class Block(Net):
    """Two layers, whose input has samples and positions in one dimension."""

    def __init__(self):
        super().__init__(in_one_dimension, up=nn.Linear(3, 5), down=nn.Linear(5, 3))


def in_one_dimension(m, x):
    return x + m.down(m.up(x.flatten(0, 1)).tanh()).view(x.shape)


def blocks():
    held = {"first": nn.Linear(3, 3), "blocks": nn.Sequential(Block(), Block()), "head": nn.Linear(3, 2)}
    return Net(lambda m, x: m.head(m.blocks(m.first(x))), **held)


@pytest.mark.parametrize("given", [(Block,), ("blocks.*",), ("blocks.0", "blocks.1"), ("blocks",), (Net,), ("",)])
def test_modules_that_are_run_whole_are_right(given):
    assert_matches_loop(blocks(), torch.randn(5, 4, 3), modes=("auto", "low", "kept"), whole=given)


def test_the_outermost_listed_module_runs_whole(monkeypatch):
    model, name = blocks(), f"{__name__}.Block"
    monkeypatch.setattr(whole, "TABLE", {name: "in the table"})
    assert whole.chosen_whole(model, ()) == {"blocks.0": "in the table", "blocks.1": "in the table"}
    monkeypatch.setattr(whole, "_AROUND", {name: "needs the module around"})
    assert whole.chosen_whole(model, ()) == {"blocks": "needs the module around"}


def test_a_module_that_the_user_names_replaces_listed_ones_around_it(monkeypatch):
    model, name = blocks(), f"{__name__}.Block"
    monkeypatch.setattr(whole, "TABLE", {name: "in the table"})
    monkeypatch.setattr(whole, "_AROUND", {name: "needs the module around"})
    assert whole.chosen_whole(model, ("blocks.0",)) == {"blocks.0": "whole=", "blocks.1": "in the table"}


def test_the_error_without_it_has_the_lines_to_write():
    model = blocks()
    model.blocks[0].call = lambda m, x: m.down(m.up(x.flatten(0, 1)).sort(0).values).view(x.shape)
    lines = r"mixes samples.* of 'blocks.0.up' \(Linear\).*: whole=\(Block,\), or whole=\(Net,\)"
    with clip(model), pytest.raises(RuntimeError, match=lines):
        model(torch.randn(5, 4, 3)).sum().backward()


def chosen(*given):
    return clip(blocks(), whole=given).whole


def test_what_is_chosen_is_shown_and_the_outermost_counts():
    assert chosen() == {}
    assert chosen(Block, "blocks.0") == {"blocks.0": "whole=", "blocks.1": "whole="}
    assert chosen(nn.Linear, "blocks") == {"first": "whole=", "blocks": "whole=", "head": "whole="}
    assert chosen(Net, Block) == {"": "whole="}


def test_what_the_user_gives_counts_more_than_the_table(monkeypatch):
    monkeypatch.setattr(whole, "TABLE", {f"{Block.__module__}.Block": "a reason"})
    assert chosen() == {"blocks.0": "a reason", "blocks.1": "a reason"}
    assert chosen("blocks.1.up") == {"blocks.1.up": "whole=", "blocks.0": "a reason"}
    assert chosen("blocks") == {"blocks": "whole="}
    assert_matches_loop(blocks(), torch.randn(5, 4, 3), modes=("auto",))


@pytest.mark.parametrize(
    ("given", "error", "match"),
    [
        (("blocks.*.norm",), ValueError, r"whole has the pattern 'blocks.\*.norm', which names no module of Net"),
        ((nn.Conv2d,), ValueError, "whole has the class Conv2d, which names no module of Net"),
        ("blocks", TypeError, "whole must be a sequence of classes and patterns, got 'blocks': put it into a list"),
        (Block, TypeError, "put it into a list"),
        ((3,), TypeError, "whole must hold classes of modules and patterns for names, got 3"),
        ((int,), TypeError, "whole must hold classes of modules"),
    ],
)
def test_wrong_arguments_are_named(given, error, match):
    with pytest.raises(error, match=match):
        clip(blocks(), whole=given)
    with pytest.raises(error, match=match):
        GradSampleModuleFastGradientClipping(blocks(), whole=given)


def test_a_parameter_that_is_shared_with_the_outside_is_added_up_before_norms():
    class Head(Net):
        pass

    head = Head(lambda m, x: m.head(x * m.scale), head=nn.Linear(3, 7, bias=False), scale=weight(3, value=1.0))
    model = Net(lambda m, index: m.block(m.table(index)), table=nn.Embedding(7, 3), block=head)
    model.block.head.weight = model.table.weight
    assert_matches_loop(model, torch.randint(0, 7, (5, 4)), modes=("auto", "low"), whole=(Head,))


def test_forward_hooks_inside_fire_and_full_backward_hooks_are_refused():
    model, seen = blocks(), []
    model.blocks[0].up.register_forward_hook(lambda *_: seen.append(1))
    with clip(model, whole=(Block,)) as clipper:
        clipper.backward(model(torch.randn(5, 4, 3)).sum((1, 2)))
        assert seen == [1]
        model.blocks[0].up.register_full_backward_hook(lambda *_: None)
        with pytest.raises(ValueError, match=r"'up' in 'blocks.0' \(Block\) has a backward hook"):
            model(torch.randn(5, 4, 3))


def test_much_memory_is_announced(monkeypatch):
    monkeypatch.setattr("torchzero_clip.per_sample.rules.generic.WARN", 1000)
    model = blocks()
    with clip(model, whole=("blocks.0",)):
        with pytest.warns(UserWarning, match=r"'blocks.0' \(Block\) runs sample by sample"):
            model(torch.randn(20, 1, 3))
        model(torch.randn(20, 1, 3))


LEAVE_TORCH = {
    "item": lambda counts: [count.item() for count in counts],
    "tolist": torch.Tensor.tolist,
    "numpy": torch.Tensor.numpy,
    "deepcopy": lambda counts: map(int, copy.deepcopy(counts)),
}


@pytest.mark.parametrize("name", LEAVE_TORCH)
def test_modules_whose_values_leave_torch_run_in_a_loop(name):
    def forward(m, x):
        counts = LEAVE_TORCH[name]((x > 0).sum((1, 2)) % 4 + 1)
        return torch.stack([row[:count].sum(0) for row, count in zip(m.linear(x), counts, strict=True)])

    assert_matches_loop(Net(forward, linear=nn.Linear(3, 2)), torch.randn(5, 4, 3), modes=("auto",), whole=(Net,))


def test_a_module_with_a_checkpoint_runs_in_a_loop():
    inside = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    model = Net(
        lambda m, x: checkpoint(m.inside, m.first(x), use_reentrant=m.reentrant),
        first=nn.Linear(3, 3),
        inside=inside,
        reentrant=False,
    )
    assert_matches_loop(model, torch.randn(5, 4, 3), modes=("auto",), whole=(Net,))
    model.reentrant = True
    with (
        clip(model, whole=(Net,)),
        pytest.raises(ValueError, match=r"^Net runs sample by sample.*use_reentrant=False$"),
    ):
        model(torch.randn(5, 4, 3).double())


def test_hooks_of_tensors_that_require_gradients_are_refused():
    def forward(m, x):
        hidden = m.linear(x)
        if hidden.requires_grad:
            hidden.register_hook(lambda grad: grad * 2)
        return hidden

    model = Net(forward, linear=nn.Linear(3, 3))
    with clip(model, whole=(Net,)), pytest.raises(ValueError, match="sets a hook on a tensor"):
        model(torch.randn(5, 3))


def centered(m, x):
    h = m.linear(x)
    return h - h.mean(0)


def normalized(m, x):
    """A home-made batch norm. The deviation of one sample is NaN."""
    return (x - x.mean(0)) / (x.std(0) + 1e-5) * m.gain


@pytest.mark.filterwarnings(r"ignore:std\(\)", "ignore:.*degrees of freedom")
@pytest.mark.parametrize(
    ("forward", "held"), [(centered, {"linear": nn.Linear(3, 3)}), (normalized, {"gain": weight(3)})]
)
def test_a_module_that_mixes_samples_cannot_be_run_whole(forward, held):
    model = Net(forward, **held)
    with clip(model, whole=(Net,)), pytest.raises(ValueError, match="Net gives another output for a batch"):
        model(torch.randn(5, 3))


@pytest.mark.slow
@pytest.mark.peers
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", TABLE)
def test_names_of_the_table_are_those_of_the_tested_version(name):
    transformers = pytest.importorskip("transformers")
    path, _, kind = name.rpartition(".")
    assert issubclass(getattr(importlib.import_module(path), kind), nn.Module)
    assert transformers.__version__.split(".")[0] == TESTED.split()[1].split(".")[0]
