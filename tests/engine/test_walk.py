"""One step of a chain: its number of calls, its checks and errors, and the memory that it may write to."""

import inspect
import re
import sys
import threading
from collections import Counter
from pathlib import Path

import pytest
import torch
from contract.entries import Mul
from contract.training import assert_equal, gradients, parameters, set_grads, train, values
from torch import nn
from versions import needs_grad_dtype

import torchzero_clip
from torchzero_clip import (
    LR,
    SGD,
    Adam,
    AdamW,
    Centralize,
    Chain,
    ClipNorm,
    ClipNormByEMA,
    ClipNormGrowth,
    ClipValue,
    ClipValueByEMA,
    ClipValueGrowth,
    Gate,
    Modular,
    RMSprop,
    Scaling,
    SkipStep,
    TensorwiseTransform,
    Transform,
    UpdateRule,
    Wrap,
)
from torchzero_clip.checks import non_negative
from torchzero_clip.core import chain, kinds

PACKAGE = str(Path(torchzero_clip.__file__).parent)
COMPREHENSIONS = {"<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>"}


def calls_of_a_step(tensors, *, builtin=False):
    """The code objects of this package that the third step calls, one entry per call, comprehensions apart.

    ``builtin`` counts every call of a function in C and of other packages as well.
    """
    params = [nn.Parameter(torch.randn(4, 3)) for _ in range(tensors)]
    optimizer = Modular(params, ClipNorm(1, dim="global"), AdamW())
    train(optimizer, params, [[torch.randn_like(p) for p in params] for _ in range(2)])
    set_grads(params, [torch.randn_like(p) for p in params])
    calls = []

    def record(frame, event, _):
        code = frame.f_code
        own = code.co_filename.startswith(PACKAGE) and code.co_name not in COMPREHENSIONS
        if event in ("call", "c_call") if builtin else event == "call" and own:
            calls.append(code)

    sys.setprofile(record)
    try:
        optimizer.step()
    finally:
        sys.setprofile(None)
    return calls


def test_the_walk_is_short():
    calls = calls_of_a_step(2)
    assert 50 < len(calls) <= 165
    assert len(set(calls)) <= 105
    assert len({code.co_filename for code in calls}) <= 22


def test_the_walk_is_short_for_each_additional_tensor():
    calls, more = (len(calls_of_a_step(tensors, builtin=True)) for tensors in (2, 102))
    assert (more - calls) / 100 <= 5


def test_functions_of_the_walk_fit_a_screen():
    for code in set(calls_of_a_step(2)):
        lines, _ = inspect.getsourcelines(code)
        doc = code.co_consts[0] if code.co_consts and isinstance(code.co_consts[0], str) else ""
        assert len(lines) - doc.count("\n") <= 40, code.co_qualname


def test_base_classes_have_one_flag():
    bases = [Transform, TensorwiseTransform, chain.Composite, Chain, Scaling, UpdateRule, kinds.FinalRule, Gate]
    flags = {key for base in bases for key, value in vars(base).items() if isinstance(value, bool)}
    assert flags == {"keeps_statistics"}


class Counted(ClipNorm):
    """Counts how often its setting is checked."""

    seen: list[float] = []
    checks = {"max_norm": lambda name, value: (non_negative(name, value), Counted.seen.append(value))}


@pytest.mark.parametrize("nested", [False, True])
def test_every_setting_is_checked_once_a_step_and_again_after_a_closure(nested):
    params = parameters()
    clip = Counted(0.5)
    chain = Chain(Chain(clip, target="update_difference"), target="update_difference") if nested else clip
    optimizer = Modular([{"params": params[:2]}, {"params": params[2:]}], chain, Adam())
    set_grads(params, gradients(params, 1)[0])
    Counted.seen.clear()
    optimizer.step()
    assert Counted.seen == [0.5, 0.5]  # one for each group
    optimizer.step(lambda: None)
    assert Counted.seen == [0.5] * 6


def test_a_closure_may_change_settings_and_add_groups():
    first, second = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    optimizer = Modular([first], ClipNorm(1.0))

    def closure():
        if len(optimizer.param_groups) == 1:
            optimizer.add_param_group({"params": [second], "max_norm": 0.5})
        optimizer.param_groups[0]["max_norm"] = 2.0
        first.grad, second.grad = torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.0])

    optimizer.step(closure)
    assert first.tolist() == pytest.approx([-1.2, -1.6])
    assert second.tolist() == pytest.approx([-0.3, -0.4])

    before = values([first, second])

    def bad():
        optimizer.param_groups[1]["max_norm"] = -1.0

    with pytest.raises(ValueError, match=r"max_norm must be >= 0, got -1.0"):
        optimizer.step(bad)
    assert_equal([first, second], before)


def test_two_optimizers_that_share_instances_step_in_two_threads():
    shared = [
        ClipNorm(0.5, dim="global"),
        ClipValueByEMA(0.5, ema_tfm=Mul(2.0)),
        ClipNormByEMA(0.5, tensorwise=False),
        ClipValueGrowth(),
        ClipNormGrowth(),
        Adam(),
    ]
    runs = [(parameters(torch.float64), gradients(parameters(torch.float64), 60, seed)) for seed in (1, 2)]
    expected = [(parameters(torch.float64), rows) for _, rows in runs]
    for params, rows in expected:
        train(Modular(params, *shared), params, rows)
    optimizers = [Modular(params, *shared) for params, _ in runs]
    barrier, errors = threading.Barrier(2), []

    def run(optimizer, params, rows):
        try:
            for row in rows:
                barrier.wait(timeout=60)
                train(optimizer, params, [row])
        except Exception as error:
            errors.append(error)
            barrier.abort()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=run, args=(o, *r)) for o, r in zip(optimizers, runs, strict=True)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not errors
    for (params, _), (other, _) in zip(runs, expected, strict=True):
        assert_equal(params, other)


@pytest.mark.parametrize(
    ("target", "update"), [("update_difference", [0.0, 0.0]), ("params_difference", [0.0, 0.0]), ("grad", [1.0, 3.0])]
)
def test_target_grad_inside_a_chain_with_a_target_changes_the_gradient_only(target, update):
    param = nn.Parameter(torch.zeros(2))
    param.grad = torch.tensor([1.0, 3.0])
    Modular([param], Chain(Centralize(target="grad"), ClipNorm(99), target=target)).step()
    assert (-param).tolist() == update
    assert param.grad.tolist() == ([1.0, 3.0] if target == "grad" else [-1.0, 1.0])


def test_target_grad_in_a_unit_inside_a_unit():
    param = nn.Parameter(torch.zeros(2))
    param.grad = torch.tensor([1.0, 3.0])
    inner = Chain(Mul(2.0), Centralize(target="grad"), target="update_difference")  # [1, 3] - [2, 6]
    Modular([param], Chain(inner, Mul(10.0), target="update_difference")).step()  # [1, 3] - [-10, -30]
    assert (-param).tolist() == [11.0, 33.0]
    assert param.grad.tolist() == [-1.0, 1.0]


@pytest.mark.parametrize(
    "make", [lambda: ClipNorm(1.0), lambda: [ClipNorm(1.0), SGD(1.0)], lambda: ClipValue(0.5), lambda: Centralize(),
             lambda: [ClipNorm(1.0, target="grad"), SGD(1.0)]],
)  # fmt: skip
def test_expanded_gradients_are_gradients_like_others(make):
    params, plain = parameters(shapes=[(3,), (2, 3)]), parameters(shapes=[(3,), (2, 3)])
    params[0].grad, params[1].grad = torch.ones(1).expand(3), torch.tensor([[2.0], [3.0]]).expand(2, 3)
    set_grads(plain, [grad.grad.contiguous() for grad in params])
    Modular(params, make()).step()
    Modular(plain, make()).step()
    assert_equal(params, plain)
    assert_equal([p.grad for p in params], [p.grad for p in plain])


@pytest.mark.parametrize("dim", [None, "global"])
@pytest.mark.parametrize("keep_grads", [False, True])
def test_parameters_that_share_one_gradient_are_scaled_once(dim, keep_grads):
    params, plain = parameters(shapes=[(2,), (2,)]), parameters(shapes=[(2,), (2,)])
    shared = torch.tensor([3.0, 4.0])
    params[0].grad = params[1].grad = shared
    set_grads(plain, [shared, shared])
    for each in (params, plain):
        Modular(each, ClipNorm(1.0, dim=dim), SGD(1.0), keep_grads=keep_grads).step()
    assert_equal(params, plain)
    assert_equal([p.grad for p in params], [p.grad for p in plain])


def test_a_chain_on_meta_parameters_says_that_they_have_no_values():
    with torch.device("meta"):
        model = nn.Linear(2, 1)
    optimizer = Modular(model, SkipStep(1.0), ClipNormByEMA(tensorwise=False), Adam())
    model.to_empty(device="cpu")  # makes other parameters
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(RuntimeError, match=r"weight is on the meta device and has no values: .* Build Modular after"):
        optimizer.step()


def test_a_chain_on_meta_parameters_works_if_they_are_given_values_in_place():
    with torch.device("meta"):
        model = nn.Linear(2, 1)
    optimizer = Modular(model, ClipNormByEMA(tensorwise=False), Adam())
    other = nn.Linear(2, 1)
    for name, param in list(model.named_parameters()):
        torch.utils.swap_tensors(param, nn.Parameter(getattr(other, name).detach().clone()))
    reference = Modular(other, ClipNormByEMA(tensorwise=False), Adam())
    for module, stepper in ((model, optimizer), (other, reference)):
        module(torch.ones(1, 2)).sum().backward()
        stepper.step()
    assert_equal(model.parameters(), other.parameters())


@needs_grad_dtype
@pytest.mark.parametrize("name", ["Adagrad", "NAdam", "SGD"])
def test_wrap_takes_gradients_of_another_dtype(name):
    param, plain = (nn.Parameter(torch.ones(2, dtype=torch.bfloat16)) for _ in range(2))
    param.grad_dtype = torch.float32
    wrapped = getattr(torch.optim, name)
    optimizer, reference = Modular([param], ClipNorm(1.0), Wrap(wrapped, lr=0.5)), wrapped([plain], lr=0.5)
    for _ in range(2):
        param.grad, plain.grad = torch.tensor([3.0, 4.0]), torch.tensor([0.6, 0.8], dtype=torch.bfloat16)
        optimizer.step()
        reference.step()
        assert param.grad.dtype == torch.float32
        assert param.grad.tolist() == [3.0, 4.0]
    assert_equal([param], [plain])


@pytest.mark.parametrize("what", ["gradient", "state"])
def test_a_parameter_of_another_shape_is_an_error_before_anything_changes(what):
    first, second = parameters(shapes=[(2,), (4, 3)])
    optimizer = Modular([("first", first), ("second", second)], ClipNorm(0.1), ClipNormGrowth(), Adam())
    rows = [gradients([first, second], 1)[0]] * 2
    train(optimizer, [first, second], rows[:1])
    set_grads([first, second], rows[0])
    second.data = torch.zeros(2, 3)
    if what == "state":
        second.grad = torch.ones(2, 3)
    before, grads = values([first, second]), [first.grad.clone(), second.grad.clone()]
    state = {key: value.clone() for key, value in optimizer.state[first].items()}
    message = "the gradient of second has" if what == "gradient" else "the state 'adam/exp_avg' of second has"
    with pytest.raises(RuntimeError, match=rf"{message} shape \(4, 3\), and the parameter has \(2, 3\)"):
        optimizer.step()
    assert_equal([first, second], before)
    assert_equal([first.grad, second.grad], grads)
    torch.testing.assert_close(dict(optimizer.state[first]), state, rtol=0, atol=0)

    del optimizer.state[second]
    second.grad = torch.ones(2, 3)
    optimizer.step()
    assert optimizer.state[second]["adam/exp_avg"].shape == (2, 3)


def test_state_of_a_shape_of_its_own_is_no_error():
    class Window(TensorwiseTransform):
        def __init__(self):
            super().__init__({})

        def init_state(self, param, setting):
            return {"last": torch.zeros(5, device=param.device)}

        def apply_tensor(self, tensor, param, grad, loss, state, setting):
            state["last"].copy_(state["last"].roll(1))
            return tensor

    params = parameters()
    optimizer = Modular(params, Window(), Adam())
    train(optimizer, params, gradients(params, 3))
    assert all(state["window/last"].shape == (5,) for state in optimizer.state.values())


class Remembering(UpdateRule):
    """Returns its own state, as `kind` says."""

    default_lr = 1.0

    def __init__(self, kind):
        super().__init__({})
        self.kind = kind

    def init_state(self, param, setting):
        return {"sum": torch.zeros_like(param)}

    def apply_tensors(self, updates, step):
        for update, state in zip(updates, step.states, strict=True):
            state["sum"].add_(update)
        if self.kind == "grads":
            return step.grads
        return step.params if self.kind == "params" else [state["sum"] for state in step.states]


@pytest.mark.filterwarnings("ignore:two optimizers act on")
@pytest.mark.parametrize("kind", ["state", "grads", "params"])
@pytest.mark.parametrize("later", [lambda: Mul(0.5), lambda: [SGD(), Mul(0.5)], lambda: ClipNorm(0.1)])
def test_what_a_rule_returns_of_its_own_is_not_written_to(kind, later):
    params = parameters(torch.float64)
    rows = gradients(params, 2)
    optimizer = Modular(params, Remembering(kind), later(), LR(0.0))
    before = values(params)
    train(optimizer, params, rows)
    assert_equal(params, before)
    assert_equal([p.grad for p in params], rows[-1])
    assert_equal([optimizer.state[p]["remembering/sum"] for p in params], [a + b for a, b in zip(*rows, strict=True)])


@pytest.mark.parametrize(
    ("base", "kind"), [(ClipNorm, "Scaling"), (Scaling, "Scaling"), (SkipStep, "Gate"), (Wrap, "FinalRule")]
)
def test_a_kind_that_is_never_asked_for_tensors_refuses_to_be(base, kind):
    with pytest.raises(
        TypeError, match=rf"Own.apply_tensors would never be called, because Own is a {kind}: implement"
    ):
        type("Own", (base,), {"apply_tensors": lambda self, updates, step: updates})


def test_gradient_statistics_have_to_be_declared():
    class Undeclared(TensorwiseTransform):
        def __init__(self):
            super().__init__({})

        def apply_tensor(self, tensor, param, grad, loss, state, setting):
            return tensor

        def apply_tensors(self, updates, step):
            return [update * step.finite.sum() for update in updates]

    params = parameters()
    with pytest.raises(RuntimeError, match="write keeps_statistics = True in the class of the transform"):
        train(Modular(params, Undeclared()), params, gradients(params, 1))


class Asks(Transform):
    """Notes what it is told of gradients."""

    keeps_statistics = True

    def __init__(self):
        super().__init__({})
        self.told = []

    def apply_tensors(self, updates, step):
        self.told.append((step.finite.tolist(), step.nonzero.tolist()))
        return updates


@pytest.mark.parametrize(
    "before", [list, lambda: ClipNorm(0.1), lambda: ClipNorm(0.1, "linf"), lambda: ClipNorm(0.0, "std"),
               lambda: ClipNorm(0.0, dim=0),
               lambda: Mul(0.0), lambda: ClipNorm(0.1).only(lambda p: p.ndim == 2), lambda: SkipStep(1e9),
               lambda: Chain(ClipNorm(0.0), target="update_difference"), lambda: Adam(), lambda: Centralize()],
)  # fmt: skip
def test_gradients_are_described_as_they_entered_the_chain(before):
    params = parameters()
    asks = Asks()
    options = {} if isinstance(before(), SkipStep) else {"maximize": True}
    optimizer = Modular(params, before(), asks, LR(0.0), **options)
    rows = gradients(params, 1)[0]
    rows[1].zero_()
    if not isinstance(before(), SkipStep):
        rows[2][0, 0, 0], rows[3] = torch.inf, torch.tensor(torch.nan)
    train(optimizer, params, [rows])
    expected = [row.isfinite().all().item() for row in rows], [row.count_nonzero().item() > 0 for row in rows]
    assert asks.told == [expected]


@pytest.mark.parametrize("transform", [ClipNormGrowth, ClipValueGrowth])
@pytest.mark.parametrize("scoped", [False, True])
def test_statistics_in_a_chain_that_acts_on_the_gradients_of_a_closure(transform, scoped):
    def chain():
        unit = Chain(Mul(1.0), transform(), target="closure")
        return [unit.only(lambda p: p.ndim == 2) if scoped else unit, SGD(1.0)]

    params, plain = parameters(torch.float64), parameters(torch.float64)
    optimizer = Modular(params, chain())
    inner = transform().only(lambda p: p.ndim == 2) if scoped else transform()
    reference = Modular(plain, inner, SGD(1.0))
    for row in gradients(params, 4):
        optimizer.step(lambda row=row: set_grads(params, row))
        train(reference, plain, [row])
    assert_equal(params, plain)


def test_each_part_of_the_state_is_stored_even_if_a_later_tensor_fails():
    class Fails(TensorwiseTransform):
        def __init__(self):
            super().__init__({})

        def init_state(self, param, setting):
            return {"count": torch.zeros(())}

        def apply_tensor(self, tensor, param, grad, loss, state, setting):
            state["count"] = state["count"] + 1
            if tensor.ndim == 1:
                raise ArithmeticError("bad luck")
            return tensor

    params = parameters()
    optimizer = Modular(params, Fails())
    with pytest.raises(ArithmeticError, match="bad luck"):
        train(optimizer, params, gradients(params, 1))
    assert [optimizer.state[p]["fails/count"].item() for p in params] == [1, 1, 0, 0]


def test_metrics_stay_those_of_the_step_before_if_a_step_fails():
    params = parameters()
    optimizer = Modular(params, ClipNorm(1.0), AdamW())
    train(optimizer, params, gradients(params, 1))
    before = optimizer.metrics()
    params[0].data = torch.zeros(7)
    with pytest.raises(RuntimeError, match="has shape"):
        optimizer.step()
    assert Counter(optimizer.metrics()) == Counter(before)


class SameForAll(UpdateRule):
    """Returns one tensor for all parameters: a new one, or state of the whole chain."""

    default_lr = 1.0

    def __init__(self, of_the_chain):
        super().__init__({})
        self.of_the_chain = of_the_chain

    def init_global_state(self):
        return {"direction": torch.ones(2)}

    def apply_tensors(self, updates, step):
        return [step.global_state["direction"] if self.of_the_chain else torch.ones(2)] * len(updates)


@pytest.mark.parametrize("of_the_chain", [False, True])
def test_one_tensor_for_two_parameters_is_scaled_once_for_each(of_the_chain):
    params = [nn.Parameter(torch.zeros(2)) for _ in range(2)]
    optimizer = Modular(params, SameForAll(of_the_chain), Mul(2.0), Mul(2.0))
    train(optimizer, params, [[torch.ones(2)] * 2] * 2)
    assert [param.tolist() for param in params] == [[-8.0, -8.0]] * 2


def test_a_transform_after_one_that_makes_infs_of_finite_gradients_goes_on():
    class Overflows(Mul):
        def apply_tensors(self, updates, step):
            return [update * (torch.inf if update[0] == 7 else 1.0) for update in updates]

    for name in ("ClipToUsualNorm", "ScaleByUsualNorm"):
        page = (Path(__file__).parents[2] / "docs" / "statistics.md").read_text()
        names = {"torch": torch, "model": nn.Linear(2, 2)}
        for block in re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL):
            exec(compile(block, "statistics.md", "exec"), names)
        param = nn.Parameter(torch.zeros(2))
        optimizer = Modular([param], Overflows(1.0), names[name]())
        for gradient in ([3.0, 4.0], [7.0, 1.0], [3.0, 4.0]):
            param.data.zero_()
            param.grad = torch.tensor(gradient)
            optimizer.step()
        assert param.isfinite().all(), name


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: torch.ones(3),
            r"returned factors of shape \(3,\) for 2 slices: see Measured.joined",
        ),
        (lambda: [1.0, 1.0], r"returned factors of list for 2 slices"),
        (lambda: None, r"returned factors of NoneType"),
    ],
)
def test_wrong_factors_are_named(make, message):
    class Wrong(Scaling):
        def __init__(self):
            super().__init__({})

        def factors(self, measured, updates, step):
            return make()

    params = parameters(shapes=[(2,), (3,)])
    with pytest.raises(RuntimeError, match=message):
        train(Modular(params, Wrong()), params, gradients(params, 1))


def test_a_transform_that_returns_no_list_is_named():
    class Forgets(Mul):
        def apply_tensors(self, updates, step):
            updates[0].mul_(2)

    params = parameters()
    with pytest.raises(RuntimeError, match="returned NoneType instead of a list of tensors"):
        train(Modular(params, Forgets(1.0)), params, gradients(params, 1))


@pytest.mark.parametrize("started", [torch.ones(2) > 0, torch.ones(4), torch.tensor(True)])
def test_started_is_a_vector_of_booleans(started):
    class Careless(Transform):
        keeps_statistics = True

        def __init__(self):
            super().__init__({})

        def apply_tensors(self, updates, step):
            step.usable(started)
            return updates

    params = parameters()
    with pytest.raises(ValueError, match="started must be booleans, 4 of them, got"):
        train(Modular(params, Careless()), params, gradients(params, 1))


@pytest.mark.parametrize("base", [Transform, UpdateRule])
def test_the_learning_rate_is_no_setting_of_an_author(base):
    def construct(self):
        base.__init__(self, {"lr": 0.1})

    own = type("Own", (base,), {"__init__": construct, "apply_tensors": lambda self, updates, step: updates})
    with pytest.raises(ValueError, match=r"Own\(\) has a setting 'lr', .* pass lr= to super\(\).__init__"):
        Modular(parameters(), own(), SGD(0.1))


def test_a_check_of_a_setting_that_does_not_exist_is_an_error():
    class Mistyped(Mul):
        checks = {"ohter": non_negative}

    with pytest.raises(ValueError, match="checks of Mistyped has 'ohter', which is none of its settings"):
        Mistyped(1.0)


def test_repr_of_an_author_shows_what_it_can():
    class Own(Mul):
        def __init__(self, other, hidden=3, *args, name=None, **kwargs):
            super().__init__(other)

    assert repr(Own(2.0)) == "Own(2.0)"


@pytest.mark.filterwarnings("ignore:two optimizers act on")
@pytest.mark.parametrize(
    ("rule", "key"), [(lambda: SGD(momentum=0.9), "sgd/momentum_buffer"), (lambda: RMSprop(momentum=0.9), None)]
)
@pytest.mark.parametrize(
    "later",
    [
        lambda: [ClipNorm(0.01), Adam(lr=0.1)],
        lambda: [ClipNorm(0.01, dim="global"), Mul(2.0)],
        lambda: Wrap(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    ],
)
def test_state_that_a_rule_returns_is_scaled_by_nothing_behind_it(rule, key, later):
    params, plain = parameters(torch.float64), parameters(torch.float64)
    optimizer, reference = Modular(params, rule(), later()), Modular(plain, rule())
    for row in gradients(params, 3):
        train(optimizer, params, [row])
        train(reference, plain, [row])
    for param, other in zip(params, plain, strict=True):
        for name, value in reference.state[other].items():
            torch.testing.assert_close(optimizer.state[param][name], value, rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:two optimizers act on")
def test_parameters_that_a_transform_returns_are_not_scaled_by_a_clip():
    params = parameters()
    before = values(params)
    train(Modular(params, Remembering("params"), ClipNorm(0.01), Adam(lr=0.0)), params, gradients(params, 1))
    assert_equal(params, before)


class Keeps(TensorwiseTransform):
    """Puts what it is given into its state, and returns it."""

    def __init__(self):
        super().__init__({})

    def init_state(self, param, setting):
        return {"last": torch.zeros_like(param)}

    def apply_tensor(self, tensor, param, grad, loss, state, setting):
        state["last"] = tensor
        return tensor


@pytest.mark.parametrize("before", [list, lambda: Centralize(min_size=99)])
def test_what_a_transform_kept_of_its_updates_is_not_written_to(before):
    params = parameters()
    rows = gradients(params, 1)
    optimizer = Modular(params, before(), Keeps(), ClipNorm(0.01), LR(1.0))
    train(optimizer, params, rows)
    assert_equal([optimizer.state[p]["keeps/last"] for p in params], rows[0])


def test_one_tensor_for_two_parameters_is_scaled_for_those_in_scope_only():
    first, second = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    named = [("first", first), ("second", second)]
    optimizer = Modular(named, SameForAll(False), ClipNorm(0.1).only("first"))
    train(optimizer, [first, second], [[torch.ones(2)] * 2])
    assert first.tolist() == pytest.approx([-(0.005**0.5)] * 2)
    assert second.tolist() == [-1.0, -1.0]


class Lazy(TensorwiseTransform):
    """Keeps state of matrices that it does not declare."""

    def __init__(self):
        super().__init__({})

    def apply_tensor(self, tensor, param, grad, loss, state, setting):
        if param.ndim == 2:
            state["count"] = 1
        return tensor


class LazyScaling(Scaling):
    def __init__(self):
        super().__init__({})

    def factors(self, measured, updates, step):
        step.states[-1]["count"] = 1
        return torch.ones_like(measured.joined(measured.norms))


@pytest.mark.parametrize("lazy", [Lazy, LazyScaling])
def test_state_that_is_not_declared_is_named_whichever_parameter_has_it(lazy):
    params = parameters(shapes=[(2,), (2, 2)])
    with pytest.raises(RuntimeError, match=r"keeps state \['count'\] that its init_state does not return"):
        train(Modular(params, lazy()), params, gradients(params, 1))


@pytest.mark.parametrize(("dims", "wrong"), [((-1,), False), ((1, -1), False), ((5,), True), ((-3,), True)])
def test_dimensions_of_slices_may_count_from_the_end_and_have_to_exist(dims, wrong):
    class Rows(ClipNorm):
        def slice_dims(self, tensor):
            return dims

    param, plain = parameters(shapes=[(2, 3)]), parameters(shapes=[(2, 3)])
    rows = gradients(param, 1)
    if wrong:
        with pytest.raises(ValueError, match=r"slice_dims returned .* for a tensor of shape \(2, 3\)"):
            train(Modular(param, Rows(0.1)), param, rows)
    else:
        train(Modular(param, Rows(0.1)), param, rows)
        train(Modular(plain, ClipNorm(0.1, dim=1)), plain, rows)
        assert_equal(param, plain)


def test_a_frozen_parameter_may_stay_on_the_meta_device():
    param, frozen = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1, device="meta"), requires_grad=False)
    param.grad = torch.ones(1)
    Modular([param, frozen], SGD(0.5)).step()
    assert param.tolist() == [-0.5]


def test_subclasses_that_override_arithmetic_are_not_replaced_by_that_of_torch():
    class Still(Adam):
        def apply_tensors(self, updates, step):
            return [torch.zeros_like(update) for update in updates]

    class Doubled(LR):
        def apply_tensors(self, updates, step):
            return [2 * update for update in super().apply_tensors(updates, step)]

    params = parameters()
    before = values(params)
    train(Modular(params, Still()), params, gradients(params, 1))
    assert_equal(params, before)
    param = nn.Parameter(torch.zeros(1))
    train(Modular([param], Doubled(0.5)), [param], [[torch.ones(1)]])
    assert param.tolist() == [-1.0]
