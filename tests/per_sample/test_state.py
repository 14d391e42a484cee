"""What a module under the generic rule stores on itself is that of the batch, and its gradients are right."""

import copy
import dataclasses
from collections import deque
from types import SimpleNamespace

import pytest
import torch
from per_sample.harness import Net, assert_close, assert_matches_loop, clip
from torch import nn


def first(output):
    return output[0] if isinstance(output, tuple) else output


def stored(m, x):
    """Stores what it computed: with a batch dimension, without one, in a list, detached."""
    h = first(m.inner(x * m.scale))
    m.penalty, m.seen, m.both = h.square().mean(), h.detach(), [h.sum((1, 2)), "two"]
    return h


class Storing(Net):
    def __init__(self, inner):
        super().__init__(stored, scale=nn.Parameter(torch.linspace(0.5, 2, 4)), inner=inner)
        self.penalty = self.seen = self.both = None


INNER = {"by vmap": lambda: nn.Linear(4, 4), "one by one": lambda: nn.GRU(4, 4, batch_first=True)}


@pytest.mark.parametrize("how", INNER)
def test_what_was_stored_can_be_read_as_without_a_clipper(how):
    model, x = Storing(INNER[how]()).double(), torch.randn(5, 3, 4).double()
    twin = copy.deepcopy(model)
    twin(x)
    with clip(model, whole=(Storing,)):
        model(x)
    assert_close(model.seen, twin.seen)
    assert_close(model.both[0], twin.both[0])
    assert model.both[1] == "two"
    assert_close(model.penalty.mean(), twin.penalty)
    assert model.penalty.shape == (5,)  # without a batch dimension, there is one for each sample


def test_sequences_first_are_stored_as_they_are():
    model, x = Storing(nn.Linear(4, 4)), torch.randn(3, 5, 4)
    with clip(model, batch_first=False):
        model(x)
    assert_close(model.seen, model.inner(x * model.scale), rtol=1e-5, atol=1e-6)


class Function(Net):
    """A module with a parameter and a forward of its own, and what else it holds."""

    def __init__(self, forward, **held):
        super().__init__(forward, weight=nn.Parameter(torch.linspace(0.5, 2, 3)), **held)


@dataclasses.dataclass
class Result:
    value: torch.Tensor


def as_attribute(module, h):
    module.held = h


def in_dict(module, h):
    module.held["a"] = h


def in_list(module, h):
    module.held.clear()
    module.held.append(h)


def in_deque(module, h):
    module.held.append(h)


HELD = {
    "attribute": (None, as_attribute, lambda held: held),
    "dict": ({}, in_dict, lambda held: held["a"]),
    "list": ([], in_list, lambda held: held[0]),
    "deque": (deque(maxlen=1), in_deque, lambda held: held[0]),
}


@pytest.mark.parametrize("penalized", ["each", "mean"])
@pytest.mark.parametrize("how", ["by vmap", "one by one"])
@pytest.mark.parametrize("name", HELD)
def test_whatever_holds_what_was_stored_its_gradients_are_right(name, how, penalized):
    held, store, read = HELD[name]

    def forward(module, x):
        h = x * module.weight
        h = module.gru(h)[0] if how == "one by one" else h
        store(module, h if penalized == "each" else h.square().mean())
        return h

    def outer(net, x):
        out = net.inner(x)
        return torch.cat([out.flatten(1), read(net.inner.held).reshape(len(x), -1)], 1)

    inner = {"gru": nn.GRU(3, 3, batch_first=True)} if how == "one by one" else {}
    net = Net(outer, inner=Function(forward, held=copy.deepcopy(held), **inner))
    net.kept = net.inner.held
    assert_matches_loop(net, torch.randn(4, 2, 3), modes=("auto", "low"), whole=(Function,))
    assert net.kept is None or net.inner.held is net.kept


def test_modules_that_run_as_they_are_may_store_what_they_like():
    def forward(module, x):
        h = x * module.weight
        module.held, module.seen = Result(h), module.seen + 1
        return h

    model, x = Function(forward, held=None, seen=0).double(), torch.randn(4, 3).double()
    with clip(model) as clipper:
        losses = (model(x) + model.held.value).square().sum(1)
        assert model.seen == 1
        assert_close(clipper.backward(losses).norms, (8 * x.square() * model.weight).norm(dim=1))


def test_what_an_attempt_without_the_generic_rule_has_changed_is_as_before():
    def forward(module, x):
        module.steps += 1
        module.count.add_(1)
        module.calls.append(module.steps)
        module.plain.add_(1)
        return torch.nn.functional.dropout(x, 0.5) @ module.weight.diag() * module.count

    model = Function(forward, steps=0, calls=[], plain=torch.zeros(()))
    model.register_buffer("count", torch.zeros(()))
    twin, calls, x = copy.deepcopy(model), model.calls, torch.randn(4, 3)
    with clip(model) as clipper:
        torch.manual_seed(0)
        clipper.backward(model(x).sum(1))
        state = torch.get_rng_state()
    assert (model.steps, model.calls, model.plain.item(), model.count.item()) == (1, [1], 1, 1)
    assert model.calls is calls
    torch.manual_seed(0)
    with clip(twin, whole=(Function,)):
        twin(x)
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("lengths", [(10, 10, 10), (5, 10, 10, 5)], ids=["one by one", "first by vmap"])
def test_counters_count_steps_and_not_samples(lengths):
    def forward(module, x):
        module.steps += 1
        module.count.add_(1)
        x = x * module.weight * module.count * (1.0 if module.steps < 3 else 2.0)
        return module.gru(x)[0] if x.shape[1] > 6 else x

    model = Function(forward, steps=0, gru=nn.GRU(3, 3, batch_first=True))
    model.register_buffer("count", torch.zeros((), dtype=torch.int64))
    twin = copy.deepcopy(model)
    with clip(model, whole=(Function,)) as clipper:
        for length in lengths:
            x = torch.randn(4, length, 3)
            output = model(x)
            assert_close(output, twin(x), rtol=1e-5, atol=1e-6)
            clipper.backward(output.flatten(1).sum(1))
    assert model.steps == model.count.item() == len(lengths)


def test_errors_of_a_forward_come_as_they_are_and_leave_its_state():
    def forward(module, x):
        module.steps.add_(1)
        module.seen.append(1)
        module.kinds.add(len(module.kinds))
        if module.raises:
            raise RuntimeError("my own")
        return x * module.weight

    model = Function(forward, raises=False, seen=[], kinds=set())
    model.register_buffer("steps", torch.tensor(0.0))
    with clip(model, whole=(Function,)) as clipper:
        clipper.backward(model(torch.randn(4, 3)).sum(1))
        model.raises = True
        with pytest.raises(RuntimeError, match=r"^my own$"):
            model(torch.randn(4, 3))
    assert model.steps.item() == 1
    assert (model.seen, model.kinds) == ([1], {0})


@pytest.mark.parametrize("how", INNER)
def test_what_the_first_forward_makes_is_made_once(how):
    def forward(module, x):
        module.calls = getattr(module, "calls", 0) + 1
        module.table = torch.arange(float(x.shape[1]))  # of positions, as long as the sequences
        return first(module.inner(x)) * module.scale

    model = Function(forward, scale=nn.Parameter(torch.ones(4)), inner=INNER[how]())
    model.register_buffer("table", None)
    with clip(model, whole=(Function,)) as clipper:
        for length in (3, 5):
            clipper.backward(model(torch.randn(5, length, 4)).sum((1, 2)))
            assert model.table.tolist() == list(range(length))
    assert model.calls == 2


def average(module, x):
    module.average = 0.9 * module.average + 0.1 * x.mean()


def total(module, x):
    module.total.add_(x.detach().sum())


def average_in_python(module, x):
    module.last = x.mean().item()


def parameter(module, x):
    with torch.no_grad():
        module.weight.mul_(0.5)


def result(module, x):
    module.result = Result(x)


def namespace(module, x):
    module.namespace = SimpleNamespace(a=x)


def a_list(module, x):
    module.found = [1.0] * int(100 * x.abs().sum())


def a_length(module, x):
    module.found = torch.ones(int(100 * x.abs().sum()))


VMAP, ONE_BY_ONE = INNER
REFUSED = [
    (average, VMAP, "sets its buffer 'average' to a value that depends on"),
    (average, ONE_BY_ONE, "sets its buffer 'average' to a value that depends on"),
    (total, ONE_BY_ONE, "sets 'total' in place to a value that depends on the samples"),
    (average_in_python, ONE_BY_ONE, "(stores 'last'|sample by sample)"),
    *((a_list, inner, "stores 'found' with another structure for each sample") for inner in INNER),
    *((a_length, inner, "stores 'found' with another shape for each sample: pad it") for inner in INNER),
    *((parameter, inner, "changes a parameter in place") for inner in INNER),
    *((result, inner, "stores 'result', a Result, whose tensors cannot be combined.*store a dict") for inner in INNER),
    *(
        (namespace, inner, "stores 'namespace', a SimpleNamespace, whose tensors cannot be combined.*store a dict")
        for inner in INNER
    ),
]


@pytest.mark.parametrize(("store", "how", "match"), REFUSED)
def test_what_cannot_be_that_of_the_batch_is_refused_by_name_and_keeps_its_value(store, how, match):
    def forward(module, x):
        h = first(module.inner(x * module.scale))
        store(module, h)
        return h * module.weight

    held = {"scale": nn.Parameter(torch.ones(4)), "weight": nn.Parameter(torch.ones(4)), "inner": INNER[how]()}
    model = Net(forward, **held, total=torch.zeros(()), last=0.5, result=None, namespace=None)
    model.register_buffer("average", torch.zeros(()))
    with clip(model, whole=(Net,)):
        with pytest.raises((ValueError, RuntimeError), match=rf"^Net .*{match}"):
            model(torch.randn(5, 3, 4))
        assert (model.average.item(), model.total.item(), model.last) == (0, 0, 0.5)
        assert model.result is model.namespace is None
        assert not hasattr(model, "found")
        assert (model.weight == 1).all()
