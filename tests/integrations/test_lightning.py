"""The Trainer of Lightning: the callback logs and refuses. `tests/test_examples.py` shows that runs resume."""

import csv
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from torchzero_clip import (
    AdamW,
    ClipNorm,
    ClipNormGrowth,
    Modular,
    Recorder,
    SkipStep,
    ZClip,
    before_step,
    integrations,
    read_record,
)

lightning = pytest.importorskip("lightning", reason="lightning is not installed")
LightningCallback = integrations.LightningCallback
pytestmark = [pytest.mark.peers, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))

    def training_step(self, batch, index):
        x, y = batch
        return nn.functional.mse_loss(self.net(x).squeeze(-1), y)

    def configure_optimizers(self):
        optimizer = Modular(self, ClipNorm(0.1, dim="global"), ClipNormGrowth(), AdamW(0.1))
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)}


class Two(Module):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, index):
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, index))
            optimizer.step()

    def configure_optimizers(self):
        return Modular(self.net[0], ClipNorm(0.1), AdamW(0.1)), torch.optim.AdamW(self.net[2].parameters())


class ClipsItself(Module):
    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        nn.utils.clip_grad_norm_(self.parameters(), 1.0)


class ClipsByAnAttribute(Module):
    def __init__(self):
        super().__init__()
        self.configure_gradient_clipping = lambda *_: nn.utils.clip_grad_norm_(self.parameters(), 1.0)


def fitted(directory, epochs, module=Module, resume=None, logger=False, own=None, **given):
    x = torch.randn(32, 3, generator=torch.Generator().manual_seed(1))
    module = module()
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu", "logger": logger}
    trainer = lightning.Trainer(
        default_root_dir=directory,
        max_epochs=epochs,
        callbacks=[own or LightningCallback()],
        log_every_n_steps=2,
        **quiet,
        **given,
    )
    trainer.fit(module, DataLoader(TensorDataset(x, x.sum(1).sin()), 8), ckpt_path=resume)
    return module, trainer


def test_metrics_are_on_the_trainer_and_on_tensorboard(tmp_path):
    events = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="tensorboard is not installed"
    )
    logger = lightning.pytorch.loggers.TensorBoardLogger(tmp_path)
    module, trainer = fitted(tmp_path, 2, logger=logger)
    found = integrations.metrics(module.optimizers())
    assert found == trainer.optimizers[0].metrics()
    for name in ("clip_norm/norm", "clip_norm/factor", "clip_norm_growth/factor"):
        assert trainer.callback_metrics[name].item() == pytest.approx(found[name].item())
    assert found["clip_norm/factor"].item() == pytest.approx(0.1 / found["clip_norm/norm"].item())
    written = events.EventAccumulator(str(next(tmp_path.rglob("events*")))).Reload()
    scalars = written.Scalars("clip_norm/norm")
    assert [scalar.step for scalar in scalars] == [1, 3, 5, 7]
    assert scalars[-1].value == pytest.approx(found["clip_norm/norm"].item())


def test_with_two_optimizers_names_begin_with_the_index(tmp_path):
    _, trainer = fitted(tmp_path, 1, Two)
    assert {"0/clip_norm/norm", "0/clip_norm/factor", "0/clip_norm/clipped"} == set(trainer.callback_metrics)


def test_a_trainer_that_clips_as_well_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"gradient_clip_val=0\.5 before .* Write Trainer\(gradient_clip_val=None\)"):
        fitted(tmp_path, 1, gradient_clip_val=0.5)
    with pytest.raises(ValueError, match=r"ClipsItself\.configure_gradient_clipping .* Remove the method"):
        fitted(tmp_path, 1, ClipsItself)
    with pytest.raises(ValueError, match="configure_gradient_clipping"):
        fitted(tmp_path, 1, ClipsByAnAttribute)
    fitted(tmp_path, 1, gradient_clip_val=0)


class Plain(Module):
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


def test_a_module_without_a_chain_is_refused(tmp_path):
    with pytest.raises(
        TypeError, match="must return a Modular, so that LightningCallback has metrics to log, got AdamW"
    ):
        fitted(tmp_path, 1, Plain)


def test_a_record_is_saved_with_checkpoints_and_continued(tmp_path):
    def recording():
        return LightningCallback(partial(Recorder, path=tmp_path / "run.jsonl"))

    whole, own = recording(), recording()
    fitted(tmp_path, 4, own=whole)
    expected = whole.recorder.record()
    assert expected.steps == list(range(16))
    assert not expected.loss.isnan().any()
    whole.recorder.close()
    (tmp_path / "run.jsonl").unlink()
    _, trainer = fitted(tmp_path, 2, own=own)
    trainer.save_checkpoint(tmp_path / "half.ckpt", weights_only=False)
    own.recorder.close()
    again = recording()
    fitted(tmp_path, 4, own=again, resume=tmp_path / "half.ckpt")
    found = again.recorder.record()
    assert found.steps == expected.steps
    assert torch.equal(found.layer_norms, expected.layer_norms)
    assert torch.equal(found.loss, expected.loss)
    assert torch.equal(read_record(tmp_path / "run.jsonl").norm, expected.norm)


def test_a_callback_serves_two_fits(tmp_path):
    own = LightningCallback(Recorder)
    for _ in range(2):
        fitted(tmp_path, 1, own=own)
        assert own.recorder.record().steps == list(range(4))


class Watched(Plain):
    """Has AdamW of torch, and the norms of its gradients."""

    def on_before_optimizer_step(self, optimizer):
        found = [param.grad.double().square().sum().sqrt().item() for param in self.parameters()]
        self.norms = [*getattr(self, "norms", []), found]


def test_torchs_adamw_is_recorded_until_training_ends(tmp_path):
    logger = lightning.pytorch.loggers.CSVLogger(tmp_path)
    own = LightningCallback(partial(Recorder, path=tmp_path / "run.jsonl"))
    module, trainer = fitted(tmp_path, 3, Watched, logger=logger, own=own)
    norms, record = torch.tensor(module.norms, dtype=torch.float64), read_record(tmp_path / "run.jsonl")
    assert own.recorder.is_closed
    assert trainer.optimizers[0]._optimizer_step_pre_hooks == {}
    assert own.recorder.record().layers == ["net.0.weight", "net.0.bias", "net.2.weight", "net.2.bias"]
    torch.testing.assert_close(own.recorder.record().layer_norms, norms, rtol=1e-6, atol=0)
    torch.testing.assert_close(record.norm, norms.square().sum(1).sqrt(), rtol=1e-6, atol=0)
    assert record.steps == list(range(12))
    assert not record.loss.isnan().any()
    with open(next(tmp_path.rglob("metrics.csv")), newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["gradients/norm"]]
    first = 0
    for row in rows:  # one for each time that the file was written
        last = int(row["step"])
        joint = record.norm[first : last + 1]
        assert float(row["gradients/norm"]) == pytest.approx(joint.quantile(0.5).item(), rel=1e-6)
        assert float(row["gradients/largest_norm"]) == pytest.approx(joint.max().item(), rel=1e-6)
        first = last + 1
    assert first == 12
    assert len(rows) > 1


def test_a_recorder_of_any_optimizer_can_be_given(tmp_path):
    """Manual optimization, and two optimizers: the recorder of the second one."""

    class Given(Two):
        def configure_optimizers(self):
            both = super().configure_optimizers()
            own._to_record = Recorder(both[1], model=self)
            return both

    own = LightningCallback()
    _, trainer = fitted(tmp_path, 1, Given, own=own)
    assert own.recorder.optimizer is trainer.optimizers[1]
    assert own.recorder.record().layers == ["net.2.weight", "net.2.bias"]
    assert own.recorder.record().steps == list(range(4))


def test_training_goes_on_after_an_interruption_in_the_same_process(tmp_path):
    class Once(Watched):
        optimizer = None

        def configure_optimizers(self):
            self.optimizer = self.optimizer or super().configure_optimizers()
            return self.optimizer

        def on_train_batch_end(self, *args):
            if len(self.norms) == 3:
                raise ArithmeticError

    module, own = Once(), LightningCallback(partial(Recorder, path=tmp_path / "run.jsonl"))
    with pytest.raises(ArithmeticError):
        fitted(tmp_path, 1, lambda: module, own=own)
    first = own.recorder
    fitted(tmp_path, 1, lambda: module, own=own)
    assert first.is_closed
    assert first.record().steps == [0, 1, 2]
    assert own.recorder.record().steps == list(range(4))
    assert read_record(tmp_path / "run.jsonl").steps == list(range(4))


def test_a_disk_that_is_full_when_training_ends_gives_a_warning(tmp_path, monkeypatch):
    def fails(path, data):
        raise OSError("no space left")

    monkeypatch.setattr("torchzero_clip.recorder.files.append", fails)
    own = LightningCallback(partial(Recorder, path=tmp_path / "run.jsonl"))
    with pytest.warns(UserWarning, match="the record could not be written to .*no space left"):
        fitted(tmp_path, 1, Watched, own=own, enable_checkpointing=False)
    assert own.recorder.is_closed
    assert own.recorder.record().steps == list(range(4))


def transforms():
    return LightningCallback(transforms=[SkipStep(max_norm=0.9), ZClip(warmup_steps=6, max_norm=0.5)])


def values(module):
    return torch.cat([param.detach().reshape(-1) for param in module.parameters()])


def test_transforms_limit_as_the_trainer_does(tmp_path):
    ours, trainer = fitted(tmp_path, 2, Watched, own=LightningCallback(transforms=[ClipNorm(0.1, dim="global")]))
    theirs, _ = fitted(tmp_path, 2, Plain, own=LightningCallback(Recorder), gradient_clip_val=0.1)
    torch.testing.assert_close(values(ours), values(theirs), rtol=0, atol=1e-5)
    norm = torch.tensor(ours.norms[-1]).norm().item()
    assert trainer.callback_metrics["clip_norm/norm"].item() == pytest.approx(norm, rel=1e-5)
    assert trainer.callback_metrics["clip_norm/factor"].item() == pytest.approx(0.1 / norm, rel=1e-5)


@pytest.mark.parametrize("saved", ["after the fit", "by save_last"])
def test_transforms_resume_from_the_trainers_checkpoints(tmp_path, saved):
    expected, own = transforms(), transforms()
    whole, _ = fitted(tmp_path, 3, Plain, own=expected)
    _, trainer = fitted(tmp_path, 1, Plain, own=transforms(), enable_checkpointing=True)
    path = tmp_path / "half.ckpt"
    if saved == "after the fit":
        trainer.save_checkpoint(path)
    else:
        path = trainer.checkpoint_callback.best_model_path
    resumed, _ = fitted(tmp_path, 3, Plain, own=own, resume=path)
    assert torch.equal(values(resumed), values(whole))
    assert integrations.numbers(own.handles[0]) == integrations.numbers(expected.handles[0])
    assert 0 < expected.handles[0].skipped_steps == own.handles[0].skipped_steps < 12


class TwoPlain(Two):
    def configure_optimizers(self):
        return [torch.optim.AdamW(self.net[i].parameters(), 0.1) for i in (0, 2)]


def test_transforms_stand_before_each_of_several_optimizers(tmp_path):
    own = LightningCallback(transforms=[ClipNorm(0.01, dim="global")])
    module, trainer = fitted(tmp_path, 1, TwoPlain, own=own)
    assert [handle.metrics()["clip_norm/factor"].item() < 1 for handle in own.handles] == [True, True]
    names = {f"{i}/clip_norm/{name}" for i in (0, 1) for name in ("norm", "factor", "clipped")}
    assert names == set(trainer.callback_metrics)
    joint = torch.cat([param.grad.reshape(-1) for param in module.net[2].parameters()])
    assert joint.norm().item() == pytest.approx(0.01, rel=1e-5)


def test_transforms_beside_a_modular_are_refused(tmp_path):
    with pytest.raises(TypeError, match="takes the transforms"):
        fitted(tmp_path, 1, Two, own=transforms())


def test_transforms_that_the_module_puts_before_its_optimizer_are_logged_and_resume(tmp_path):
    class Own(Plain):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            before_step(optimizer, SkipStep(max_norm=0.9), ZClip(warmup_steps=6), model=self)
            return optimizer

    whole, trainer = fitted(tmp_path, 3, Own)
    assert {"z_clip/norm", "z_clip/limit", "skipped_steps"} <= set(trainer.callback_metrics)
    _, half = fitted(tmp_path, 1, Own)
    half.save_checkpoint(tmp_path / "half.ckpt")
    resumed, _ = fitted(tmp_path, 3, Own, resume=tmp_path / "half.ckpt")
    assert torch.equal(values(resumed), values(whole))


def test_transforms_and_a_trainer_that_clips_as_well_are_refused(tmp_path):
    own = LightningCallback(Recorder, transforms=[ZClip()])
    with pytest.raises(ValueError, match=r"gradient_clip_val=0\.5 before .*transforms="):
        fitted(tmp_path, 1, Plain, own=own, gradient_clip_val=0.5)
    assert own.handles == []


def test_parameters_that_the_optimizers_do_not_have_are_named(tmp_path):
    class Half(Plain):
        def configure_optimizers(self):
            return torch.optim.AdamW(self.net[0].parameters())

    with pytest.warns(UserWarning, match="does not have 2 of the 4 .*'net.2.weight', 'net.2.bias'"):
        fitted(tmp_path, 1, Half, own=transforms())


def test_a_callback_with_transforms_serves_two_fits_of_one_optimizer(tmp_path):
    class Once(Plain):
        optimizer = None

        def configure_optimizers(self):
            self.optimizer = self.optimizer or super().configure_optimizers()
            return self.optimizer

    module, own = Once(), LightningCallback(transforms=[ZClip()])
    fitted(tmp_path, 1, lambda: module, own=own)
    first = own.handles
    fitted(tmp_path, 1, lambda: module, own=own)
    assert own.handles == first
    assert module.optimizer.state_dict()["param_groups"][0]["before_step"]["settings"]["z_clip/started"].item() == 8


class Spoiled(Module):
    """The third step has a gradient of inf."""

    def on_before_optimizer_step(self, optimizer):
        if self.trainer.global_step == 2 and not self.spoiled:
            self.spoiled = True
            self.net[0].weight.grad.fill_(torch.inf)

    def configure_optimizers(self):
        self.spoiled = False
        return Modular(self, ClipNorm(0.1, dim="global"), ZClip(max_norm=None), AdamW(0.1), nonfinite="skip")


def test_a_refused_step_has_no_numbers_of_an_earlier_one_and_no_limit_is_inf(tmp_path):
    logger = lightning.pytorch.loggers.CSVLogger(tmp_path)
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu", "logger": logger}
    trainer = lightning.Trainer(max_epochs=1, callbacks=[LightningCallback()], log_every_n_steps=1, **quiet)
    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(1))
    trainer.fit(Spoiled(), DataLoader(TensorDataset(x, x.sum(1).sin()), 8))
    with open(tmp_path / "lightning_logs" / "version_0" / "metrics.csv") as file:
        rows = list(csv.DictReader(file))
    assert [row["skipped_steps"] for row in rows] == ["0.0", "0.0", "1.0", "1.0", "1.0"]
    norms = [float(row["clip_norm/norm"]) for row in rows]
    assert [norm == norm for norm in norms] == [True, True, False, True, True]
    assert len(set(norms[:2] + norms[3:])) == 4
    assert {row["z_clip/limit"] for row in rows} == {"nan"}
