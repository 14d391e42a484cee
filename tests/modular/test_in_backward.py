"""Steps in the backward equal the ordinary ones, and what cannot be taken there is refused before anything changes."""

import copy
import gc
import warnings
import weakref
from types import SimpleNamespace

import pytest
import ranks
import table
import torch
from contract.entries import ENTRIES, Mul
from contract.training import Model, assert_equal, assert_equal_to_rounding, gradients, parameters, through_file, values
from hypothesis import given, settings
from hypothesis import strategies as st
from modular import sharded_in_backward
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim.lr_scheduler import ExponentialLR
from torch.utils.checkpoint import checkpoint

from torchzero_clip import (
    LR,
    SGD,
    AdaGC,
    Adam,
    AdamW,
    AdaptiveGradientClip,
    AutoClip,
    Centralize,
    Chain,
    ClipByMaxEMA,
    ClipNorm,
    ClipNormByEMA,
    ClipNormGrowth,
    ClipValue,
    ClipValueByEMA,
    Modular,
    Normalize,
    Recorder,
    SkipStep,
    TensorwiseTransform,
    Wrap,
    ZClip,
    step_in_backward,
)
from torchzero_clip.core.transform import treats_each_alone

SHAPES = [*table.SHAPES, (70, 9)]
SMALL = 100  # bytes of a bucket: two parameters share one now and then


def takes_part(entry):
    return all(treats_each_alone(node.transform) and not node.global_keys for node in Chain(entry.make()).nodes())


TAKING_PART = [entry for entry in ENTRIES if takes_part(entry)]


def named(params, first=0):
    return [(f"p{first + i}", param) for i, param in enumerate(params)]


def backward(params, row):
    """A backward that gives the parameters these gradients."""
    loss = sum(
        ((p * g.conj()).sum().real for p, g in zip(params, row, strict=True) if p.requires_grad), torch.zeros(())
    )
    loss.backward()


def run(make, params, grads, bucket, *, fast=True, schedules=True):
    """Train with a scheduler, a checkpoint after step 1, a parameter from step 2 on, and a gradient set in step 4.

    Args:
        make: Makes the chain.
        params: The parameters; the last one is added later.
        grads: Their gradients in each step.
        bucket: The bytes of a bucket; None for ordinary steps.
        fast: As in `Modular`.
        schedules: There is a scheduler of torch.
    """

    def optimizer_of(trained):
        optimizer = Modular(named(trained), make(), fast=fast)
        handle = None if bucket is None else step_in_backward(optimizer, bucket_bytes=bucket)
        return optimizer, handle, ExponentialLR(optimizer, 0.9) if schedules else None

    trained, metrics = list(params[:-1]), []
    optimizer, handle, scheduler = optimizer_of(trained)
    for k, row in enumerate(grads):
        if k == 2:
            saved = through_file(optimizer.state_dict())
            if handle is not None:
                handle.remove()
            optimizer, handle, scheduler = optimizer_of(trained)
            optimizer.load_state_dict(saved)
            optimizer.add_param_group({"params": named(params[-1:], len(trained))})
            trained.append(params[-1])
            scheduler = ExponentialLR(optimizer, 0.9) if schedules else None
        optimizer.zero_grad()
        by_hand = 1 if k == 4 else 0
        backward(trained[by_hand:], row[by_hand : len(trained)])
        for param, grad in zip(trained[:by_hand], row, strict=False):
            param.grad = grad.clone()
        if bucket is not None:
            assert [p.grad is None for p in trained] == [i >= by_hand for i in range(len(trained))]
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        metrics.append(optimizer.metrics())
    return values(params), optimizer.state_dict(), metrics


def assert_same_runs(make, dtypes, bucket, *, shares=True, **options):
    """Both kinds of steps give the same, but rounding may move a norm across its limit, which changes ``shares``."""

    def once(bucket):
        params = [
            nn.Parameter(p.detach().to(d)) for p, d in zip(parameters(torch.float64, SHAPES), dtypes, strict=True)
        ]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # patterns of scopes, orders of transforms
            return run(make, params, gradients(params, 6), bucket, **options)

    (params, state, metrics), (own_params, own_state, own_metrics) = once(None), once(bucket)
    assert_equal_to_rounding(own_params, params)
    assert_equal_to_rounding(own_state, state)
    for own, expected in zip(own_metrics, metrics, strict=True):
        compared = [key for key in expected if shares or not key.endswith("/clipped")]
        assert list(own) == list(expected)
        assert_equal_to_rounding([own[key] for key in compared], [expected[key] for key in compared])


WAYS = {
    "float32": ([torch.float32] * 5, SMALL, True),
    "float32, each at once": ([torch.float32] * 5, 0, True),
    "readable": ([torch.float32] * 5, SMALL, False),
    "float64": ([torch.float64] * 5, 10**9, True),
    "bfloat16": ([torch.bfloat16] * 5, SMALL, True),
    "float16": ([torch.float16] * 5, SMALL, True),
    "complex": ([torch.complex64] * 5, 0, True),
    "mixed": ([torch.float32, torch.bfloat16] * 2 + [torch.float64], 0, True),
}


@pytest.mark.parametrize(
    ("entry", "way"),
    [
        pytest.param(entry, way, marks=[pytest.mark.slow] * (way != "float32"), id=f"{way}-{entry}")
        for way in WAYS
        for entry in TAKING_PART
        if way == "float32" or not entry.varies  # dtypes, buckets and the way are not the transform's business
    ],
)
def test_equals_the_ordinary_step(entry, way):
    dtypes, bucket, fast = WAYS[way]
    assert_same_runs(entry.make, dtypes, bucket, fast=fast, schedules=entry.name != "schedules")


def is_long(param):
    return param.numel() > 11


def is_flat(param):
    return param.ndim < 2


SCOPES = {
    "all": lambda t: t,
    "long": lambda t: t.only(is_long),
    "not long": lambda t: t.without(is_long),
    "flat": lambda t: t.only(is_flat),
    "by name": lambda t: t.without("p1", "p4"),
}
LINKS = [
    lambda: ClipNorm(0.5),
    lambda: ClipNorm(0.5, "linf"),
    lambda: ClipNorm(0.5, dim=0, inverse_dims=True),
    lambda: ClipValue(0.1),
    lambda: Centralize(),
    lambda: ClipNormGrowth(),
    lambda: ClipValueByEMA(0.5),
    lambda: ClipNormByEMA(0.5),
    lambda: ClipByMaxEMA(0.5),
    lambda: AdaptiveGradientClip(0.1),
    lambda: Chain(ClipValue(0.1), Normalize(0.5), target="update_difference"),
]
ENDS = [lambda: AdamW(0.1), lambda: SGD(0.1, 0.9), lambda: Wrap(torch.optim.Adagrad, lr=0.1), lambda: LR(0.1)]


@pytest.mark.slow
@settings(max_examples=25)
@given(
    links=st.lists(st.tuples(st.sampled_from(LINKS), st.sampled_from(sorted(SCOPES))), min_size=1, max_size=3),
    end=st.sampled_from(ENDS),
    way=st.sampled_from(sorted(WAYS)),
    bucket=st.sampled_from([0, SMALL, 400, 10**9]),
)
def test_random_chains_equal_the_ordinary_step(links, end, way, bucket):
    dtypes, _, fast = WAYS[way]

    def chain():
        return [*(SCOPES[where](link()) for link, where in links), end()]

    assert_same_runs(chain, dtypes, bucket, fast=fast, shares=False)


class Net(nn.Module):
    """Layers that are computed again in the backward, one of them frozen, two with the same weight, one used twice."""

    def __init__(self, reentrant):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.head, self.twin = nn.Linear(8, 8), nn.Linear(8, 8)
        self.twin.weight = self.head.weight
        self.layers[1].weight.requires_grad_(False)
        self.reentrant = reentrant

    def forward(self, x):
        for layer in self.layers:
            if self.reentrant is None:
                x = layer(x).tanh()
            else:
                x = checkpoint(lambda y, layer=layer: layer(y).tanh(), x, use_reentrant=self.reentrant)
        return self.twin(self.head(self.head(x)).tanh())


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_checkpointed_activations_and_shared_weights(reentrant):
    def trained(bucket):
        model = Net(reentrant)
        optimizer = Modular(model, ClipNorm(0.01), Adam(0.01))
        if bucket is not None:
            step_in_backward(optimizer, bucket_bytes=bucket)
        for k in range(4):
            if k == 2:
                model.layers[1].weight.requires_grad_(True)
            optimizer.zero_grad()
            x = torch.randn(5, 8, generator=torch.Generator().manual_seed(k)).requires_grad_()
            model(x).square().mean().backward()
            optimizer.step()
        return values(model.parameters()), optimizer.state_dict()

    params, state = trained(None)
    for bucket in (0, 300, 10**9):
        own_params, own_state = trained(bucket)
        assert_equal_to_rounding(own_params, params)
        assert_equal_to_rounding(own_state, state)


def test_groups_rates_and_settings_of_their_own():
    def trained(in_backward):
        params = parameters()
        groups = [{"params": params[:1], "max_norm": 0.1}, {"params": params[1:3], "lr": torch.tensor(0.5)}, params[3]]
        groups[2] = {"params": params[3:], "betas": (0.5, 0.5)}
        optimizer = Modular(groups, ClipNorm(lambda k: 1 / (k + 1)), Adam(lr=0.1), maximize=True)
        if in_backward:
            step_in_backward(optimizer, bucket_bytes=0)
        for row in gradients(params, 3):
            backward(params, row)
            optimizer.step()
            optimizer.zero_grad()
        return params, optimizer

    (params, optimizer), (own_params, other) = trained(False), trained(True)
    assert other.param_groups[0]["schedule_step"] == 3
    assert_equal_to_rounding(own_params, params)
    assert_equal_to_rounding(other.state_dict(), optimizer.state_dict())


def test_a_closure_gives_gradients_in_the_step():
    params = parameters()
    optimizer = Modular(params, SGD(1.0))
    step_in_backward(optimizer)
    start = values(params)

    def closure():
        optimizer.zero_grad()
        loss = sum(p.sum() for p in params)
        loss.backward()
        return loss

    optimizer.step(closure)
    assert_equal(params, [p - 1 for p in start])


def test_gradients_never_exist_all_at_once():
    """Counted: the bytes of all gradients, whenever one more is there."""
    params = [nn.Parameter(torch.randn(32, 32)) for _ in range(20)]
    seen = []

    def count(_):
        seen.append(sum(p.grad.nbytes for p in params if p.grad is not None))

    for param in params:
        param.register_post_accumulate_grad_hook(count)
    optimizer = Modular(params, ClipNorm(1), AdamW())
    each = params[0].nbytes
    for bucket, most in [(None, 20), (0, 1), (3 * each, 3)]:
        handle = None if bucket is None else step_in_backward(optimizer, bucket_bytes=bucket)
        seen.clear()
        x = torch.ones(1, 32)
        for param in params:
            x = (x @ param).tanh()
        x.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert max(seen) == most * each
        if handle is not None:
            handle.remove()


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("make", [lambda: SGD(0.1), lambda: AdamW(0.1), lambda: Wrap(torch.optim.Adam, fused=True)])
def test_autograd_notices_that_the_backward_still_needs_an_old_value(make, fast):
    """`w` also stands in the graph without gradient. The backward reads it after its update."""
    u, w = nn.Parameter(torch.randn(3, 3)), nn.Parameter(torch.randn(3, 3))
    optimizer = Modular([u, w], make(), fast=fast)
    handle = step_in_backward(optimizer, bucket_bytes=0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (u @ w.detach() @ w).sum().backward()
    optimizer.zero_grad()
    optimizer.step()
    handle.remove()
    step_in_backward(optimizer)  # a bucket that both fit in
    start = u.detach().clone()
    (u @ w.detach() @ w).sum().backward()
    assert not torch.equal(u, start)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("entry", [e for e in TAKING_PART if not (e.looks or e.varies)][::2], ids=str)
def test_hooks_never_read_a_value_from_the_device(entry):
    """Called by hand, because the backward of fake CUDA tensors needs a device."""
    with FakeTensorMode():
        params = [nn.Parameter(torch.empty(shape, device="cuda")) for shape in SHAPES]
        optimizer = Modular(params, entry.make())
        handle = step_in_backward(optimizer)
        for _ in range(2):
            for param in params:
                param.grad = torch.empty_like(param)
                handle.collect(param)
            optimizer.step()
        assert all(value.device.type == "cuda" for value in optimizer.metrics().values())


def joint_subclass():
    class Joint(ClipNorm):
        def factors(self, measured, updates, step):
            return measured.vector / measured.total

    return Joint(1.0)


class Doubled(TensorwiseTransform):
    def __init__(self):
        super().__init__({})

    def apply_tensor(self, tensor, param, grad, loss, state, setting):
        return tensor.mul_(2)


REFUSED = {
    "ClipNorm": lambda: ClipNorm(1, dim="global"),
    "Normalize": lambda: Normalize(1, dim="global"),
    "Centralize": lambda: Centralize("global"),
    "ClipNormByEMA": lambda: ClipNormByEMA(tensorwise=False),
    "ClipNormGrowth": lambda: ClipNormGrowth(parameterwise=False),
    "AutoClip": lambda: AutoClip(),
    "ZClip": lambda: ZClip(),
    "AdaGC": lambda: AdaGC(warmup_steps=0),
    "SkipStep": lambda: SkipStep(1.0),
    "target='closure'": lambda: ClipNorm(1, target="closure"),
    "Mul": lambda: Mul(2.0),
    "Joint": joint_subclass,
    "ClipValueByEMA": lambda: ClipValueByEMA(ema_tfm=ClipNorm(1, dim="global")),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_needs_all_gradients_is_refused_by_name(name):
    optimizer = Modular(parameters(), REFUSED[name](), SGD(0.1))
    shown = "ClipNorm" if name == "ClipValueByEMA" else name
    with pytest.raises(ValueError, match=shown):
        step_in_backward(optimizer)
    assert optimizer.runner.parts is None


def test_kinds_declare_whether_they_treat_each_tensor_alone():
    refused = {entry.name for entry in ENTRIES if not takes_part(entry)}
    joint = {entry.name for entry in ENTRIES if entry.joint}
    # authors' own Scaling and Transform do not say so, and AdaGC has a joint warm-up
    undeclared = {"ClipByWeights", "ClipToMedian", "ClipValueByEMA-tfm", "target grad", "AdaGC-at once"}
    assert refused == joint | undeclared
    step_in_backward(Modular(parameters(), Doubled(), SGD(0.1)))


class OfSomebody(torch.optim.SGD):
    """Clips the joint norm of all gradients in its step."""

    def step(self, closure=None):
        torch.nn.utils.clip_grad_norm_([param for group in self.param_groups for param in group["params"]], 100.0)
        return super().step(closure)


class LikeSGD(torch.optim.SGD):
    """Treats each tensor alone, which its trial shows."""


@pytest.mark.parametrize(
    ("options", "chain", "message"),
    [
        ({"nonfinite": "skip"}, SGD, "nonfinite='skip'"),
        ({"nonfinite": "raise"}, SGD, "nonfinite='raise'"),
        ({}, lambda: Wrap(OfSomebody, lr=0.1), "OfSomebody"),
    ],
)
def test_optimizers_that_are_refused(options, chain, message):
    with pytest.raises(ValueError, match=message):
        step_in_backward(Modular(parameters(), chain(), **options))


def test_an_optimizer_of_another_package_that_steps_each_tensor_alone():
    params = parameters()
    before = [param.detach().clone() for param in params]
    optimizer = Modular(params, Wrap(LikeSGD, lr=0.1))
    step_in_backward(optimizer)
    sum(param.sum() for param in params).backward()
    optimizer.step()
    for param, old in zip(params, before, strict=True):
        assert torch.equal(param, old - 0.1)


def test_other_refusals():
    with pytest.raises(TypeError, match="takes a Modular, got SGD"):
        step_in_backward(torch.optim.SGD(parameters(), 0.1))
    with pytest.raises(ValueError, match="bucket_bytes must be >= 0"):
        step_in_backward(Modular(parameters(), SGD(0.1)), bucket_bytes=-1)
    optimizer = Modular(parameters(), SGD(0.1))
    step_in_backward(optimizer)
    with pytest.raises(RuntimeError, match="already"):
        step_in_backward(optimizer)
    optimizer = Modular([param := nn.Parameter(torch.ones(2))], SGD(0.1))
    optimizer.param_groups[0]["params"].append(param)
    with pytest.raises(ValueError, match="listed twice"):
        step_in_backward(optimizer)
    assert optimizer.runner.parts is None
    grouped = Modular(parameters(), SGD(0.1))
    grouped.runner.shared.group = SimpleNamespace()
    with pytest.raises(ValueError, match="process_group"):
        step_in_backward(grouped)


def test_a_listener_is_refused_also_later():
    optimizer = Modular(params := parameters(), SGD(0.1))
    recorder = Recorder(optimizer)
    with pytest.raises(RuntimeError, match="a Recorder"):
        step_in_backward(optimizer)
    recorder.close()
    handle = step_in_backward(optimizer)
    with pytest.raises(RuntimeError, match=r"a recorder needs all gradients.*call remove\(\) of the handle"):
        Recorder(optimizer)
    assert optimizer.runner.listener is None
    start = values(params)
    optimizer.runner.listener = recorder._recording
    with pytest.raises(RuntimeError, match="a Recorder"):
        backward(params, gradients(params, 1)[0])
    assert_equal(params, start)
    optimizer.runner.listener = None
    handle.remove()
    Recorder(optimizer).close()


@pytest.mark.slow
def test_compiled_autograd_is_refused_and_a_compiled_model_is_not():
    optimizer = Modular(params := parameters(), SGD(1.0))
    step_in_backward(optimizer)
    start = values(params)
    enabled = torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager"))
    with enabled, pytest.raises(RuntimeError, match="cannot be used with compiled autograd"):
        sum(p.sum() for p in params).backward()
    assert_equal(params, start)
    optimizer.zero_grad()
    torch.compile(lambda: sum(p.sum() for p in params), backend="aot_eager")().backward()
    assert all(p.grad is None for p in params)
    optimizer.step()
    assert_equal(params, [p - 1 for p in start])


def test_a_gradient_scaler_is_refused():
    optimizer = Modular(params := parameters(), SGD(0.1))
    handle = step_in_backward(optimizer)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(params[0].sum()).backward()
    with pytest.raises(RuntimeError, match="GradScaler"):
        scaler.step(optimizer)
    optimizer.step()
    handle.remove()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(params[0].sum()).backward()
    scaler.step(optimizer)


def test_a_second_gradient_is_refused_and_names_what_was_updated():
    params = parameters()
    optimizer = Modular(named(params), SGD(0.1))
    step_in_backward(optimizer, bucket_bytes=0)
    params[2].sum().backward()
    params[0].sum().backward()  # another parameter may follow
    after = values(params)
    with pytest.raises(RuntimeError, match="second gradient") as caught:
        params[2].sum().backward()
    assert caught.value.__notes__ == ["the backward had updated 2 of 4 parameters in this step: p2, p0"]
    with pytest.raises(RuntimeError, match="second gradient"):
        optimizer.step()
    assert_equal(params, after)
    params[2].grad = None
    optimizer.step()
    params[2].sum().backward()


def test_the_way_out_in_the_error_of_a_second_gradient():
    params = parameters()
    optimizer = Modular(params, SGD(0.1))
    handle = step_in_backward(optimizer, bucket_bytes=0)
    params[2].sum().backward()
    way_out = r"Call optimizer\.zero_grad\(\) and then optimizer\.step\(\).*use_reentrant=False"
    for again in (lambda: params[2].sum().backward(), optimizer.step):
        with pytest.raises(RuntimeError, match=way_out):
            again()
    with pytest.raises(RuntimeError, match=r"If step\(\) raises, call optimizer\.zero_grad\(\)"):
        handle.remove()
    after = values(params)
    optimizer.zero_grad()
    optimizer.step()
    assert_equal(params, after)
    handle.remove()


def test_the_way_out_if_a_hook_of_the_user_raises_and_the_backward_is_repeated():
    params = parameters()
    optimizer = Modular(params, ClipValue(lambda k: 1.0 + k), SGD(0.1))
    step_in_backward(optimizer, bucket_bytes=0)

    def fail(_):
        raise ValueError("of the user")

    hook = params[0].register_hook(fail)
    row = [torch.ones_like(p) for p in params]
    with pytest.raises(ValueError, match="of the user"):
        backward(params, row)
    hook.remove()
    with pytest.raises(RuntimeError, match="second gradient"):
        backward(params, row)
    optimizer.zero_grad()
    optimizer.step()
    start = values(params)
    backward(params, row)
    optimizer.step()
    assert optimizer.param_groups[0]["schedule_step"] == 2
    torch.testing.assert_close(values(params), [p - 0.1 for p in start])


def test_settings_are_checked_before_the_first_update():
    params = parameters()
    optimizer = Modular([{"params": params[:2]}, {"params": params[2:]}], ClipNorm(1.0), SGD(0.1))
    step_in_backward(optimizer, bucket_bytes=0)
    optimizer.param_groups[0]["max_norm"] = -1.0  # the backward reaches the second group first
    start = values(params)
    with pytest.raises(ValueError, match="max_norm must be >= 0"):
        backward(params, gradients(params, 1)[0])
    assert_equal(params, start)
    optimizer.param_groups[0]["max_norm"] = 1.0
    optimizer.zero_grad()
    backward(params, gradients(params, 1)[0])
    optimizer.step()


def test_an_error_in_a_hook_names_what_was_updated():
    model = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 2), nn.Linear(2, 1))
    optimizer = Modular(model, SGD(0.1))
    step_in_backward(optimizer, bucket_bytes=0)
    with pytest.raises(RuntimeError, match="sparse gradient") as caught:
        model(torch.tensor([1, 2])).sum().backward()
    (note,) = caught.value.__notes__
    assert note.startswith("the backward had updated 4 of 5 parameters in this step: 2.")
    model[0].weight.grad = None
    optimizer.step()


def test_after_a_backward_that_failed_the_step_takes_what_waited():
    params = parameters()
    optimizer = Modular(params, SGD(1.0))
    step_in_backward(optimizer)

    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise RuntimeError("out of memory")

    start = values(params)
    with pytest.raises(RuntimeError, match="out of memory"):
        (Failing.apply(params[0]).sum() + params[1].sum()).backward()
    assert_equal(params, start)
    optimizer.zero_grad()
    backward(params, [torch.ones_like(p) for p in params])
    optimizer.step()
    assert_equal(params, [p - 1 for p in start])


def test_remove_brings_ordinary_steps_back():
    optimizer = Modular(params := parameters(), ClipNorm(0.1, dim=None), SGD(0.1))
    handle = step_in_backward(optimizer)
    row = gradients(params, 1)[0]
    backward(params, row)
    with pytest.raises(RuntimeError, match=r"call optimizer.step\(\) before remove"):
        handle.remove()
    optimizer.step()
    handle.remove()
    handle.remove()
    after = values(params)
    backward(params, row)
    assert_equal(params, after)
    assert params[0].grad is not None
    optimizer.step()
    step_in_backward(optimizer)


def test_copies_take_ordinary_steps():
    model = Model(parameters())
    optimizer = Modular(model, SGD(1.0))
    step_in_backward(optimizer)
    twin, copied = copy.deepcopy((model, optimizer))
    start = values(twin.parameters())
    backward(list(twin.parameters()), gradients(list(twin.parameters()), 1)[0])
    assert_equal(twin.parameters(), start)
    copied.step()
    assert copied.runner.parts is None


@pytest.fixture
def without_gc():
    torch.optim.SGD(parameters(), 0.1)  # torch imports its compiler for the first one, and the frames keep it alive
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("without_gc")
def test_parameters_outlive_an_optimizer():
    params = parameters()
    optimizer = Modular(params, ClipNorm(1), SGD(1.0))
    handle = step_in_backward(optimizer)
    backward(params, gradients(params, 1)[0])
    optimizer.step()
    gone = weakref.ref(optimizer)
    del optimizer
    assert gone() is None
    start = values(params)
    backward(params, gradients(params, 1)[0])
    assert_equal(params, start)
    assert params[0].grad is not None
    handle.remove()


@pytest.mark.usefixtures("without_gc")
@pytest.mark.parametrize("exists", [False, True])
def test_a_notebook_cell_that_is_run_twice(exists):
    """The step of the first optimizer had not ended. It may still exist, because of a cycle or of another name."""
    params = parameters()

    def cell(lr):
        optimizer = Modular(params, SGD(lr))
        return optimizer, ExponentialLR(optimizer, 0.9), step_in_backward(optimizer)

    first = cell(0.5)
    backward(params, gradients(params, 1)[0])
    if exists:
        with pytest.warns(UserWarning, match="another optimizer, which takes ordinary steps"):
            optimizer, _, handle = cell(1.0)
    else:
        del first
        optimizer, _, handle = cell(1.0)
    start = values(params)
    for _ in range(2):
        backward(params, [torch.ones_like(p) for p in params])
        optimizer.step()
    assert_equal(params, [p - 1 - 1 for p in start])
    handle.remove()


def test_the_last_call_wins():
    shared, first_own, second_own = (nn.Parameter(torch.zeros(2)) for _ in range(3))
    first, second = Modular([shared, first_own], SGD(1.0)), Modular([second_own], SGD(2.0))
    handles = [step_in_backward(first), step_in_backward(second)]
    with pytest.warns(UserWarning, match="call remove"):
        second.add_param_group({"params": [shared]})
    handles[0].remove()
    (shared + first_own + second_own).sum().backward()
    assert [p.grad is None for p in (shared, first_own, second_own)] == [True, False, True]
    first.step()
    second.step()
    assert [p[0].item() for p in (shared, first_own, second_own)] == [-2.0, -1.0, -2.0]
    handles[1].remove()
    step_in_backward(first)


def test_a_parameter_that_has_left_its_optimizer_keeps_its_gradient_and_may_join_another():
    stays, leaves = (nn.Parameter(torch.zeros(2)) for _ in range(2))
    first = Modular([{"params": [stays]}, {"params": [leaves]}], SGD(1.0))
    step_in_backward(first)
    del first.param_groups[1]
    leaves.sum().backward()
    assert leaves.grad is not None
    second = Modular([leaves], SGD(2.0))
    step_in_backward(second)  # a warning that the first one takes ordinary steps would raise
    (3 * stays + leaves).sum().backward()
    assert stays.grad is leaves.grad is None
    assert [stays[0].item(), leaves[0].item()] == [-3.0, -4.0]


def test_a_step_without_gradients_counts_for_nothing():
    optimizer = Modular(params := parameters(), ClipNorm(lambda k: 1.0 + k), SGD(0.1))
    step_in_backward(optimizer)
    optimizer.step()
    assert optimizer.param_groups[0]["schedule_step"] == 0
    backward(params, gradients(params, 1)[0])
    optimizer.step()
    assert optimizer.param_groups[0]["max_norm"] == 2.0


@pytest.mark.slow
@pytest.mark.xdist_group("in backward")
@pytest.mark.parametrize("check", sharded_in_backward.CHECKS)
def test_two_processes(check):
    """Under FSDP2 as in ordinary steps; plain parameters are refused."""
    ranks.run(sharded_in_backward.CHECKS[check], 2, limit=300)


class TwoShares(ClipValue):
    """A clip that shows a share of its own beside ``clipped``."""

    pure, each_alone = False, True

    def apply_tensors(self, updates, step):
        result = super().apply_tensors(updates, step)
        step.show_share("large", torch.tensor(1.0), 2)
        return result


@pytest.mark.parametrize("bucket", [None, 0])
def test_a_share_of_an_author_leaves_that_of_clipped_elements_as_it_is(bucket):
    params = [nn.Parameter(torch.tensor([1.0, 2.0, 3.0])) for _ in range(2)]
    optimizer = Modular(params, TwoShares(1.0))
    if bucket is not None:
        step_in_backward(optimizer, bucket_bytes=bucket)
    backward(params, [torch.tensor([0.5, 2.0, 3.0])] * 2)
    optimizer.step()
    metrics = {name: value.item() for name, value in optimizer.metrics().items()}
    assert metrics == {"two_shares/clipped": pytest.approx(2 / 3), "two_shares/large": 0.5}
