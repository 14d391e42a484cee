"""The Trainer of Hugging Face: other runs go on in it, and the callback logs and refuses.

`tests/test_examples.py` shows that runs resume bit for bit.
"""

import json
import math
import os
import warnings
from functools import partial

import pytest
import torch
from torch import nn

from torchzero_clip import (
    Adam,
    AdamW,
    ClipNorm,
    ClipNormGrowth,
    Modular,
    Recorder,
    SkipStep,
    ZClip,
    adapt_state_dict,
    before_step,
    from_torch_optim,
    integrations,
    read_record,
)

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed")
TrainerCallback = integrations.TrainerCallback
pytestmark = [pytest.mark.peers, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, i):
        x = torch.randn(3, generator=torch.Generator().manual_seed(i))
        return {"x": x, "labels": x.sum().sin()}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x, labels):
        found = self.layers(x).squeeze(-1)
        return {"loss": nn.functional.mse_loss(found, labels), "logits": found}


def trained(directory, steps, chain, resume=None, hook=None, callbacks=(), added=None, **given):
    model = Net()
    optimizer = chain(model.parameters()) if callable(chain) else Modular(model, *chain)
    if hook is not None:
        optimizer.register_load_state_dict_pre_hook(hook)
    usual = {"max_grad_norm": 0, "report_to": [], "logging_steps": 1000, "save_steps": 4, "max_steps": steps}
    arguments = transformers.TrainingArguments(
        str(directory), per_device_train_batch_size=8, use_cpu=True, disable_tqdm=True, **(usual | given)
    )
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    both = (optimizer, schedule)
    trainer = transformers.Trainer(model, arguments, train_dataset=Data(), optimizers=both, callbacks=list(callbacks))
    if added is not None:
        trainer.add_callback(added(trainer))
    trainer.train(resume_from_checkpoint=resume)
    return model, optimizer, trainer


def test_it_resumes_into_another_chain_by_a_hook(tmp_path):
    _, old, _ = trained(tmp_path, 4, [ClipNorm(0.1), Adam(0.1)])
    hook = partial(adapt_state_dict, new=["clip_norm_growth"])
    checkpoint = os.fspath(tmp_path / "checkpoint-4")
    with pytest.raises(ValueError, match="belongs to another chain"):
        trained(tmp_path, 4, [ClipNormGrowth(), ClipNorm(9.0), Adam()], resume=checkpoint)
    _, new, _ = trained(tmp_path, 5, [ClipNormGrowth(), ClipNorm(9.0), Adam()], resume=checkpoint, hook=hook)
    assert new.param_groups[0]["max_norm"] == 0.1
    assert next(iter(new.state.values()))["adam/step"].item() == next(iter(old.state.values()))["adam/step"].item() + 1


def test_metrics_are_in_the_history_and_on_tensorboard(tmp_path, monkeypatch):
    events = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="tensorboard is not installed"
    )
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "logs"))
    chain = [ClipNorm(0.1, dim="global"), Adam(0.1)]
    given = {"report_to": ["tensorboard"], "logging_steps": 2, "save_steps": 100}
    _, optimizer, trainer = trained(tmp_path, 6, chain, added=lambda own: TrainerCallback(trainer=own), **given)
    logs = [log for log in trainer.state.log_history if "loss" in log]
    assert [log["step"] for log in logs] == [2, 4, 6]
    for log in logs:  # the Trainer's own norm is the one before clipping
        assert log["clip_norm/norm"] == pytest.approx(log["grad_norm"], rel=1e-5)
        assert log["clip_norm/factor"] == pytest.approx(0.1 / log["clip_norm/norm"], rel=1e-6)
        assert log["clip_norm/clipped"] == 1.0
    assert logs[-1]["clip_norm/norm"] == optimizer.metrics()["clip_norm/norm"].item()
    written = events.EventAccumulator(str(next((tmp_path / "logs").rglob("events*")))).Reload()
    scalars = written.Scalars("train/clip_norm/norm")
    assert [scalar.step for scalar in scalars] == [2, 4, 6]
    assert [scalar.value for scalar in scalars] == pytest.approx([log["clip_norm/norm"] for log in logs])


def test_a_service_that_does_not_get_the_metrics_is_named(tmp_path, monkeypatch):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "logs"))
    given = {"callbacks": [TrainerCallback()], "report_to": ["tensorboard"], "logging_steps": 1}
    with pytest.warns(UserWarning, match=r"tensorboard does not get the metrics.*trainer\.add_callback\(TrainerCall"):
        _, optimizer, trainer = trained(tmp_path, 2, [ClipNorm(0.1), Adam(0.1)], **given)
    last = [log for log in trainer.state.log_history if "loss" in log][-1]
    assert last["clip_norm/norm"] == optimizer.metrics()["clip_norm/norm"].item()


def test_a_trainer_that_clips_as_well_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"max_grad_norm=1\.0 before .* Write TrainingArguments\(max_grad_norm=0\)"):
        trained(tmp_path, 1, [ClipNorm(5), Adam()], callbacks=[TrainerCallback()], max_grad_norm=1.0)
    trained(tmp_path, 1, [ClipNorm(5), Adam()], callbacks=[TrainerCallback()])


def test_an_optimizer_without_a_chain_is_refused(tmp_path):
    with pytest.raises(TypeError, match="optimizer must be a Modular or a wrapper of one, got AdamW"):
        trained(tmp_path, 1, torch.optim.AdamW, callbacks=[TrainerCallback()])


def test_a_callback_inside_another_does_not_move(tmp_path):
    class Outer(transformers.TrainerCallback):
        def __init__(self, trainer):
            self.inner = TrainerCallback(trainer=trainer)

        def on_train_begin(self, *args, **kwargs):
            self.inner.on_train_begin(*args, **kwargs)

    _, _, trainer = trained(tmp_path, 1, [ClipNorm(5), Adam()], added=Outer)
    callbacks = trainer.callback_handler.callbacks
    assert trainer.state.global_step == 1
    assert sum(isinstance(found, Outer) for found in callbacks[1:]) == 1


def test_a_run_of_torchs_adamw_goes_on_by_a_hook_that_may_stay(tmp_path):
    def hook(optimizer, saved):
        return from_torch_optim(saved, optimizer)

    trained(tmp_path, 4, torch.optim.AdamW)
    chain = [ClipNorm(1e9), AdamW()]
    for steps in (6, 8):  # the second run resumes from a checkpoint of the chain
        checkpoint = os.fspath(tmp_path / f"checkpoint-{steps - 2}")
        _, optimizer, _ = trained(tmp_path, steps, chain, resume=checkpoint, hook=hook, save_steps=steps)
        assert {state["adam/step"].item() for state in optimizer.state.values()} == {steps}


def recorded(directory, steps, resume=None):
    own = TrainerCallback(partial(Recorder, path=directory / "run.jsonl", keep=3))
    chain = [SkipStep(max_norm=1e6), ClipNorm(0.1, dim="global"), Adam(0.1)]
    trained(directory, steps, chain, resume=resume, callbacks=[own])
    return own.recorder


def test_a_record_is_saved_with_checkpoints_and_continued(tmp_path):
    whole = recorded(tmp_path / "whole", 8)
    recorded(tmp_path / "parts", 6)
    resumed = recorded(tmp_path / "parts", 8, os.fspath(tmp_path / "parts" / "checkpoint-4"))
    assert resumed.record().steps == whole.record().steps == [5, 6, 7]
    assert torch.equal(resumed.record().layer_norms, whole.record().layer_norms)
    record = read_record(tmp_path / "parts" / "run.jsonl")
    assert record.steps == list(range(8))
    assert torch.equal(record.norm, read_record(tmp_path / "whole" / "run.jsonl").norm)


def test_a_recorder_of_another_optimizer_is_refused(tmp_path):
    other = Recorder(Modular(Net(), Adam()))
    with pytest.raises(ValueError, match="another optimizer"):
        trained(tmp_path, 2, [Adam()], callbacks=[TrainerCallback(other)])


def test_a_record_goes_on_from_a_checkpoint_in_another_folder(tmp_path):
    recorded(tmp_path / "first", 4)
    (tmp_path / "second").mkdir()
    (tmp_path / "first" / "run.jsonl").rename(tmp_path / "second" / "run.jsonl")
    recorded(tmp_path / "second", 8, os.fspath(tmp_path / "first" / "checkpoint-4"))
    assert read_record(tmp_path / "second" / "run.jsonl").steps == list(range(8))


def adamw_trained(directory, steps, resume=None, own=None, **given):
    """Train with the Trainer's own AdamW, which has a param group with and one without weight decay."""
    own = TrainerCallback(own or partial(Recorder, path=directory / "run.jsonl"))
    usual = {"max_grad_norm": 0, "report_to": [], "save_steps": 4, "max_steps": steps, "learning_rate": 0.1}
    arguments = transformers.TrainingArguments(
        str(directory), per_device_train_batch_size=8, use_cpu=True, disable_tqdm=True, **(usual | given)
    )
    norms = []

    class Watch(transformers.TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, optimizer, **kwargs):
            params = [param for group in optimizer.param_groups for param in group["params"]]
            norms.append([param.grad.double().square().sum().sqrt().item() for param in params])

    trainer = transformers.Trainer(Net(), arguments, train_dataset=Data(), callbacks=[own, Watch()])
    trainer.train(resume_from_checkpoint=resume)
    return own.recorder, torch.tensor(norms, dtype=torch.float64), trainer


def test_the_trainers_own_adamw_is_recorded_until_training_ends(tmp_path):
    tmp_path.joinpath("x").mkdir()
    recorder, norms, trainer = adamw_trained(tmp_path / "x", 12, logging_steps=1)
    record, kept = read_record(tmp_path / "x" / "run.jsonl"), recorder.record()
    assert recorder.is_closed
    assert trainer.optimizer.optimizer._optimizer_step_pre_hooks == {}
    assert sorted(kept.layers) == sorted(f"layers.{name}" for name in ("0.bias", "0.weight", "2.bias", "2.weight"))
    torch.testing.assert_close(kept.layer_norms, norms, rtol=1e-6, atol=0)
    torch.testing.assert_close(record.norm, norms.square().sum(1).sqrt(), rtol=1e-6, atol=0)
    logs = [log for log in trainer.state.log_history if "loss" in log]
    assert record.steps == [log["step"] - 1 for log in logs] == list(range(12))
    assert record.loss.tolist() == kept.loss.tolist() == [log["loss"] for log in logs]
    assert [log["gradients/norm"] for log in logs] == record.norm.tolist()
    assert logs[0]["layers/layers.0.weight/norm"] == kept.layer_norms[0, kept.layers.index("layers.0.weight")]


@pytest.mark.parametrize("save_steps", [100, 4])
def test_logs_of_several_steps(tmp_path, save_steps):
    """Their losses are means, and are not recorded. At a checkpoint, steps are written between two logs."""
    own = TrainerCallback(Recorder)
    chain, given = [SkipStep(max_norm=0.8), Adam(0.01)], {"logging_steps": 10, "save_steps": save_steps}
    _, _, trainer = trained(tmp_path, 22, chain, callbacks=[own], **given)
    record = own.recorder.record()
    assert record.loss.isnan().all()
    logs = [log for log in trainer.state.log_history if "loss" in log]
    assert [log["step"] for log in logs] == [10, 20]
    assert 0 < sum(map(bool, record.reasons)) < 22
    for log, first in zip(logs, (0, 10), strict=True):
        assert log["gradients/skipped"] == sum(map(bool, record.reasons[first : first + 10]))
        assert log["gradients/largest_norm"] == record.norm[first : first + 10].max()
        since = first + 10 - (10 if save_steps == 100 else 10 % 4 if first == 0 else 4)
        assert log["gradients/norm"] == record.norm[since : first + 10].quantile(0.5)
    named = {f"layers/{name}/norm": i for i, name in enumerate(record.layers)}
    shown = logs[0].keys() & named.keys()
    assert len(shown) == (4 if save_steps == 4 else 0)  # a point has layers if steps before it tell what is usual
    for name in shown:
        assert logs[1][name] == record.layer_norms[10:20, named[name]].max()


def test_a_gate_that_judges_losses_gets_none_from_the_logs(tmp_path):
    own = TrainerCallback(Recorder)
    trained(tmp_path, 4, [SkipStep(sigma=6.0), Adam()], callbacks=[own], logging_steps=1)
    assert own.recorder.record().loss.isnan().all()


@pytest.mark.parametrize("kind", ["empty", "garbage", "half", "another dict", "other parameters"])
def test_a_broken_record_in_a_checkpoint_does_not_stop_the_run(tmp_path, kind):
    adamw_trained(tmp_path, 6, logging_steps=1)
    saved = tmp_path / "checkpoint-4" / "recorder.pt"
    data, state = saved.read_bytes(), torch.load(saved)
    if kind in ("empty", "garbage", "half"):
        saved.write_bytes({"empty": b"", "garbage": b"garbage" * 99, "half": data[: len(data) // 2]}[kind])
    else:
        tape = {**state["tape"], "names": ["a", *state["tape"]["names"][1:]]}
        torch.save({"step": 3} if kind == "another dict" else {**state, "tape": tape}, saved)
    with pytest.warns(UserWarning, match=r"recorder\.pt cannot be read, the record continues at step 4"):
        recorder, norms, _ = adamw_trained(tmp_path, 8, os.fspath(tmp_path / "checkpoint-4"), logging_steps=1)
    assert recorder.record().steps == [4, 5, 6, 7]
    torch.testing.assert_close(recorder.record().layer_norms, norms, rtol=1e-6, atol=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        record = read_record(tmp_path / "run.jsonl")
    assert record.steps == list(range(8))
    assert not record.loss.isnan().any()


def test_a_checkpoint_has_a_whole_record_or_the_one_before(tmp_path, monkeypatch):
    """The record is written under another name first."""
    adamw_trained(tmp_path, 4)
    saved = tmp_path / "checkpoint-4" / "recorder.pt"
    before = saved.read_bytes()

    save = torch.save

    def half(state, path):
        save(state, path)
        if "recorder" in os.fspath(path):
            os.truncate(path, 99)
            raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", half)
    with pytest.raises(KeyboardInterrupt):
        adamw_trained(tmp_path, 4)
    assert saved.read_bytes() == before


def test_the_trainers_own_limit_is_reported_before_its_optimizer_is_recorded(tmp_path):
    with pytest.warns(
        UserWarning, match=r"max_grad_norm=1\.0 before they are recorded\. For the norms before, set max_grad_norm=0"
    ):
        adamw_trained(tmp_path, 1, max_grad_norm=1.0)


def test_a_callback_serves_two_trainings(tmp_path):
    made = []

    def make(optimizer):
        made.append(Recorder(optimizer))
        return made[-1]

    own = TrainerCallback(make)
    for k in range(2):
        trained(tmp_path / str(k), 3, [ClipNorm(0.1), Adam(0.1)], callbacks=[own], logging_steps=1)
        assert own.recorder is made[k]
        assert own.recorder.record().steps == [0, 1, 2]
        assert not own.recorder.record().loss.isnan().any()


def test_training_goes_on_after_an_interruption_in_the_same_process(tmp_path):
    class Stop(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 3 and own.recorder is made[0]:
                raise KeyboardInterrupt

    def make(optimizer):
        made.append(Recorder(optimizer, path=tmp_path / "run.jsonl"))
        return made[-1]

    made = []
    own = TrainerCallback(make)
    arguments = transformers.TrainingArguments(
        str(tmp_path),
        max_steps=6,
        save_steps=2,
        max_grad_norm=0,
        per_device_train_batch_size=8,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    trainer = transformers.Trainer(Net(), arguments, train_dataset=Data(), callbacks=[own, Stop()])
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    trainer.train(resume_from_checkpoint=os.fspath(tmp_path / "checkpoint-2"))
    assert made[0].is_closed
    record = read_record(tmp_path / "run.jsonl")
    assert record.steps == own.recorder.record().steps == list(range(6))
    torch.testing.assert_close(record.norm[:2], made[0].record().norm[:2], rtol=0, atol=0)


def test_a_disk_that_is_full_when_training_ends_gives_a_warning(tmp_path, monkeypatch):
    def fails(path, data):
        raise OSError("no space left")

    monkeypatch.setattr("torchzero_clip.recorder.files.append", fails)
    with pytest.warns(UserWarning, match="the record could not be written to .*no space left"):
        recorder, norms, _ = adamw_trained(tmp_path, 6, save_strategy="no")
    assert recorder.is_closed
    torch.testing.assert_close(recorder.record().layer_norms, norms, rtol=1e-6, atol=0)


def own_trained(directory, steps, resume=None, model=None, optimizer=None, own=None, others=(), **given):
    """Train with the Trainer's own AdamW, before whose steps transforms stand."""
    usual = {"report_to": [], "save_steps": 4, "max_steps": steps, "learning_rate": 0.05, "logging_steps": 1}
    usual["lr_scheduler_type"] = "constant"
    arguments = transformers.TrainingArguments(
        str(directory),
        per_device_train_batch_size=8,
        use_cpu=True,
        disable_tqdm=True,
        **({"max_grad_norm": 0} | usual | given),
    )
    callbacks = [*([own] if own else []), *others]
    model, both = model or Net(), (optimizer, None)
    trainer = transformers.Trainer(model, arguments, train_dataset=Data(), optimizers=both, callbacks=callbacks)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def bits(trainer):
    return torch.cat([param.detach().reshape(-1) for param in trainer.model.parameters()])


def test_transforms_limit_as_the_trainer_does(tmp_path):
    own = TrainerCallback(transforms=[ClipNorm(0.1, dim="global")])
    ours = own_trained(tmp_path, 8, own=own)
    theirs = own_trained(tmp_path, 8, max_grad_norm=0.1)
    torch.testing.assert_close(bits(ours), bits(theirs), rtol=0, atol=1e-5)
    logs = [[log for log in trainer.state.log_history if "loss" in log] for trainer in (ours, theirs)]
    assert [log["clip_norm/norm"] for log in logs[0]] == pytest.approx([log["grad_norm"] for log in logs[1]], rel=1e-4)
    assert all(log["clip_norm/factor"] == pytest.approx(0.1 / log["clip_norm/norm"]) for log in logs[0])
    assert type(ours.optimizer.optimizer) is torch.optim.AdamW


@pytest.mark.parametrize("where", ["own AdamW", "SGD that is given", "the same trainer"])
def test_transforms_resume_from_the_trainers_checkpoints(tmp_path, where):
    def run(directory, steps, resume=None):
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9) if where == "SGD that is given" else None
        # 6 steps of warm-up, so that the checkpoint of step 4 has a part of it
        own = TrainerCallback(transforms=[SkipStep(max_norm=0.9), ZClip(warmup_steps=6, max_norm=0.5)])
        return own_trained(directory, steps, resume, model, optimizer, own), own

    whole, expected = run(tmp_path / "whole", 12)
    trainer, first = run(tmp_path / "parts", 5)
    checkpoint = os.fspath(tmp_path / "parts" / "checkpoint-4")
    if where == "the same trainer":
        trainer.args.max_steps = 12
        trainer.train(resume_from_checkpoint=checkpoint)
        found = first
    else:
        trainer, found = run(tmp_path / "parts", 12, checkpoint)
    assert torch.equal(bits(trainer), bits(whole))
    assert integrations.numbers(found.handle) == integrations.numbers(expected.handle)
    assert 0 < expected.handle.skipped_steps < 12
    assert found.handle.skipped_steps == expected.handle.skipped_steps
    own, theirs = (
        [{k: v for k, v in log.items() if "/" in k} for log in run.state.log_history if "loss" in log]
        for run in (trainer, whole)
    )
    assert own[-7:] == theirs[-7:]


def test_a_checkpoint_that_is_saved_after_training_has_the_transforms(tmp_path):
    own = TrainerCallback(transforms=[ZClip()])
    trainer = own_trained(tmp_path, 3, own=own)
    saved = trainer.optimizer.state_dict()["param_groups"]
    assert [group["before_step"]["settings"]["z_clip/started"].item() for group in saved] == [3, 3]
    own.handle.remove()
    assert "before_step" not in trainer.optimizer.state_dict()["param_groups"][0]


def test_transforms_and_a_trainer_that_clips_as_well_are_refused(tmp_path):
    for own in (TrainerCallback(transforms=[ZClip()]), TrainerCallback(Recorder, transforms=[ZClip()])):
        with pytest.raises(ValueError, match=r"max_grad_norm=1\.0 before .*transforms="):
            own_trained(tmp_path, 1, own=own, max_grad_norm=1.0)
        assert own.handle is None
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    before_step(optimizer, ZClip())
    with pytest.raises(ValueError, match=r"max_grad_norm=1\.0 before"):
        own_trained(tmp_path, 1, None, model, optimizer, TrainerCallback(Recorder), max_grad_norm=1.0)


def test_an_optimizer_of_another_model_is_refused(tmp_path):
    """As with peft_config= and an optimizer of the bare model, whose parameters are frozen."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model.requires_grad_(False)
    model.layers.append(nn.Linear(1, 1))
    with pytest.raises(ValueError, match=r"none of the 2 trainable parameters of the model \('layers.3.weight'"):
        own_trained(tmp_path, 1, None, model, optimizer, TrainerCallback(transforms=[ZClip()]))
    model.layers[0].requires_grad_(True)
    with pytest.warns(UserWarning, match="does not have 2 of the 4 trainable parameters"):
        own_trained(tmp_path, 1, None, model, optimizer, TrainerCallback(transforms=[ZClip()]))


def test_a_record_beside_transforms_has_the_norms_before_them(tmp_path):
    own = TrainerCallback(Recorder, transforms=[SkipStep(max_norm=0.9), ClipNorm(0.1, dim="global")])
    trainer = own_trained(tmp_path, 6, own=own)
    logs, record = [log for log in trainer.state.log_history if "loss" in log], own.recorder.record()
    assert record.norm.tolist() == pytest.approx([log["grad_norm"] for log in logs], rel=1e-5)
    assert [bool(reason) for reason in record.reasons] == [norm > 0.9 for norm in record.norm.tolist()]


def test_the_trainer_constructs_a_chain_as_its_own_optimizer(tmp_path):
    def weights(limit, **given):
        usual = {"max_steps": 8, "learning_rate": 0.1, "report_to": [], "use_cpu": True, "disable_tqdm": True}
        arguments = transformers.TrainingArguments(str(tmp_path), max_grad_norm=limit, **usual)
        trainer = transformers.Trainer(Net(), arguments, train_dataset=Data(), **given)
        trainer.train()
        return nn.utils.parameters_to_vector(trainer.model.parameters())

    Clipped = Modular.of(ClipNorm(0.1, dim="global"), AdamW(weight_decay=0.0))  # noqa: N806
    found = weights(0, optimizer_cls_and_kwargs=(Clipped, {"lr": 0.1}))
    torch.testing.assert_close(found, weights(0.1), rtol=1e-5, atol=1e-6)


def test_the_state_of_the_trainer_is_json_and_has_no_numbers_of_an_earlier_step(tmp_path):
    """The limit of `ZClip` is inf in most steps, and the third step is refused."""

    def spoiled(params):
        params, steps = list(params), iter(range(6))
        optimizer = torch.optim.SGD(params, 0.01)

        def spoil(*_):
            if next(steps) == 2:
                params[0].grad.fill_(math.inf)

        optimizer.register_step_pre_hook(spoil)
        return optimizer

    own = TrainerCallback(partial(Recorder, flush_every=1), transforms=[SkipStep(max_ratio=1e6), ZClip(max_norm=None)])
    trained(tmp_path, 6, spoiled, callbacks=[own], logging_steps=1, save_steps=6, logging_nan_inf_filter=False)
    text = (tmp_path / "checkpoint-6" / "trainer_state.json").read_text()
    written = json.loads(text, parse_constant=lambda token: pytest.fail(f"{token} is not JSON"))
    logs = [log for log in written["log_history"] if "loss" in log]
    assert [("z_clip/norm" in log, "z_clip/limit" in log) for log in logs] == [(i != 2, False) for i in range(6)]
    assert [log["skipped_steps"] for log in logs] == [0, 0, 1, 1, 1, 1]
