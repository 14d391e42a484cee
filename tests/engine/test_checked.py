"""Mistakes of authors: the error names the transform and the way out, and leaves everything as it was."""

import re

import pytest
import torch
from contract.entries import Mul
from contract.training import gradients, parameters, set_grads, train

from torchzero_clip import (
    SGD,
    Adam,
    ClipNorm,
    Elementwise,
    Gate,
    Modular,
    Scaling,
    TensorwiseTransform,
    Transform,
    UpdateRule,
)
from torchzero_clip.core.chain import Composite
from torchzero_clip.core.kinds import FinalRule

SHAPES = [(2,), (2, 2)]


def derived(base, settings=None, **members):
    """A transform with these members, made as late as the table of mistakes asks for it."""

    def make():
        kind = type("Own", (base,), members)
        return kind({"limit": 2.0} if settings is None else settings)

    return make


def tensorwise(body, **members):
    def apply_tensor(self, tensor, param, grad, loss, state, setting):
        return body(tensor, param, grad, loss, state, setting)

    return derived(TensorwiseTransform, apply_tensor=apply_tensor, **members)


def joint(body, base=Transform, **members):
    return derived(base, apply_tensors=lambda self, updates, step: body(updates, step), **members)


def elementwise(body, **members):
    def change(self, x, result, state, setting, at):
        return body(x, result, state, setting, at)

    return derived(Elementwise, change=change, **{"keys": ("average",), **members})


def formula(body, **members):
    members["formula"] = lambda self, x, state, setting: body(x, state, setting)
    return derived(Elementwise, **{"keys": ("average",), "keeps_statistics": False, **members})


def scaling(body, **members):
    return derived(Scaling, factors=lambda self, measured, updates, step: body(measured, updates, step), **members)


def gate(body, accept=lambda step: None, **members):
    members |= {"accept": lambda self, norm, step: accept(step), "refuses": lambda self, *arguments: body(*arguments)}
    return derived(Gate, **members)


def of_param(**state):
    return lambda self, param, setting: {key: value.clone() for key, value in state.items()}


def of_chain(**state):
    return lambda self: {key: value.clone() for key, value in state.items()}


def after(effect, result):
    """The result, after a side effect."""
    return result


def put(mapping, key, value):
    mapping[key] = value


def write_in_attribute(self, updates, step):
    self.count = getattr(self, "count", 0) + 1
    return updates


class Holds(Composite):
    def __init__(self, transforms, name):
        super().__init__({}, transforms)
        self.child = name

    def apply_tensors(self, updates, step):
        return step.apply_child(self.child, updates)


class Final(FinalRule):
    def __init__(self, body):
        super().__init__({})
        self.body = body

    def take_step(self, updates, step):
        return self.body(step)


zero = torch.zeros(())
ones = torch.ones_like

MISTAKES = {
    # the class
    "another signature": (
        derived(TensorwiseTransform, apply_tensor=lambda self, tensor, state: tensor),
        "Own.apply_tensor takes (self, tensor, state): write def apply_tensor(self, tensor, param, grad, loss",
    ),
    "a start without settings": (
        derived(Elementwise, start=lambda self, x: (x,)), "Own.start takes (self, x): write def start(self, x, setting)"
    ),
    "exchanged arguments": (
        derived(Elementwise, formula=lambda self, x, setting, state: (x, ())),
        "Own.formula takes (self, x, setting, state): write def formula(self, x, state, setting)",
    ),
    "keys without a comma": (elementwise(ones, keys="average"), "keys of Own is a string: write keys = ('average',)"),
    "a setting instead of a dict": (joint(list, settings=2.0), "defaults must be a dict of settings, got 2.0: write"),
    "a check that answers": (
        joint(list, checks={"limit": lambda name, value: value > 0}),
        "the check of 'limit' in Own returned a bool, and has to raise",
    ),
    "children in a list": (lambda: Holds([Mul(1.0)], "mul"), "transforms must be of class Mapping, got [Mul(1.0)]"),
    "a module as a child": (lambda: Holds({"mul": torch.nn.Identity()}, "mul"), "['mul'] must be of class Transform"),
    # settings, state and loss that are looked up
    "a typo in a setting": (
        tensorwise(lambda tensor, *_, setting=None: tensor * _[-1]["limt"]),
        "looked up 'limt', which does not exist; did you mean 'limit'?",
    ),
    "a typo in a setting of a scaling": (
        scaling(lambda measured, updates, step: step.settings[0]["lmit"]),
        "settings: limit; state of a parameter: none",
    ),
    "a typo in a setting of a scaling with state": (
        scaling(lambda measured, updates, step: step.settings[0]["lmit"], init_state=of_param(y=zero)),
        "settings: limit; state of a parameter: y",
    ),
    "a typo in a setting of elements": (
        elementwise(lambda x, result, state, setting, at: setting["limt"]),
        "Own({'limit': 2.0}).change looked up 'limt', which does not exist; did you mean 'limit'?",
    ),
    "a typo in a setting of a formula": (
        formula(lambda x, state, setting: x * setting["limt"]),
        "Own({'limit': 2.0}).formula looked up 'limt', which does not exist; did you mean 'limit'? It has these setti",
    ),
    "a setting in state": (
        tensorwise(lambda tensor, *_: tensor * _[3]["limit"], init_state=of_param(average=zero)),
        "Own({'limit': 2.0}) looked up 'limit' in another place than its settings: write setting['limit']",
    ),
    "state in settings": (
        tensorwise(lambda tensor, *_: tensor * _[-1]["average"], init_state=of_param(average=zero)),
        "looked up 'average' in another place than its state of a parameter: write state['average']",
    ),
    "state of the chain in state": (
        joint(lambda updates, step: step.states[0]["first"], init_global_state=of_chain(first=zero)),
        "another place than its state of the whole chain: write step.global_state['first']",
    ),
    "state of a formula in settings": (
        formula(lambda x, state, setting: x * setting["two"], keys=("one", "two")),
        "Own({'limit': 2.0}).formula looked up 'two' in another place than its keys of state: write state[1]",
    ),
    "a learning rate in a rule": (
        joint(lambda updates, step: [u * step.settings[0]["lr"] for u in updates], UpdateRule),
        "looked up 'lr', by which the chain multiplies after the rule: return the step for lr = 1",
    ),
    "a typo in a setting of a gate": (
        gate(lambda norm, step: norm > step.settings[0]["limt"]),
        "looked up 'limt', which does not exist; did you mean 'limit'?",
    ),
    "a typo in state": (
        tensorwise(lambda tensor, *_: _[3]["avreage"], init_state=of_param(average=zero)),
        "looked up 'avreage', which does not exist; did you mean 'average'?",
    ),
    "a typo in a column": (
        joint(lambda updates, step: step.numbers("x"), init_state=of_param(y=zero)),
        "own has no state 'x' of a parameter, because init_state does not return it; the state is: y",
    ),
    "a typo in state of the chain": (
        joint(lambda updates, step: step.global_state["frist"], init_global_state=of_chain(first=zero)),
        "did you mean 'first'? It has these settings: limit; state of a parameter: none; state of the whole chain: fir",
    ),
    "a typo in the name of a child": (lambda: Holds({"mul": Mul(1.0)}, "mull"), "children: mul"),
    "init_state of elements without theirs": (
        elementwise(lambda *_: None, init_state=of_param(mean=zero)),
        "own has no state 'average' of a parameter",
    ),
    "settings by name": (
        joint(lambda updates, step: step.settings["limit"]),
        "step.settings and step.states have a dict for each parameter",
    ),
    "state of elements by name": (
        elementwise(lambda x, result, state, setting, at: state["average"]),
        "Own({'limit': 2.0}).change looked up a key in a list",
    ),
    "state of a formula by name": (
        formula(lambda x, state, setting: state["average"]),
        ".formula looked up a key in a list. step.settings and step.states have a dict for each parameter: zip them wi"
        "th the updates. The state that formula and change get has a tensor for each of keys, in this order",
    ),
    "a formula without keys": (
        formula(lambda x, state, setting: state[0], keys=()),
        "Own({'limit': 2.0}).formula has no state, because its class has no keys: write keys = ('average',)",
    ),
    "a change without keys": (
        elementwise(lambda x, result, state, *_: min(*((a, a) for (a,) in [state])), keys=()),
        "Own({'limit': 2.0}).change has no state, because its class has no keys: write keys = ('average',)",
    ),
    "a loss that nobody reports": (
        tensorwise(lambda tensor, param, grad, loss, state, setting: tensor * (loss > 3)),
        "the loss of this step is None: call optimizer.report_loss(loss) before step(), or pass step a closure that re",
    ),
    "a loss that a pure transform reads": (
        tensorwise(lambda tensor, param, grad, loss, state, setting: tensor * loss, pure=True),
        "the loss of this step is None: write pure = False in its class, because a pure transform gets no loss, and ca",
    ),
    "a loss that a pure scaling reads": (
        scaling(lambda measured, updates, step: measured.vector * (step.loss > 1), pure=True),
        "the loss of this step is None: write pure = False in its class, because a pure transform gets no loss, and ca",
    ),
    "a loss that a gate does not declare": (
        gate(lambda norm, step: step.loss.isnan()),
        "the loss of this step is None: write needs_loss = True in the class of the gate, and call optimizer.report_lo",
    ),
    "statistics that are not declared": (
        joint(lambda updates, step: step.finite), "write keeps_statistics = True in the class of the transform"
    ),
    "a start of no statistic": (
        elementwise(lambda x, result, state, setting, at: at.begin_(state[0], x)),
        "Own({'limit': 2.0}) calls begin_ or fill_new_, which do nothing without a statistic: write keeps_sta",
    ),
    # what is returned
    "no list": (joint(lambda updates, step: None), ".apply_tensors returned NoneType instead of a list of tensors"),
    "a shorter list": (joint(lambda updates, step: updates[:1]), "returned 1 tensors for 2"),
    "no tensor": (
        tensorwise(lambda *_: None),
        "Own({'limit': 2.0}).apply_tensor returned NoneType instead of a tensor",
    ),
    "no tensors in a list": (joint(lambda updates, step: [None] * 2), ".apply_tensors returned NoneType ins"),
    "another shape": (
        tensorwise(lambda tensor, *_: tensor.sum()), "shape () of torch.float32 for one of shape (2,)"
    ),
    "another dtype": (tensorwise(lambda tensor, *_: tensor.double()), "of torch.float64 for one"),
    "a view of state": (
        tensorwise(lambda tensor, *_: _[3]["y"].view(-1).view_as(tensor),
                   init_state=lambda self, param, setting: {"y": torch.zeros_like(param)}),
        "returned a view of its state, of a gradient or of a parameter, to which a later transform might write",
    ),
    "no count": (elementwise(lambda *_: None), "returned NoneType instead of the number of elements that changed"),
    "elements as a count": (
        elementwise(lambda x, result, state, setting, at: x > 1),
        "instead of the number of elements that changed, a 0-d tensor: return at.count(...)",
    ),
    "factors of numpy": (
        scaling(lambda measured, *_: measured.vector.numpy()),
        ".factors returned ndarray instead of 2 numbers",
    ),
    "a list of factors": (scaling(lambda measured, *_: measured.norms), ".factors returned list instead of 2 numbers"),
    "no factors": (
        scaling(lambda *_: None),
        "Own({'limit': 2.0}).factors returned NoneType instead of 2 numbers to multiply by, one for each slice: return "
        "measured.by_setting(step.settings, rule), measured.by_norm(rule), or measured.joined(factors) of a list like "
        "measured.norms",
    ),
    "too many factors": (
        scaling(lambda *_: torch.ones(3)), "factors returned a tensor of shape (3,) of torch.float32 instead of 2 numb"
    ),
    "comparisons as factors": (
        scaling(lambda measured, *_: measured.vector > 1), "returned a tensor of shape (2,) of torch.bool instead of 2"
    ),
    "no dimensions of slices": (
        scaling(lambda measured, *_: ones(measured.vector), slice_dims=lambda self, tensor: None),
        "Own({'limit': 2.0}).slice_dims returned None: return a tuple, () to leave the tensor alone",
    ),
    "a bool of a gate": (
        gate(lambda norm, step: bool(norm > 3)),
        "Own({'limit': 2.0}).refuses returned False (bool) instead of a 0-d tensor of booleans: return a comp",
    ),
    "a number of a gate": (gate(lambda norm, step: norm / 2), "refuses returned a tensor of shape () of torch.float64"),
    "a vector of a gate": (gate(lambda norm, step: norm.view(1) > 3), "refuses returned a tensor of shape (1,)"),
    "a final rule that returns": (lambda: Final(lambda step: [1.0]), "take_step returned list: change step.params"),
    "a typo of a final rule": (lambda: Final(lambda step: step.settings[0]["lrr"]), "looked up 'lrr', which does"),
    # state and metrics
    "no state": (tensorwise(lambda tensor, *_: tensor, init_state=lambda *_: None), "returned NoneType as its state"),
    "state in a list": (
        tensorwise(lambda tensor, *_: tensor, init_state=lambda *_: {"window": [1.0]}),
        "has list as state 'window': state consists of tensors and numbers. A window of past numbers is a tensor",
    ),
    "state that is not declared": (
        tensorwise(lambda tensor, *_: after(put(_[3], "n", 1), tensor)),
        "Own({'limit': 2.0}) added the state 'n', which checkpoints would not load: let init_state return it",
    ),
    "state beside what is declared": (
        tensorwise(lambda tensor, *_: after(put(_[3], "n", 1), tensor), init_state=of_param(y=zero)),
        "added the state 'n', which checkpoints would not load: let init_state return it",
    ),
    "state of a scaling beside what is declared": (
        scaling(lambda measured, updates, step: after(put(step.states[1], "n", 1), ones(measured.vector)),
                init_state=of_param(y=zero)),
        "added the state 'n', which checkpoints would not load: let init_state return it",
    ),
    "a state that grows": (
        tensorwise(lambda tensor, *_: after(put(_[3], "y", torch.zeros(3)), tensor), init_state=of_param(y=zero)),
        "replaced the state 'y', a tensor of shape () of torch.float32, by a tensor of shape (3,) of torch.float32",
    ),
    "state of the chain that is not declared": (
        joint(lambda updates, step: after(put(step.global_state, "n", zero), updates)),
        "added the state 'n', which checkpoints would not load: let init_global_state return it",
    ),
    "state of the chain as a float": (
        joint(lambda updates, step: after(put(step.global_state, "n", 1.0), updates),
              init_global_state=of_chain(n=zero)),
        "replaced the state 'n', a tensor of shape () of torch.float32, by 1.0 (float)",
    ),
    "state in an attribute": (
        derived(Transform, apply_tensors=write_in_attribute),
        "stored 1 (int) in its attribute 'count', which checkpoints do not have: store it in state, which init_state",
    ),
    "a float as a metric": (
        joint(lambda updates, step: after(put(step.metrics, "x", 1.0), updates)), "has 1.0 (float) as metric 'x': a me"
    ),
    "a vector as a metric": (
        scaling(lambda measured, updates, step: after(put(step.metrics, "x", measured.vector), measured.vector)),
        "has a tensor of shape (2,) of torch.float64 as metric 'x'",
    ),
    "a float as a metric of a gate": (
        gate(lambda norm, step: norm > 1e9, lambda step: put(step.metrics, "x", 1.0)), "has 1.0 (float) as metric 'x'"
    ),
    # what a class promises
    "a pure joint transform that reads gradients": (
        joint(lambda updates, step: [g.clone() for g in step.grads], pure=True),
        "reads step.grads, and its class says pure = True: write pure = False there",
    ),
    "a pure scaling that reads gradients": (
        scaling(lambda measured, updates, step: measured.vector * len(step.grads), pure=True), "reads step.grads, and"
    ),
    "a pure scaling that returns its state": (
        scaling(lambda measured, updates, step: step.global_state["y"].expand(2),
                init_global_state=of_chain(y=zero), pure=True),
        "returned or showed a view of its state, and its class says pure = True: return clones",
    ),
    "a pure scaling that shows its state": (
        scaling(lambda measured, updates, step: after(put(step.metrics, "y", step.global_state["y"]), measured.vector),
                init_global_state=of_chain(y=zero), pure=True),
        "returned or showed a view of its state",
    ),
    # what is written to
    "a gate that counts in refuses": (
        gate(lambda norm, step: after(put(step.global_state, "n", zero + 1), norm > 1e9),
             init_global_state=of_chain(n=zero)),
        "refuses changed step.global_state: change it in accept, and in refused",
    ),
}  # fmt: skip

LATE = {
    "a gate that counts in place": (
        gate(lambda norm, step: after(step.global_state["n"].add_(1), norm > 1e9), init_global_state=of_chain(n=zero)),
        "refuses changed step.global_state",
    ),
    "a gate that writes to the norm": (gate(lambda norm, step: norm.mul_(2) > 1e9), "wrote to the norm, which it may"),
    "a gate that writes to gradients": (
        gate(lambda norm, step: norm > 1e9, lambda step: step.grads[0].mul_(2)),
        "wrote to the gradients",
    ),
    "factors that write to updates": (
        scaling(lambda measured, updates, step: after([u.mul_(2) for u in updates], ones(measured.vector))),
        "wrote to its updates, which it may only read: compute new tensors",
    ),
    "factors that write to norms": (
        scaling(lambda measured, updates, step: measured.vector.clamp_(max=1.0)),
        "wrote to the norms",
    ),
    "a rule that writes to updates": (
        joint(lambda updates, step: [u.mul_(2) for u in updates], UpdateRule),
        "wrote to its updates",
    ),
    "a transform that writes to gradients": (
        tensorwise(lambda tensor, param, grad, *_: after(grad.mul_(2), tensor)),
        "wrote to the gradients",
    ),
    "a transform that writes to parameters": (
        joint(lambda updates, step: after([p.mul_(2) for p in step.params], updates)),
        "wrote to the parameters",
    ),
}
"""Mistakes that are seen when something has changed."""


def check_mistake(make, message, fast):
    """Check the error of a step with a mistake. Return the parameters after it, and the optimizer, if there is one."""
    params, optimizer = parameters(shapes=SHAPES), None
    set_grads(params, gradients(params, 1)[0])

    def run():
        nonlocal optimizer
        transform = make()
        rule = [] if isinstance(transform, UpdateRule) else [SGD(0.1)]
        optimizer = Modular(params, transform, *rule, fast=fast)
        optimizer.step()

    with pytest.raises((RuntimeError, TypeError, AttributeError), match=re.escape(message)) as caught:
        run()
    said = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", ())])
    assert re.search(r"Own|own|Holds|Final|Mapping|Transform|defaults", said)
    return params, optimizer


@pytest.mark.quick_cases(len(MISTAKES) * 2)
@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_named_before_anything_changes(name, fast):
    before = parameters(shapes=SHAPES)
    params, optimizer = check_mistake(*MISTAKES[name], fast)
    for param, old, grad in zip(params, before, gradients(params, 1)[0], strict=True):
        assert torch.equal(param, old)
        assert param.grad is None or torch.equal(param.grad, grad)
    if optimizer is None:
        return
    for param, state in optimizer.state.items():
        declared = {k: v for n in optimizer.runner.nodes for k, v in n.qualified(
            n.transform.init_state(param, n.transform.defaults)).items()}  # fmt: skip
        assert state.keys() <= declared.keys()
        assert all(torch.equal(value, declared[key]) for key, value in state.items())
    fresh = optimizer.runner.nodes.init_global_state()
    assert all(optimizer.param_groups[0][key] == value for key, value in fresh.items())
    assert not [key for key in optimizer.param_groups[0] if key.startswith("own/") and key not in fresh
                and key not in optimizer.runner.nodes.storage_keys]  # fmt: skip


@pytest.mark.quick_cases(len(LATE) * 2)
@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("name", LATE)
def test_what_may_only_be_read_is_compared_in_the_first_step(name, fast):
    check_mistake(*LATE[name], fast)


def test_the_mistakes_are_seen_where_they_first_happen():
    assert len(MISTAKES) + len(LATE) > 24
    silent = derived(
        Transform, apply_tensors=lambda self, updates, step: [p.sub_(1) for p in step.params] and updates
    )()
    params = parameters(shapes=SHAPES)
    optimizer = Modular(params, Mul(1.0), silent, Adam())
    with pytest.raises(RuntimeError, match=r"Own\({'limit': 2.0}\) wrote to the parameters"):
        train(optimizer, params, gradients(params, 1))


@pytest.mark.parametrize("fast", [True, False])
def test_a_metric_that_is_state_does_not_change_in_later_steps(fast):
    def count(updates, step):
        step.metrics["count"] = step.global_state["count"].add_(1)
        return updates

    params = parameters(shapes=SHAPES)
    optimizer = Modular(params, joint(count, init_global_state=of_chain(count=zero))(), SGD(0.1), fast=fast)
    train(optimizer, params, gradients(params, 1))
    first = optimizer.metrics()
    train(optimizer, params, gradients(params, 1))
    assert (first["own/count"].item(), optimizer.metrics()["own/count"].item()) == (1.0, 2.0)


@pytest.mark.parametrize("fast", [True, False])
def test_what_was_read_of_state_stays_as_it_was_when_the_state_is_replaced(fast):
    def previous(measured, updates, step):
        state, count = step.global_state, len(measured.vector)
        previous = state["norms"][0]
        step.metrics["previous"] = previous
        step.global_state |= {"norms": measured.vector.float(), "first": previous}
        return previous.expand(count)

    params = [torch.nn.Parameter(torch.zeros(()))]
    state = of_chain(norms=torch.ones(1), first=zero)
    optimizer = Modular(params, scaling(previous, init_global_state=state)(), SGD(1.0), fast=fast)
    train(optimizer, params, [[torch.tensor(3.0)], [torch.tensor(2.0)]])
    values = [optimizer.metrics()["own/previous"], optimizer.param_groups[0]["own/first"], *params]
    assert [x.item() for x in values] == [3.0, 3.0, -9.0]


def test_settings_of_groups_are_refused_by_the_name_of_the_transform():
    params = parameters(shapes=SHAPES)
    optimizer = Modular(params, ClipNorm(1.0), ClipNorm(2.0, name="second"), SGD(0.1))
    optimizer.param_groups[0]["second/max_norm"] = -1.0
    with pytest.raises(ValueError, match="max_norm") as raised:
        train(optimizer, params, gradients(params, 1))
    assert raised.value.__notes__ == ["in ClipNorm(2.0, name='second')"]

    class Refusing(Gate):
        def refuses(self, norm, step):
            return norm > step.settings[0]["limit"]

        def accept(self, norm, step):
            pass

    groups = [{"params": params[:1]}, {"params": params[1:], "refusing/limit": 2.0}]
    with pytest.raises(ValueError, match="limit must be the same in every param group"):
        Modular(groups, Refusing({"limit": 1.0}), SGD(0.1))


def test_an_error_that_explains_itself_is_the_authors():
    def divide(tensor, *_):
        return 1 / len([])

    params = parameters(shapes=SHAPES)
    with pytest.raises(ZeroDivisionError) as raised:
        train(Modular(params, tensorwise(divide)()), params, gradients(params, 1))
    assert raised.value.__notes__ == ["in Own({'limit': 2.0})"]

    def apply_tensor(self, tensor, param, grad, other, state, setting):
        return tensor * (setting["limit"] > 3)

    has_no_limit = derived(TensorwiseTransform, {"limit": None}, apply_tensor=apply_tensor)
    optimizer = Modular(params, has_no_limit())
    optimizer.report_loss(1.0)
    with pytest.raises(TypeError, match="not supported between instances of 'NoneType' and 'int'") as raised:
        train(optimizer, params, gradients(params, 1))
    assert raised.value.__notes__ == ["in Own({'limit': None})"]


def test_what_a_gate_says_of_skipped_steps_is_text():
    params = parameters(shapes=SHAPES)
    refusing = gate(lambda norm, step: norm >= 0, why=lambda self, norm, step: None)()
    optimizer = Modular(params, refusing, SGD(0.1))
    rows = gradients(params, 1)
    train(optimizer, params, rows * 19)
    with pytest.raises(RuntimeError, match=r"^Own\({'limit': 2.0}\).why returned NoneType instead of a string"):
        train(optimizer, params, rows)


def test_a_gate_gets_the_loss_if_it_declares_it():
    seen = []
    judge = gate(lambda norm, step: after(seen.append(step.loss), norm > 1e9), needs_loss=True)
    for make, expected in ((judge, 3.0), (gate(lambda norm, step: after(seen.append(step.loss), norm > 1e9)), None)):
        params = parameters(shapes=SHAPES)
        optimizer = Modular(params, make(), SGD(0.1))
        set_grads(params, gradients(params, 1)[0])
        optimizer.report_loss(3.0)
        optimizer.step()
        assert seen.pop() == expected


@pytest.mark.parametrize("pure", [False, True])
@pytest.mark.parametrize("fast", [False, True])
def test_a_transform_gets_the_loss_unless_it_is_pure(pure, fast):
    """In each step, also in those that follow a plan."""
    seen = []
    each = tensorwise(lambda tensor, *rest: after(seen.append(rest[2]), tensor), pure=pure)
    factors = scaling(
        lambda measured, updates, step: after(seen.append(step.loss), torch.ones_like(measured.vector)), pure=pure
    )
    for make in (each, factors):
        params = parameters(shapes=SHAPES[:1])
        optimizer = Modular(params, make(), SGD(0.1), fast=fast)
        for row in gradients(params, 8):
            set_grads(params, row)
            optimizer.report_loss(3.0)
            optimizer.step()
        assert seen == [None if pure else 3.0] * 8
        seen.clear()


class Late(Mul):
    """Stores a value under a key that only ``possible_state`` declares."""

    def __init__(self, value):
        super().__init__(1.0)
        self.value = value

    def init_state(self, param, setting):
        return {}

    def possible_state(self, param, setting):
        return {"window": torch.zeros(3)}

    def apply_tensors(self, updates, step):
        for state in step.states:
            state["window"] = self.value
        return updates


def test_state_that_is_declared_may_come_late():
    params = parameters(shapes=SHAPES)
    optimizer = Modular(params, Late(torch.ones(3)))
    train(optimizer, params, gradients(params, 1))
    Modular(parameters(shapes=SHAPES), Late(torch.ones(3))).load_state_dict(optimizer.state_dict())
    with pytest.raises(TypeError, match="has list as state 'window'"):
        train(Modular(params, Late([1.0])), params, gradients(params, 1))


def test_state_of_the_chain_is_refused_when_the_optimizer_is_made():
    with pytest.raises(TypeError, match="has list as state 'window'"):
        Modular(parameters(), joint(list, init_global_state=lambda self: {"window": [1.0]})())


@pytest.mark.parametrize("value", [1, 0.5, True, torch.zeros(3)])
def test_tensors_and_numbers_are_state(value):
    params = parameters(shapes=SHAPES)
    make = tensorwise(lambda tensor, *_: tensor, init_state=lambda *_: {"window": value})
    optimizer = Modular(params, make())
    train(optimizer, params, gradients(params, 1))
    stored = [torch.as_tensor(optimizer.state[param]["own/window"]) for param in params]
    assert all(torch.equal(kept, torch.as_tensor(value)) for kept in stored)


@pytest.mark.parametrize("fast", [True, False])
def test_factors_of_half_precision_count_as_wider_ones(fast):
    params = [torch.nn.Parameter(torch.zeros(2))]
    half = scaling(lambda measured, *_: (1 / measured.vector).bfloat16())
    train(Modular(params, half(), SGD(1.0), fast=fast), params, [[torch.tensor([0.0, 4.0])]])
    assert params[0].tolist() == [0.0, -1.0]


@pytest.mark.parametrize("fast", [True, False])
def test_an_update_may_be_an_expanded_number(fast):
    params = parameters(shapes=SHAPES)
    mean = joint(lambda updates, step: [update.mean().expand_as(update) for update in updates])
    optimizer = Modular(params, mean(), ClipNorm(1.0), fast=fast)
    train(optimizer, params, [[torch.zeros(2), torch.tensor([[4.0, 0.0], [4.0, 0.0]])]])
    assert optimizer.metrics()["clip_norm/factor"].item() == 0.625
