"""The recorder sees every step, and changes none."""

import copy
import gc
import math
import pickle
import weakref
from functools import partial

import pytest
import torch
from defaults import DEFAULTS
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from torchzero_clip import (
    SGD,
    Adam,
    AdamW,
    AutoClip,
    ClipNorm,
    ClipValue,
    Modular,
    Recorder,
    SkipStep,
    read_record,
)


def model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))


def gradients(net, step, size=1.0):
    generator = torch.Generator().manual_seed(step)
    for param in net.parameters():
        param.grad = size * torch.randn(param.shape, generator=generator)


def train(net, optimizer, steps=6, spike=None, start=0):
    for step in range(start, start + steps):
        gradients(net, step, 1000.0 if step == spike else 1.0)
        optimizer.step()


def recorded(*chain, nonfinite="propagate", **options):
    net = model()
    optimizer = Modular(net, *chain, nonfinite=nonfinite)
    return net, optimizer, Recorder(optimizer, **options)


def recorded_in_torch(make, **options):
    """The same for an optimizer of torch."""
    net = model()
    optimizer = make(net.named_parameters())
    return net, optimizer, Recorder(optimizer, **options)


@pytest.mark.parametrize("fast", [True, False])
def test_a_run_with_a_skipped_step_changes_no_bit_and_shows_its_norms(fast):
    """Of runs without one `tests/contract/test_recorder.py` shows it."""
    results = []
    for records in (False, True):
        net = model()
        optimizer = Modular(net, SkipStep(max_norm=100), ClipNorm(0.5), Adam(), fast=fast)
        recorder = Recorder(optimizer, ratios_every=2) if records else None
        train(net, optimizer, spike=3)
        results.append([*net.parameters(), *optimizer.metrics().values()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    record = recorder.record()
    for step in range(6):
        gradients(net, step, 1000.0 if step == 3 else 1.0)
        expected = torch.stack([p.grad.double().norm() for p in net.parameters()])
        torch.testing.assert_close(record.layer_norms[step], expected, rtol=1e-6, atol=0)
        torch.testing.assert_close(record.norm[step], expected.norm(), rtol=1e-6, atol=0)
    assert record.layers == [name for name, _ in net.named_parameters()]


def test_no_recorder_no_operation():
    optimizer = Modular(model(), ClipNorm(1.0), AdamW())
    assert optimizer.runner.listener is None
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks


def test_what_transforms_did():
    net, optimizer, recorder = recorded(ClipNorm(0.5, dim="global"), ClipNorm(0.1), SGD(0.1))
    train(net, optimizer, 3)
    optimizer.param_groups[0]["max_norm"] = 0.25
    train(net, optimizer, 1, start=3)
    columns = recorder.record().columns(transforms=True)
    assert columns["clip_norm/limit"] == [0.5, 0.5, 0.5, 0.25]
    assert columns["clip_norm_2/limit"] == [0.1] * 4
    rows = zip(columns["norm"], columns["clip_norm/norm"], columns["clip_norm/factor"], strict=True)
    for norm, before, factor in rows:
        assert math.isclose(norm, before, rel_tol=1e-6)
        assert 0 < factor < 1
    assert columns["share_clipped"] == [1.0] * 4
    assert columns["skipped"] == [False] * 4


def test_only_limits_of_joint_norms_are_limits_of_the_joint_norm():
    chain = ClipNorm(0.5), ClipNorm(3.0, dim="global"), ClipValue(0.1), AutoClip(), SGD(0.1)
    net, optimizer, recorder = recorded(*chain)
    train(net, optimizer, 2)
    record = recorder.record()
    assert record.joint == ["clip_norm_2", "auto_clip"]
    expected = torch.fmin(torch.tensor(3.0).double(), record.metrics["auto_clip/limit"])
    assert torch.equal(record.limits(), expected)


def test_limits_that_differ_between_groups_are_unknown():
    net = model()
    groups = [{"params": net[0].parameters(), "max_norm": 1.0}, {"params": net[2].parameters(), "max_norm": 2.0}]
    optimizer = Modular(groups, ClipNorm(1.0), SGD(0.1))
    recorder = Recorder(optimizer)
    train(net, optimizer, 1)
    assert "clip_norm/limit" not in recorder.record().metrics


@pytest.mark.filterwarnings("ignore:.*layers are inf or NaN")
def test_a_skipped_step_is_there_with_its_norms_and_the_reason():
    net, optimizer, recorder = recorded(SkipStep(max_norm=100), ClipNorm(1.0), Adam(), nonfinite="skip")
    train(net, optimizer, 6, spike=3)
    before = [p.clone() for p in net.parameters()]
    gradients(net, 6)
    net[0].bias.grad[1] = torch.nan
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))
    record = recorder.record()
    assert record.steps == list(range(7))
    assert record.reasons == ["", "", "", "skip_step", "", "", "skip_step nonfinite"]
    assert record.norm[3] > 1000
    assert math.isnan(record.norm[6])
    means = record.metrics["skip_step/mean"].tolist()
    assert (means[3], means[6]) == (means[2], means[5])  # by which the gate judged
    assert recorder.rows()[3]["reason"] == "skip_step"
    worst = recorder.worst(step=6)
    assert worst[0].name == "0.bias"
    assert math.isinf(worst[0].ratio)
    assert worst[1].ratio < 5
    assert recorder.worst(step=3)[0].ratio > 100
    assert str(recorder.worst()) == str(recorder.worst(step=6))
    assert 6 in recorder.spikes()


@pytest.mark.filterwarnings("ignore:.*layers are inf or NaN")
def test_a_step_that_raises_is_recorded():
    net, optimizer, recorder = recorded(ClipNorm(1.0), Adam(), nonfinite="raise")
    train(net, optimizer, 2)
    gradients(net, 2)
    net[2].weight.grad[:] = torch.inf
    with pytest.raises(RuntimeError, match=r"2\.weight"):
        optimizer.step()
    train(net, optimizer, 1, start=3)
    assert recorder.record().reasons == ["", "", "nonfinite", ""]
    assert [layer.name for layer in recorder.worst(step=2, top=1)] == ["2.weight"]


def test_losses_of_reports_and_closures():
    net, optimizer, recorder = recorded(ClipNorm(1.0), Adam())
    gradients(net, 0)
    optimizer.report_loss(2.0)
    optimizer.report_loss(torch.tensor([4.0], requires_grad=True))
    optimizer.step()
    gradients(net, 1)
    optimizer.step()
    optimizer.step(lambda: torch.tensor(7.0, dtype=torch.bfloat16))
    optimizer.step(lambda: {"loss": 1.0})
    loss = recorder.record().loss.tolist()
    assert loss[0] == 3.0
    assert math.isnan(loss[1])
    assert loss[2] == 7.0
    assert math.isnan(loss[3])


def test_gradients_that_are_missing():
    net, optimizer, recorder = recorded(ClipNorm(1.0), Adam())
    optimizer.step()  # no gradient at all
    gradients(net, 0)
    net[0].weight.grad = None
    net[2].bias.requires_grad_(False)
    optimizer.step()
    gradients(net, 1)
    optimizer.step()
    record = recorder.record()
    assert math.isnan(record.norm[0])
    assert record.layer_norms[0].tolist() == [-1.0] * 4
    assert (record.layer_norms[1] < 0).tolist() == [True, False, False, True]
    assert (record.layer_norms[2] < 0).tolist() == [False, False, False, True]
    assert {layer.name for layer in recorder.worst(step=1)} == {"0.bias", "2.weight"}
    assert recorder.spikes() == []


@pytest.mark.parametrize("by", ["parameter", "module"])
def test_frozen_parameters_are_no_layers(by):
    net = model()
    net[0].requires_grad_(False)
    optimizer = Modular(net, ClipNorm(1.0), Adam())
    recorder = Recorder(optimizer, by=by, ratios_every=2, keep=4)
    own = ["2.weight", "2.bias"] if by == "parameter" else ["2"]
    assert recorder.record().layers == own
    train(net, optimizer, 3)
    record = recorder.record()
    assert record.layers == own
    assert record.layer_norms.shape == (3, len(own))
    assert len(record.ratios[0].params) == len(own)
    net[0].weight.requires_grad_(True)
    train(net, optimizer, 1, start=3)
    thawed = [name for name in ("0.weight", *own) if by == "parameter"] or ["0", *own]
    assert recorder.record().layers == thawed
    assert (recorder.record().layer_norms[:, 0] < 0).tolist() == [True, True, True, False]
    again = Recorder(Modular(net, ClipNorm(1.0), Adam()), by=by, keep=4)
    again.load_state_dict(recorder.state_dict())
    assert again.record().layers == thawed
    net[0].requires_grad_(True)
    train(net, optimizer, 1, start=4)
    assert recorder.record().layers == (["0.weight", "0.bias", *own] if by == "parameter" else ["0", "2"])


def test_every_parameter_is_frozen():
    net = model()
    net.requires_grad_(False)
    optimizer = Modular(net, ClipNorm(1.0), Adam())
    recorder = Recorder(optimizer)
    optimizer.step()
    assert recorder.record().layers == []
    assert recorder.record().layer_norms.shape == (1, 0)


def test_a_clip_by_hand_beside_the_chain():
    net = model()
    optimizer = Modular(net, ClipNorm(1.0, dim="global"), Adam())
    recorder = Recorder(optimizer)
    for step in range(40):
        gradients(net, step)
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
    suggestion = recorder.suggest_max_norm()
    assert "so clip_grad_norm_ or a setting of a trainer probably clipped the gradients" in suggestion.reason
    assert suggestion.confidence == "low"


def test_only_the_last_steps_are_kept():
    net, optimizer, recorder = recorded(ClipNorm(1.0), Adam(), keep=4)
    train(net, optimizer, 10)
    assert recorder.record().steps == [6, 7, 8, 9]
    assert recorder.step == 10
    with pytest.raises(ValueError, match="no longer has step 3, it has steps 6 to 9"):
        recorder.worst(step=3)


def test_usual_is_the_median_of_the_steps_before():
    weight = nn.Parameter(torch.zeros(1))
    optimizer = Modular([("w", weight)], SGD(0.1))
    recorder = Recorder(optimizer)
    for size in (1.0, 4.0, 2.0, 3.0, 50.0, 1.0):
        weight.grad = torch.full((1,), size)
        optimizer.step()
    (layer,) = recorder.worst(step=4)
    assert tuple(layer) == ("w", 50.0, 2.5, 20.0)
    assert math.isnan(recorder.worst(step=0)[0].usual)
    assert str(recorder.worst(step=4)).splitlines() == ["name  norm  usual  ratio", "w       50    2.5     20"]


@pytest.mark.parametrize(
    ("by", "names"), [("module", ["0", "2"]), ("group", ["first", "group 1"]), ("parameter", ["0.weight", "0.bias"])]
)
def test_layers(by, names):
    net = model()
    first = {"params": list(net[0].named_parameters(prefix="0")), "name": "first"}
    second = {"params": list(net[2].named_parameters(prefix="2"))}
    optimizer = Modular([first, second], ClipNorm(1.0), Adam())
    recorder = Recorder(optimizer, by=by)
    train(net, optimizer, 2)
    record = recorder.record()
    assert record.layers[:2] == names
    if by != "parameter":
        gradients(net, 1)
        expected = torch.cat([p.grad.flatten() for p in net[0].parameters()]).norm()
        torch.testing.assert_close(record.layer_norms[1, 0].float(), expected)


def test_names_come_from_the_model_where_the_optimizer_has_none():
    net = model()
    optimizer = Modular(net.parameters(), ClipNorm(1.0), Adam())
    recorder = Recorder(optimizer, model=net)
    train(net, optimizer, 1)
    assert recorder.record().layers == ["0.weight", "0.bias", "2.weight", "2.bias"]
    recorder.close()
    without = Recorder(optimizer)
    train(net, optimizer, 1)
    assert without.record().layers[1] == "group 0, parameter 1, of shape (3,)"


def test_layers_that_are_added_later():
    net = model()
    optimizer = Modular([{"params": list(net[0].named_parameters(prefix="0"))}], ClipNorm(1.0), Adam())
    recorder = Recorder(optimizer, keep=5)
    train(net, optimizer, 3)
    optimizer.add_param_group({"params": list(net[2].named_parameters(prefix="2"))})
    train(net, optimizer, 3, start=3)
    record = recorder.record()
    assert record.steps == [1, 2, 3, 4, 5]
    assert record.layers == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert (record.layer_norms < 0).any(dim=1).tolist() == [True, True, False, False, False]


@pytest.mark.parametrize("every", [0, 1, 3])
def test_ratios(every):
    net, optimizer, recorder = recorded(ClipNorm(0.5), SGD(0.1), ratios_every=every)
    expected = []
    for step in range(6):
        before = [p.clone() for p in net.parameters()]
        train(net, optimizer, 1, start=step)
        moved = [(b - p).norm() for b, p in zip(before, net.parameters(), strict=True)]
        expected.append((torch.stack([p.norm() for p in before]), torch.stack(moved)))
    ratios = recorder.record().ratios
    assert [ratio.step for ratio in ratios] == ([] if every == 0 else list(range(0, 6, every)))
    for step, params, updates in ratios:
        torch.testing.assert_close(params.float(), expected[step][0].detach())
        torch.testing.assert_close(updates.float(), expected[step][1].detach())


def test_other_optimizers():
    net, optimizer, recorder = recorded_in_torch(torch.optim.AdamW)
    net2 = copy.deepcopy(net)
    twin = torch.optim.AdamW(net2.named_parameters())
    recorder.report_loss(3.0)
    train(net, optimizer, 4, spike=2)
    train(net2, twin, 4, spike=2)
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), net2.parameters(), strict=True))
    record = recorder.record()
    assert record.loss[0] == 3.0
    assert math.isnan(record.loss[1])
    assert record.layers[0] == "0.weight"
    assert recorder.worst(step=2)[0].ratio > 100
    assert record.share_clipped.isnan().all()
    assert [r.step for r in record.ratios] == [0]
    recorder.close()
    train(net, optimizer, 1)
    assert recorder.step == 4
    assert not optimizer._optimizer_step_pre_hooks


def test_a_closure_of_another_optimizer():
    net, optimizer, recorder = recorded_in_torch(torch.optim.SGD)

    def closure():
        gradients(net, 5)
        return torch.tensor(2.5)

    gradients(net, 0, 1e6)
    assert optimizer.step(closure) == 2.5
    optimizer.step(closure=closure)
    gradients(net, 5)
    expected = torch.cat([p.grad.flatten() for p in net.parameters()]).norm().double()
    torch.testing.assert_close(recorder.record().norm, expected.expand(2), rtol=1e-6, atol=0)
    assert recorder.record().loss.tolist() == [2.5, 2.5]


def test_the_norms_of_a_fused_step_are_without_the_scale_of_a_gradient_scaler():
    net, optimizer, recorder = recorded_in_torch(partial(torch.optim.AdamW, fused=True))
    gradients(net, 0, 1024.0)
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(1024.0), torch.tensor(0.0)
    optimizer.step()
    net[0].bias.grad[0] = torch.inf
    optimizer.found_inf = torch.tensor(1.0)
    before = [p.clone() for p in net.parameters()]
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))
    gradients(net, 0)
    record = recorder.record()
    expected = torch.cat([p.grad.flatten() for p in net.parameters()]).norm().double()
    torch.testing.assert_close(record.norm[0], expected, rtol=1e-6, atol=0)
    assert record.reasons == ["", "found_inf"]


def test_sparse_gradients_of_another_optimizer():
    table = nn.Embedding(5, 2, sparse=True)
    optimizer = torch.optim.SparseAdam(table.parameters())
    recorder = Recorder(optimizer, ratios_every=0)
    table(torch.tensor([1, 1, 3])).sum().backward()
    optimizer.step()
    torch.testing.assert_close(recorder.record().norm[0].item(), math.sqrt(2 * 4 + 2))


def test_copies_and_pickles_have_no_recorder():
    net, optimizer, recorder = recorded(ClipNorm(1.0), Adam())
    train(net, optimizer, 1)
    before = optimizer.state_dict()
    for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert other.runner.listener is None
        for group in other.param_groups:
            for param in group["params"]:
                param.grad = torch.ones_like(param)
        other.step()
    assert recorder.step == 1
    without = Modular(model(), ClipNorm(1.0), Adam()).state_dict()
    assert before["param_groups"][0].keys() == without["param_groups"][0].keys()


def test_an_optimizer_can_be_collected():
    net, optimizer, recorder = recorded(ClipNorm(1.0), Adam())
    train(net, optimizer, 1)
    gone = weakref.ref(optimizer)
    del optimizer, recorder
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize(
    "optimizer",
    [lambda net: Modular(net, SkipStep(max_norm=100), Adam()), lambda net: torch.optim.SGD(net.named_parameters())],
    ids=["modular", "torch"],
)
def test_it_resumes(optimizer, tmp_path):
    net = model()
    whole = optimizer(net)
    recorder = Recorder(whole, keep=8)
    train(net, whole, 5, spike=3)
    torch.save(recorder.state_dict(), tmp_path / "recorder.pt")
    train(net, whole, 6, start=5)
    other = model()
    resumed = optimizer(other)
    again = Recorder(resumed, keep=8)
    again.load_state_dict(torch.load(tmp_path / "recorder.pt", weights_only=True))
    assert again.step == 5
    train(other, resumed, 6, start=5)
    a, b = recorder.record(), again.record()
    assert a.steps == b.steps == list(range(3, 11))
    assert a.reasons == b.reasons
    assert torch.equal(a.layer_norms, b.layer_norms)
    with pytest.raises(ValueError, match="parameters of the record differ"):
        Recorder(Modular(nn.Linear(2, 2), Adam())).load_state_dict(recorder.state_dict())
    with pytest.raises(ValueError, match="must come from Recorder"):
        again.load_state_dict(resumed.state_dict())


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"optimizer": nn.Linear(2, 2)}, TypeError, "optimizer must be"),
        ({"by": "layer"}, ValueError, "by must be one of"),
        ({"keep": 0}, ValueError, "keep"),
        ({"keep": 1.5}, TypeError, "keep"),
        ({"keep": -1}, ValueError, "keep"),
        ({"ratios_every": -1}, ValueError, "ratios_every"),
        ({"model": "net"}, TypeError, "model must be"),
        ({"model": nn.Linear(2, 2)}, ValueError, "none of the parameters"),
        ({"path": "missing/run.jsonl"}, ValueError, "does not exist"),
        ({"path": "."}, ValueError, "is a directory"),
        ({"path": "notes.txt"}, ValueError, "was not written by a Recorder"),
    ],
)
def test_bad_arguments(given, error, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_text("important")
    optimizer = Modular(model(), Adam())
    with pytest.raises(error, match=message):
        Recorder(**({"optimizer": optimizer} | given))
    assert optimizer.runner.listener is None


def test_an_empty_record():
    recorder = Recorder(Modular(model(), Adam()))
    record = recorder.record()
    assert record.steps == []
    assert record.layers == ["0.weight", "0.bias", "2.weight", "2.bias"]
    names = ("step", "norm", "loss", "limit", "share_clipped", "skipped", "reason")
    assert recorder.record().columns() == {name: [] for name in names}
    assert recorder.spikes() == []
    with pytest.raises(ValueError, match="the record has no steps"):
        recorder.worst(step=0)
    with pytest.raises(ValueError, match="does not have the layers of any step"):
        recorder.worst()
    with pytest.raises(ValueError, match="at least 20"):
        recorder.suggest_max_norm()
    assert recorder.state_dict() == {"step": 0, "joint": [], "tape": None}


def test_it_finds_the_optimizer_in_the_wrappers_of_accelerate_and_of_lightning():
    class Accelerated(torch.optim.Optimizer):
        def __init__(self, optimizer):
            self.optimizer = optimizer

    class Wrapper(Modular):
        def __init__(self, optimizer):
            self._optimizer = optimizer

    optimizer = Modular(model(), Adam())
    assert Recorder(Accelerated(Wrapper(optimizer))).optimizer is optimizer


@settings(max_examples=25)
@given(st.lists(st.tuples(st.floats(1e-20, 1e20), st.booleans()), min_size=1, max_size=12), st.integers(1, 5))
def test_what_is_kept_is_what_was_seen(steps, keep):
    weights = [nn.Parameter(torch.zeros(2, dtype=torch.float64)) for _ in range(3)]
    optimizer = Modular(weights, ClipNorm(1.0), SGD(0.1))
    recorder = Recorder(optimizer, keep=keep)
    expected = []
    for size, is_missing in steps:
        for k, weight in enumerate(weights):
            weight.grad = None if is_missing and k == 1 else torch.tensor([3 * size, 4 * size], dtype=torch.float64)
        optimizer.step()
        expected.append([5 * size, -1.0 if is_missing else 5 * size, 5 * size])
    record = recorder.record()
    assert record.steps == list(range(len(steps)))[-keep:]
    kept = torch.tensor(expected[-keep:], dtype=torch.float64)
    torch.testing.assert_close(record.layer_norms, kept, rtol=1e-6, atol=0)


def test_no_sync_and_a_device_of_its_own():
    """Fake CUDA tensors raise where a step would read a value."""
    with FakeTensorMode():
        params = [nn.Parameter(torch.empty(shape, device="cuda")) for shape in ((4, 3), (3,))]
        optimizer = Modular(params, ClipNorm(1.0), AdamW())
        recorder = Recorder(optimizer, ratios_every=2)
        for step in range(4):
            for param in params[step % 2 :]:
                param.grad = torch.ones_like(param)
            optimizer.report_loss(torch.zeros((), device="cuda"))
            optimizer.step()
            optimizer.zero_grad()
        assert recorder.step == 4
        assert recorder._recording.tape.device.type == "cuda"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_compiled_step_is_recorded():
    torch._dynamo.reset()
    net, optimizer, recorder = recorded(ClipNorm(1.0), SGD(0.1))
    step = torch.compile(optimizer.step, backend="eager")
    for k in range(5):
        gradients(net, k)
        step()
    gradients(net, 4)
    record = recorder.record()
    assert record.steps == list(range(5))
    expected = torch.stack([p.grad.norm() for p in net.parameters()]).double()
    torch.testing.assert_close(record.layer_norms[4], expected, rtol=1e-6, atol=0)


def test_parameters_that_are_replaced_have_their_own_names():
    first, second = nn.Linear(2, 1), nn.Linear(2, 1)
    optimizer = Modular(first.named_parameters(prefix="first"), ClipNorm(1.0))
    recorder = Recorder(optimizer)
    train(first, optimizer, 2)
    group = optimizer.param_groups[0]
    group["params"], group["param_names"] = list(second.parameters()), ["second.weight", "second.bias"]
    train(second, optimizer, 1, start=2)
    assert {layer.name for layer in recorder.worst(step=2)} == {"second.weight", "second.bias"}
    assert recorder.record().steps == [0, 1, 2]


def test_layers_with_one_name_in_two_groups_are_two():
    actor, critic = nn.Linear(2, 1), nn.Linear(2, 1)
    groups = [{"params": list(net.named_parameters()), "name": name} for net, name in ((actor, "actor"), (critic, 7))]
    optimizer = torch.optim.SGD(groups, 0.1)
    recorder = Recorder(optimizer)
    for net in (actor, critic):
        gradients(net, 0)
    optimizer.step()
    assert recorder.record().layers == ["weight", "bias", "7: weight", "7: bias"]
    recorder.close()
    by_group = Recorder(optimizer, by="group")
    optimizer.step()
    assert by_group.record().layers == ["actor", "7"]
    assert str(by_group.worst()).splitlines()[0].startswith("name")


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad=True to a scalar:UserWarning")  # torch 2.8
def test_the_first_call_of_a_closure_counts():
    net, optimizer, recorder = recorded_in_torch(partial(torch.optim.LBFGS, max_iter=5), ratios_every=1)
    x = torch.randn(8, 4)

    def closure():
        optimizer.zero_grad()
        loss = (net(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        return loss

    before = [p.detach().clone() for p in net.parameters()]
    closure()
    expected = torch.cat([p.grad.flatten() for p in net.parameters()]).norm().double()
    loss = optimizer.step(closure)
    record = recorder.record()
    assert record.steps == [0]
    torch.testing.assert_close(record.norm[0], expected, rtol=1e-6, atol=0)
    assert record.loss[0] == loss.item()
    moved = torch.stack([(b - p).norm() for b, p in zip(before, net.parameters(), strict=True)])
    torch.testing.assert_close(record.ratios[0].updates.float(), moved.detach())


@pytest.mark.parametrize("has_closure", [True, False])
def test_a_subclass_that_calls_its_base_takes_one_step(has_closure):
    class Sub(torch.optim.SGD):
        def step(self, closure=None):
            return super().step(closure)

    net = model()
    torch.optim.SGD(net.parameters(), 0.1)
    optimizer = Sub(net.parameters(), 0.1)
    recorder = Recorder(optimizer)
    for step in range(3):
        gradients(net, step)
        optimizer.step(*([lambda: torch.tensor(1.0)] if has_closure else []))
    assert recorder.record().steps == [0, 1, 2]
    assert recorder.record().reasons == ["", "", ""]


def test_losses_of_another_optimizer():
    net, optimizer, recorder = recorded_in_torch(torch.optim.SGD)
    gradients(net, 0)
    recorder.report_loss(1.0)
    handle = optimizer.register_step_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        optimizer.step()
    handle.remove()
    gradients(net, 1)
    recorder.report_loss(2.0)
    optimizer.step()
    recorder.report_loss(3.0)
    optimizer.step(lambda: gradients(net, 2))
    record = recorder.record()
    assert record.loss.tolist() == [1.0, 2.0, 3.0]
    assert record.reasons == ["error", "", ""]
    assert [ratio.step for ratio in record.ratios] == []


def test_a_transform_that_raises():
    class Fails(ClipNorm):
        def factors(self, measured, updates, step):
            raise ZeroDivisionError

    net, optimizer, recorder = recorded(Fails(1.0), SGD(0.1))
    gradients(net, 0)
    with pytest.raises(ZeroDivisionError):
        optimizer.step()
    assert recorder.record().reasons == ["error"]
    assert recorder.record().norm[0] > 0
    assert recorder.record().ratios == []


def test_one_recorder_for_each_optimizer():
    for optimizer in (torch.optim.SGD(model().parameters()), Modular(model(), Adam())):
        recorder = Recorder(optimizer)
        with pytest.raises(ValueError, match="already has a recorder"):
            Recorder(optimizer)
        recorder.close()
        Recorder(optimizer)


@pytest.mark.filterwarnings("ignore")
def test_odd_groups_and_modes():
    a, b = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([a, b, a], 0.1)
    recorder = Recorder(optimizer)
    a.grad = torch.ones(2)
    optimizer.step()
    assert (recorder.record().layer_norms[0] < 0).tolist() == [False, True, False]
    net, optimizer, recorder = recorded(ClipNorm(1.0), SGD(0.1))
    with torch.inference_mode():
        gradients(net, 0)
        optimizer.step()
    gradients(net, 1)
    optimizer.step()
    assert recorder.record().steps == [0, 1]


def test_what_is_kept_of_older_layouts_is_bounded_and_numbers_do_not_grow():
    net = model()
    optimizer = Modular(net[0], ClipNorm(1.0), SGD(0.1))
    recorder = Recorder(optimizer, keep=10)
    for step in range(30):
        if step % 2:
            optimizer.add_param_group({"params": list(net[2].named_parameters(prefix="2"))})
        gradients(net, step)
        optimizer.step()
        del optimizer.param_groups[1:]
    assert len(recorder._recording._older) <= 10
    assert recorder.record().steps == list(range(20, 30))


@pytest.mark.parametrize(
    ("given", "error"), [({"top": -1}, ValueError), ({"step": "3"}, TypeError), ({"step": [1]}, TypeError)]
)
def test_bad_arguments_of_worst(given, error):
    net, optimizer, recorder = recorded(SGD(0.1))
    train(net, optimizer, 3)
    assert len(recorder.worst(step=torch.tensor(2), top=2)) == 2
    with pytest.raises(error, match=next(iter(given))):
        recorder.worst(**given)


def test_bad_states():
    net, optimizer, recorder = recorded(SGD(0.1))
    train(net, optimizer, 3)
    good = recorder.state_dict()
    narrow = {**good["tape"], "norms": good["tape"]["norms"][:, :1]}
    for bad in ({**good, "tape": {}}, {**good, "tape": "x"}, {**good, "step": "3"}, {**good, "tape": narrow}, 3):
        with pytest.raises(ValueError, match="Recorder"):
            recorder.load_state_dict(bad)
        assert recorder.step == 3
        assert recorder.record().steps == [0, 1, 2]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_compiled_step_of_another_optimizer_does_not_compile_anew():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    net, optimizer, recorder = recorded_in_torch(torch.optim.SGD)
    step = torch.compile(optimizer.step, backend="eager")
    for k in range(12):
        gradients(net, k)
        step()
    assert recorder.record().steps == list(range(12))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 4


@pytest.mark.slow
@pytest.mark.parametrize("default", DEFAULTS)
def test_defaults_of_the_process_do_not_matter(default, tmp_path):
    net = model()
    grads = [[torch.randn(param.shape) for param in net.parameters()] for _ in range(30)]

    def results(path):
        twin = copy.deepcopy(net)
        optimizer = Modular(twin, ClipNorm(0.5), AdamW())
        recorder = Recorder(optimizer, keep=20, path=path, ratios_every=7)
        empty = recorder.record()
        for step, row in enumerate(grads):
            for param, grad in zip(twin.parameters(), row, strict=True):
                param.grad = grad.clone() * (50 if step == 25 else 1)
            recorder.report_loss(0.1 * step)
            optimizer.step()
        recorder.plot(path.with_suffix(".png"))
        recorder.close()
        found = [empty, recorder.record(), read_record(path)]
        text = [str(recorder.worst(step=25)), str(recorder.suggest_max_norm()), str(recorder.spikes())]
        return text, [[r.norm, r.loss, r.layer_norms, r.share_clipped, r.limits()] for r in found]

    pytest.importorskip("matplotlib").use("Agg")
    expected = results(tmp_path / "a.jsonl")
    with DEFAULTS[default]():
        found = results(tmp_path / "b.jsonl")
    assert found[0] == expected[0]
    torch.testing.assert_close(found[1], expected[1], rtol=0, atol=0, equal_nan=True)
