"""When steps are written, what a resume keeps, losses that come late, names, and the first step that is not finite."""

import copy
import itertools
import os
import pickle
import time

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from torchzero_clip import SGD, Adam, ClipNorm, Modular, Recorder, SkipStep, read_record
from torchzero_clip.recorder import output
from torchzero_clip.recorder.tape import Tape

SECONDS = output.SECONDS
KINDS = {
    "modular": lambda params: Modular(params, ClipNorm(1.0), Adam(0.1)),
    "without state": lambda params: Modular(params, ClipNorm(1.0), SGD(0.1)),
    "without a rate": lambda params: Modular(params, ClipNorm(1.0)),
    "torch": lambda params: torch.optim.AdamW(params, 0.1),
}


def made(kind="modular", **given):
    params = [("a", nn.Parameter(torch.zeros(2))), ("b", nn.Parameter(torch.zeros(3)))]
    optimizer = KINDS[kind](params)
    return optimizer, Recorder(optimizer, **given)


def train(optimizer, count, start=0, sizes=None):
    for step in range(start, start + count):
        for group in optimizer.param_groups:
            for param in group["params"]:
                param.grad = torch.full(param.shape, (sizes or {}).get(step, 1.0 + step % 3 / 10))
        optimizer.step()


def in_file(path):
    return read_record(path).steps


def test_the_file_is_written_at_the_tenth_step_and_then_every_so_many(tmp_path):
    path = tmp_path / "run.jsonl"
    optimizer, _ = made(path=path, flush_every=25)
    ends = []
    for step in range(70):
        train(optimizer, 1, step)
        ends.append(len(in_file(path)))
    assert [(k + 1, end) for k, end in enumerate(ends) if k == 0 or end != ends[k - 1]] == [
        (1, 0),
        (10, 10),
        (35, 35),
        (60, 60),
    ]


def test_the_file_is_written_every_30_seconds(tmp_path, monkeypatch):
    assert SECONDS == 30
    monkeypatch.setattr(output, "SECONDS", SECONDS)  # conftest.py sets it to inf
    path, now = tmp_path / "run.jsonl", itertools.count()
    optimizer, _ = made(path=path, flush_every=1000)
    train(optimizer, 10)
    monkeypatch.setattr(time, "monotonic", lambda: 1e9 + next(now))
    train(optimizer, 1, 10)
    assert in_file(path) == list(range(11))
    train(optimizer, 20, 11)
    assert in_file(path) == list(range(11))


@pytest.mark.slow
def test_what_left_memory_is_read_from_the_file(tmp_path):
    optimizer, recorder = made(path=tmp_path / "run.jsonl", keep=20)
    train(optimizer, 300, sizes={50: 40.0, 290: 30.0})
    assert recorder.record().steps == list(range(280, 300))
    assert recorder.spikes() == [50, 290]
    assert recorder.worst(step=50)[0].norm == pytest.approx(40 * 3**0.5)
    assert recorder.worst()[0].norm == pytest.approx(40 * 3**0.5)
    assert recorder.worst(step=285)[0].norm == pytest.approx(3**0.5)
    suggestion = recorder.suggest_max_norm()
    assert sum(len(series.norms) for series in suggestion.series.values()) == 300
    recorder.close()
    assert recorder.spikes() == [50, 290]
    assert str(recorder.suggest_max_norm()) == str(suggestion)


def test_a_run_that_is_killed_before_the_first_block_has_usual_norms(tmp_path):
    path = tmp_path / "run.jsonl"
    optimizer, recorder = made(path=path, flush_every=20)
    train(optimizer, 60, sizes={30: 300.0, 45: 200.0})
    recorder._recording.output.log = None  # the process is killed
    record = read_record(path)
    assert [(block.first, block.last) for block in record.blocks] == [(0, 49)]
    assert record.worst(step=45)[0].usual == pytest.approx(1.1 * 3**0.5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_template_of_a_checkpoint_is_no_step(kind, tmp_path):
    net = nn.Linear(3, 2)
    optimizer = KINDS[kind](list(net.named_parameters()))
    recorder = Recorder(optimizer, path=tmp_path / "run.jsonl", ratios_every=1)
    get_optimizer_state_dict(net, optimizer)
    assert recorder.step == 0
    assert recorder.record().steps == []
    train(optimizer, 3)
    assert recorder.record().steps == [0, 1, 2]
    assert [ratios.step for ratios in recorder.record().ratios] == [0, 1, 2]


def test_a_step_with_rate_0_and_gradients_is_recorded():
    optimizer, recorder = made("torch")
    optimizer.param_groups[0]["lr"] = 0.0
    train(optimizer, 2)
    optimizer.param_groups[0]["lr"] = 0.1
    train(optimizer, 1, sizes={0: 0.0})
    assert recorder.record().steps == [0, 1, 2]


def test_a_load_drops_what_was_recorded_before_it(tmp_path):
    path = tmp_path / "run.jsonl"
    optimizer, recorder = made(path=path, flush_every=5)
    train(optimizer, 20)
    saved = recorder.state_dict()
    recorder.close()
    optimizer, recorder = made(path=path, flush_every=5)
    train(optimizer, 3, sizes=dict.fromkeys(range(3), 100.0))
    recorder.load_state_dict(saved)
    assert recorder.record().norm.max() < 10
    train(optimizer, 10, start=20)
    recorder.close()
    record = read_record(path)  # without a warning
    assert record.steps == list(range(30))
    assert record.norm.max() < 10
    assert recorder.state_dict()["step"] == 30


def test_a_run_goes_on_from_a_number_alone(tmp_path):
    path = tmp_path / "run.jsonl"
    optimizer, recorder = made(path=path)
    train(optimizer, 20)
    recorder.close()
    optimizer, recorder = made(path=path)
    recorder.load_state_dict({"step": 15, "tape": None})
    train(optimizer, 3, start=15)
    recorder.close()
    assert in_file(path) == list(range(18))


def test_a_loss_may_come_after_its_step(tmp_path):
    path = tmp_path / "run.jsonl"
    optimizer, recorder = made(path=path, keep=8)
    for step in range(30):
        train(optimizer, 1, step)
        recorder.report_loss(float(step), step=step)
    recorder.report_loss(torch.tensor(-1.0), step=2)  # neither in memory nor to be written
    recorder.report_loss(99.0, step=30)  # the next step
    train(optimizer, 1, 30)
    assert recorder.record().loss.tolist() == [*map(float, range(23, 30)), 99.0]
    recorder.close()
    loss = read_record(path).loss.tolist()
    assert loss == [0.0, 1.0, -1.0, *map(float, range(3, 30)), 99.0]


@pytest.mark.parametrize(
    ("given", "error"),
    [({"step": 5}, ValueError), ({"step": -1}, ValueError), ({"step": 1.0}, TypeError), ({"loss": "x"}, TypeError)],
)
def test_bad_late_losses(given, error):
    optimizer, recorder = made()
    train(optimizer, 3)
    with pytest.raises(error, match=next(iter(given))):
        recorder.report_loss(**({"loss": 1.0, "step": 1} | given))
    assert recorder.record().loss.isnan().all()


def test_a_gate_refuses_a_late_loss():
    params = [nn.Parameter(torch.zeros(2))]
    optimizer = Modular(params, SkipStep(sigma=6), SGD(0.1))
    recorder = Recorder(optimizer)
    recorder.report_loss(1.0)
    train(optimizer, 1)
    with pytest.raises(ValueError, match="step=0 is too late for a loss, because 'skip_step' has judged that step"):
        recorder.report_loss(1.0, step=0)


@pytest.mark.parametrize("kind", ["modular", "torch"])
def test_a_loop_that_reports_after_the_step_is_warned_once(kind):
    optimizer, recorder = made(kind)
    train(optimizer, 1)
    recorder.report_loss(1.0)
    with pytest.warns(UserWarning, match=r"write recorder.report_loss\(loss, step=recorder.step - 1\)"):
        train(optimizer, 1, 1)
    recorder.report_loss(1.0)
    train(optimizer, 1, 2)
    optimizer, recorder = made(kind)
    for step in range(5):  # no warning: the loop reports before the step, but not always
        if step % 2 == 0:
            recorder.report_loss(1.0)
        train(optimizer, 1, step)


def test_equal_names_never_share_a_row_and_never_change():
    encoder, decoder = nn.Linear(2, 1), nn.Linear(2, 1)
    both = [*encoder.named_parameters(), *decoder.named_parameters()]
    optimizer = torch.optim.SGD([{"params": [p for _, p in both], "param_names": [n for n, _ in both]}], 0.1)
    recorder = Recorder(optimizer)
    train(optimizer, 1)
    names = ["weight", "bias", "group 0: weight", "group 0: bias"]
    assert recorder.record().layers == names
    more = nn.Linear(2, 1)
    optimizer.add_param_group({"params": list(more.parameters()), "param_names": ["weight", "bias"]})
    optimizer.param_groups[0]["params"].insert(0, nn.Parameter(torch.zeros(1)))
    optimizer.param_groups[0]["param_names"].insert(0, "weight")
    train(optimizer, 1)
    layers = recorder._recording.tape.params.names
    assert layers == ("group 0 (2): weight", *names, "group 1: weight", "group 1: bias")
    assert len(set(recorder.record().layers)) == 7


def test_modules_with_equal_names_are_two():
    encoder, decoder = nn.Linear(2, 1, bias=False), nn.Linear(2, 1)
    named = [("proj.weight", encoder.weight), ("proj.weight", decoder.weight), ("proj.bias", decoder.bias)]
    group = {"params": [p for _, p in named], "param_names": [n for n, _ in named]}
    optimizer = torch.optim.SGD([group], 0.1)
    recorder = Recorder(optimizer, by="module")
    train(optimizer, 1)
    assert recorder.record().layers == ["proj", "group 0: proj"]
    assert recorder.record().layer_norms[0].tolist() == pytest.approx([2**0.5, 3**0.5])


def test_groups_with_one_name_are_two():
    groups = [{"params": [nn.Parameter(torch.zeros(1))], "name": "decay"} for _ in range(2)]
    optimizer = torch.optim.SGD(groups, 0.1)
    recorder = Recorder(optimizer, by="group")
    train(optimizer, 30)
    assert recorder.record().layers == ["decay", "group 1: decay"]
    with pytest.raises(ValueError, match='scope="group" needs names of groups'):
        recorder.suggest_max_norm(scope="group")


def poison(optimizer):
    params = optimizer.param_groups[0]["params"]
    params[0].grad, params[1].grad = torch.full((2,), torch.nan), torch.full((3,), 7.0)
    optimizer.step()


@pytest.mark.parametrize("kind", ["modular", "torch"])
def test_the_first_step_that_is_not_finite_is_named_at_the_next_flush(kind, tmp_path):
    optimizer, recorder = made(kind, path=tmp_path / "run.jsonl", flush_every=20)
    train(optimizer, 12)
    poison(optimizer)
    with pytest.warns(UserWarning, match="step 12") as caught:
        train(optimizer, 40, start=13, sizes={20: torch.nan})
    assert [str(warning.message) for warning in caught] == [
        "step 12: the gradients of 1 of 2 layers are inf or NaN. In the order of the optimizer: a. The largest finite "
        "norms of the other layers: b 12.12 (usual 1.905)."
    ]
    assert recorder.step == 53


def test_a_policy_that_reads_the_gradients_names_them_at_once():
    weight = nn.Parameter(torch.zeros(2))
    optimizer = Modular([("w", weight)], ClipNorm(1.0), nonfinite="skip")
    Recorder(optimizer)
    weight.grad = torch.full((2,), torch.inf)
    with pytest.warns(UserWarning, match="step 0: the gradients of 1 of 1 layers are inf or NaN"):
        optimizer.step()


def test_steps_that_a_gradient_scaler_refused_raise_no_alarm(tmp_path):
    net = nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(net.parameters(), fused=True)
    recorder = Recorder(optimizer, path=tmp_path / "run.jsonl", flush_every=1)
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(2.0), torch.tensor(1.0)
    train(optimizer, 12, sizes=dict.fromkeys(range(12), torch.inf))
    assert set(recorder.record().reasons) == {"found_inf"}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*layers are inf or NaN")
def test_a_run_that_has_diverged_keeps_the_layers_of_its_first_bad_steps(tmp_path, monkeypatch):
    monkeypatch.setattr(output, "WITH_LAYERS", 0)  # no layers of the first steps
    path = tmp_path / "run.jsonl"
    optimizer, recorder = made(path=path, ratios_every=0)
    train(optimizer, 1500, sizes=dict.fromkeys(range(100, 1500), torch.nan))
    recorder.flush()
    recorder.flush()
    recorder.close()
    assert read_record(path).layer_steps == list(range(100, 110))


def test_a_state_resumes_its_own_run_and_no_other(tmp_path):
    path = tmp_path / "run.jsonl"
    optimizer, recorder = made(path=path, keep=20)
    train(optimizer, 50)
    recorder.close()
    saved = recorder.state_dict()  # of a closed recorder
    optimizer, recorder = made(path=path, keep=20)
    with pytest.warns(UserWarning, match="already has a record of another run"):
        train(optimizer, 45, sizes=dict.fromkeys(range(45), 9.0))
    recorder.close()
    optimizer, recorder = made(path=path, keep=20)
    recorder.load_state_dict(saved)
    train(optimizer, 5, start=50)
    again = recorder.state_dict()  # nothing of this run is in the file yet
    recorder._recording.output.log = None  # the process is killed
    optimizer, recorder = made(path=path, keep=20)
    recorder.load_state_dict(again)
    train(optimizer, 10, start=55)
    recorder.close()
    with pytest.warns(UserWarning, match=r"also has run '\w+' \(steps 0 to 44\)"):
        record = read_record(path)
    assert record.steps == list(range(65))
    assert record.norm.max() < 5


def test_a_state_may_have_more_steps_than_are_kept(tmp_path):
    optimizer, recorder = made()
    train(optimizer, 100)
    saved = recorder.state_dict()
    path = tmp_path / "run.jsonl"
    optimizer, recorder = made(path=path, keep=5)
    recorder.load_state_dict(saved)
    train(optimizer, 3, start=100)
    recorder.close()
    assert in_file(path) == list(range(103))


def test_a_load_forgets_a_step_that_failed():
    optimizer, recorder = made("torch")
    train(optimizer, 2)
    saved = recorder.state_dict()
    handle = optimizer.register_step_pre_hook(lambda *_: 1 / 0)
    recorder.report_loss(100.0)
    with pytest.raises(ZeroDivisionError):
        train(optimizer, 1)
    handle.remove()
    recorder.load_state_dict(saved)
    optimizer.step()  # on the same gradients
    assert recorder.record().steps == [0, 1, 2]
    assert recorder.record().loss.isnan().all()


def test_bad_steps_in_a_state():
    _, recorder = made()
    with pytest.raises(ValueError, match=r"state_dict\['step'\] must be an int >= 0, got -3"):
        recorder.load_state_dict({"step": -3, "tape": None})


def test_a_file_that_was_removed_begins_with_the_layers(tmp_path):
    path = tmp_path / "run.jsonl"
    optimizer, recorder = made(path=path)
    train(optimizer, 12)
    path.unlink()
    recorder.report_loss(1.0, step=3)
    with pytest.warns(UserWarning, match="was replaced or shortened"):
        recorder.flush()
    train(optimizer, 10, start=12)
    recorder.close()
    assert in_file(path) == list(range(10, 22))  # two steps were not in the file that was removed
    optimizer, recorder = made(path=path, keep=10)
    with pytest.warns(UserWarning, match="already has"):
        train(optimizer, 40)
    path.unlink()
    with pytest.warns(UserWarning, match="older steps cannot be read|was replaced or shortened"):
        assert recorder.spikes() == []


def test_steps_that_could_not_be_written_before_a_group_was_added_are_written_later(tmp_path, monkeypatch):
    path = tmp_path / "run.jsonl"
    optimizer, recorder = made(path=path)
    train(optimizer, 20)

    def fails(file, data):
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", fails)
        train(optimizer, 10, start=20)
        optimizer.add_param_group({"params": [("c", nn.Parameter(torch.zeros(1)))]})
        with pytest.warns(UserWarning, match="no space left"):
            train(optimizer, 5, start=30)
    recorder.report_loss(4.0, step=25)
    train(optimizer, 5, start=35)
    assert recorder.record().loss[25] == 4.0
    recorder.close()
    record = read_record(path)
    assert record.steps == list(range(40))
    assert record.layers == ["a", "b", "c"]
    assert record.loss[25] == 4.0


class Scaled(torch.optim.SGD):
    """An optimizer that changes the gradients before the step of its base class."""

    fails = ""

    def step(self, closure=None):
        loss = None if closure is None else closure()
        for param in self.param_groups[0]["params"]:
            param.grad *= 10
        if self.fails == "before":
            raise ZeroDivisionError
        super().step()
        if self.fails == "after":
            raise ZeroDivisionError
        return loss


def scaled(**given):
    torch.optim.SGD([nn.Parameter(torch.zeros(1))])  # torch hooks the step of a class when it makes the first object
    param = nn.Parameter(torch.zeros(1))
    optimizer = Scaled([param], 0.1)
    return param, optimizer, Recorder(optimizer, **given)


def closure_of(param, size):
    def closure():
        param.grad = torch.full((1,), size)
        return torch.tensor(size)

    return closure


@pytest.mark.parametrize("has_closure", [True, False])
def test_a_subclass_that_changes_gradients_takes_one_step(has_closure):
    param, optimizer, recorder = scaled()
    steps = [(1.0, ""), (2.0, "before"), (3.0, "after"), (4.0, "")]
    for size, optimizer.fails in steps:
        closure = closure_of(param, size)
        given = [closure] if has_closure else []
        if not has_closure:
            closure()
        if optimizer.fails:
            with pytest.raises(ZeroDivisionError):
                optimizer.step(*given)
        else:
            optimizer.step(*given)
    record = recorder.record()
    assert record.norm.tolist() == [1, 2, 3, 4]
    assert record.reasons == ["", "error", "error", ""]


def test_an_optimizer_that_steps_another_one_records_each():
    param, inner, recorder = scaled()
    others = nn.Parameter(torch.zeros(1))

    class Outer(torch.optim.SGD):
        def step(self, closure=None):
            super().step()
            inner.step()

    outer = Outer([others], 0.1)
    of_outer = Recorder(outer)
    for size in (1.0, 2.0):
        param.grad, others.grad = torch.full((1,), size), torch.full((1,), size)
        outer.step()
    assert recorder.record().norm.tolist() == of_outer.record().norm.tolist() == [1, 2]


@pytest.mark.parametrize("again", ["kept", "step"])
def test_a_step_that_was_stored_before_the_recorder_is_recorded(again):
    param = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([param], 0.1)
    kept = optimizer.step
    recorder = Recorder(optimizer)
    for size in (1.0, 2.0, 3.0):
        param.grad = torch.full((1,), size)
        hook = optimizer.register_step_pre_hook(lambda *_: 1 / 0) if size == 2.0 else None
        if hook is None:
            kept() if again == "kept" else optimizer.step()
        else:
            with pytest.raises(ZeroDivisionError):
                kept()
            hook.remove()
    assert recorder.record().norm.tolist() == [1, 2, 3]
    assert recorder.record().reasons == ["", "error", ""]


def test_a_closed_recorder_leaves_the_step_as_it_was():
    param = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([param], 0.1)
    Recorder(optimizer).close()
    assert "step" not in vars(optimizer)
    torch.optim.lr_scheduler.ConstantLR(optimizer)
    of_scheduler = optimizer.step
    Recorder(optimizer).close()
    assert optimizer.step is of_scheduler


def test_a_failed_step_counts_at_once():
    param, optimizer, recorder = scaled()
    optimizer.fails = "after"
    for step in range(2):
        closure_of(param, 2.0)()
        with pytest.raises(ZeroDivisionError):
            optimizer.step()
        assert recorder.step == step + 1
        recorder.report_loss(step, step=recorder.step - 1)
    assert recorder.record().loss.tolist() == [0, 1]


def test_reading_within_a_step_does_not_end_it():
    param = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.LBFGS([param], max_iter=3, tolerance_grad=0, tolerance_change=0)
    recorder, seen = Recorder(optimizer), []

    def closure():
        seen.append(recorder.step)
        return closure_of(param, 1.0)()

    optimizer.step(closure)
    assert len(seen) > 1
    assert set(seen) == {0}
    assert recorder.record().reasons == [""]


@pytest.mark.filterwarnings("ignore:.*layers are inf or NaN")
def test_gradients_that_are_inference_tensors_are_recorded():
    for given in ((), (lambda: None,)):
        param = nn.Parameter(torch.zeros(2))
        optimizer = torch.optim.SGD([param], 0.1)
        recorder = Recorder(optimizer, ratios_every=1)
        for size in (1.0, 2.0, torch.inf):
            with torch.inference_mode():
                param.grad = torch.full((2,), size)
            optimizer.step(*given)
        with torch.inference_mode():
            param.grad = torch.full((2,), 3.0)
            optimizer.step(*given)
        param.grad = torch.full((2,), 4.0)
        optimizer.step(*given)
        assert (recorder.record().norm / 2**0.5).tolist() == pytest.approx([1, 2, torch.inf, 3, 4])
        assert recorder.record().reasons == [""] * 5


@pytest.mark.parametrize("kind", ["modular", "torch"])
@pytest.mark.parametrize("way", [copy.deepcopy, lambda recorder: pickle.loads(pickle.dumps(recorder))])
def test_a_copy_keeps_what_was_recorded_and_records_no_more(kind, way, tmp_path):
    path = tmp_path / "run.jsonl"
    optimizer, recorder = made(kind, path=path, keep=20)
    train(optimizer, 35)
    size = path.stat().st_size
    other = way(recorder)
    assert other.is_closed
    assert torch.equal(other.record().norm, recorder.record().norm)
    train(other.optimizer, 2)
    other.flush()
    other.close()
    assert path.stat().st_size == size
    assert other.step == recorder.step
    assert not recorder.is_closed
    train(optimizer, 5, start=recorder.step)
    recorder.close()
    assert in_file(path)[-1] == recorder.step - 1


def test_a_flush_reads_the_steps_once(tmp_path, monkeypatch):
    sent = []
    optimizer, recorder = made(path=tmp_path / "run.jsonl", log=lambda step, values: sent.append(step))
    train(optimizer, 9)
    reads, read = [], Tape._read
    monkeypatch.setattr(Tape, "_read", lambda tape, last: reads.append(last) or read(tape, last))
    train(optimizer, 1, start=9)
    assert len(reads) == 1
    train(optimizer, 100, start=10)
    assert len(reads) == 2
    recorder.close()
    assert in_file(tmp_path / "run.jsonl") == list(range(110))
    assert sent == list(range(9, 110, 10))
