"""Compiled functions return the same in a block of any function mode of the clipper, and models with them are right."""

import copy
import importlib
import pkgutil
from contextlib import contextmanager
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
    loop,
    losses_of,
    norms_of,
    total_of,
    weight,
    with_low_memory,
)
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from versions import needs_compiler

import torchzero_clip
from torchzero_clip.per_sample.broadcast_row import BroadcastRow
from torchzero_clip.per_sample.modes import Mode
from torchzero_clip.per_sample.rules.bare import _Rows
from torchzero_clip.per_sample.rules.generic import _Inside as InVmap
from torchzero_clip.per_sample.verify import _WithoutGraphs

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute"),  # torch.compile's own
    pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`"),
    pytest.mark.usefixtures("fresh_compiler"),
]


@pytest.fixture
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def kinds_of(base):
    """All subclasses in the package, whose modules are all imported."""
    for module in pkgutil.walk_packages(torchzero_clip.__path__, "torchzero_clip."):
        # these import trainers, or what needs an environment of its own
        if not module.name.startswith(("torchzero_clip.integrations.", "torchzero_clip.private")):
            importlib.import_module(module.name)
    found, rest = set(), [base]
    while rest:
        rest += (children := rest.pop().__subclasses__())
        found |= {kind for kind in children if kind.__module__.startswith("torchzero_clip.")}
    return found


ATTACHED = nn.Linear(3, 3)
CLIPPER = clip(ATTACHED)  # which restores the layer when it is freed


def made(kind, count):
    """A mode, for a layer with a parameter and a batch of this many samples."""
    layer = ATTACHED.forward
    given = {_Rows: (layer, count), InVmap: (layer,)}
    return kind(*given.get(kind, ()))


def in_turn(rows, columns, values):
    """All pairs, each with one of the values, so that each row and each column meets all of them."""
    return [
        (row, column, values[(i + j) % len(values)]) for i, row in enumerate(rows) for j, column in enumerate(columns)
    ]


MODES = {kind.__qualname__ + "." + kind.__module__: kind for kind in (InVmap, _Rows, _WithoutGraphs)}


def test_all_modes_are_here():
    concrete = {kind for kind in kinds_of(TorchFunctionMode) if not kind.__abstractmethods__}
    assert concrete | kinds_of(TorchDispatchMode) == set(MODES.values())
    assert all(issubclass(kind, Mode) for kind in concrete)
    own = [kind for kind in kinds_of(torch.Tensor) if "__torch_function__" in vars(kind)]
    assert own == [BroadcastRow]


@contextmanager
def block():
    yield


def breaks(x):
    """Dynamo cannot go on after a break in a block, so only functions that it calls are compiled."""
    with block():
        torch._dynamo.graph_break()
        return helper(x.tanh().sigmoid()).exp()


def helper(x):
    return x.cos() + x.sin()


FUNCTIONS = {
    "two": lambda x: x.tanh().sigmoid(),
    "three": lambda x: torch.cat([x.cos(), x * 2], -1).relu(),
    "in place": lambda x: x.clone().add_(1).tanh_(),
    "normalized": lambda x: F.instance_norm(x[:, None].expand(-1, 2, -1)).tanh() * 3,
    "parameter": lambda x: (F.linear(x, PARAMETER).exp() - PARAMETER.sum()).sin(),
    "breaks": breaks,
}
PARAMETER = nn.Parameter(torch.linspace(-1, 1, 9).view(3, 3))


@needs_compiler
@pytest.mark.parametrize(("mode", "function", "backend"), in_turn(MODES, FUNCTIONS, ["eager", "aot_eager", "inductor"]))
def test_compiled_functions_return_the_same_in_a_mode(mode, function, backend):
    compiled = partial(torch.compile, FUNCTIONS[function], backend=backend)
    for count in (1, 0, 2):
        x = torch.linspace(-2, 2, 3 * count).view(count, 3)
        expected = compiled()(x)
        torch._dynamo.reset()
        again = compiled()
        for _ in range(2):
            with made(MODES[mode], count):
                output = again(x)
            for actual in (output, again(x)):  # what was compiled in the block may stay
                torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)


@needs_compiler
@pytest.mark.parametrize("mode", MODES)
def test_functions_in_one_graph_stay_in_one_graph(mode):
    function = FUNCTIONS["two"]
    for count in (1, 2):
        x = torch.linspace(-2, 2, 3 * count).view(count, 3)
        with made(MODES[mode], count):
            assert torch.equal(torch.compile(function, backend="eager", fullgraph=True)(x), function(x))


WAYS = {
    "backward": by_backward,
    "unverified": partial(by_backward, verify="never"),
    "low memory": with_low_memory,
    "classic": by_classic_form,
    "two passes": by_two_passes,
}


def added(x, y):
    return (x + y).tanh().sigmoid()


def compiled(function, backend):
    return torch.compile(function, backend=backend)


class Plain(nn.Module):
    def __init__(self, backend):
        super().__init__()
        self.l, self.out = nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x):
        return self.out(self.l(x).tanh().sigmoid())


def with_row(backend):
    """A compiled function gets an embedding of positions, which all samples share, and a second one gets only this."""
    first, alone = compiled(added, backend), compiled(lambda p: (2 * p).tanh().sigmoid(), backend)

    def forward(m, x):
        positions = m.positions(torch.arange(5))
        return m.out(first(x, positions) + alone(positions))

    return Net(forward, positions=nn.Embedding(5, 3), out=nn.Linear(3, 2))


def with_parameter(backend):
    """A compiled function gets a parameter of the module around it."""
    function = compiled(added, backend)
    return Net(lambda m, x: m.out(function(x, m.bias)), bias=weight(3), out=nn.Linear(3, 2))


def with_breaks(backend):
    """A compiled function of which dynamo compiles parts only."""
    function = compiled(breaks, backend)
    return Net(lambda m, x: m.out(function(m.l(x))), l=nn.Linear(3, 3), out=nn.Linear(3, 2))


class Inner(nn.Module):
    def __init__(self, backend):
        super().__init__()
        self.words = nn.Embedding(5, 3, padding_idx=0)
        self.compile(backend=backend)

    def forward(self, index):
        return self.words(index).tanh().sigmoid()


def with_submodule(backend):
    """A submodule is compiled, whose embedding has padding."""
    held = {"inner": Inner(backend), "out": nn.Linear(3, 2)}
    return Net(lambda m, x: m.out(m.inner((3 * x[..., 0].abs()).long() % 5) + x), **held)


MODELS = {
    "model": Plain,
    "row": with_row,
    "parameter": with_parameter,
    "breaks": with_breaks,
    "submodule": with_submodule,
}


@needs_compiler
@pytest.mark.parametrize(("model", "way", "backend"), in_turn(MODELS, [*WAYS, "whole"], ["eager", "aot_eager"]))
def test_models_with_compiled_parts_are_right_in_every_form(model, way, backend):
    for count in (1, 2, 5):
        torch._dynamo.reset()
        made = MODELS[model](backend).double()
        x = torch.randn(count, 5, 3, dtype=torch.float64)
        expected, output, outputs = norms_of(loop(made, (x,))), made(x), []
        torch._dynamo.reset()
        called = torch.compile(made, backend=backend) if model == "model" else made
        step = by_backward(made, whole=(type(made),)) if way == "whole" else WAYS[way](made)

        def losses(model, called=called, outputs=outputs, x=x):
            outputs.append(called(x) if way != "two passes" else model(x))
            return losses_of(outputs[-1])

        norms, _ = step(losses)
        assert_close(outputs[0], output)
        assert_close(norms, total_of(expected))


@needs_compiler
def test_a_compiled_model_is_right_in_a_batch_of_one_and_after_it():
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Sigmoid(), nn.Linear(4, 2)).double()
    twin, called = copy.deepcopy(model), torch.compile(model, backend="aot_eager")
    with clip(model) as clipper:
        for count in (1, 3, 1, 2):
            x = torch.randn(count, 3, dtype=torch.float64)
            output = called(x)
            assert_close(output, twin(x))
            assert_close(clipper.backward(losses_of(output)).norms, total_of(norms_of(loop(twin, (x,)))))
