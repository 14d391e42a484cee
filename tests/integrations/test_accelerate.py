"""Accelerate: metrics and a recorder are found under its wrapper. `tests/test_examples.py` shows that runs resume."""

import pytest
import torch
from torch import nn

from torchzero_clip import AdamW, ClipNorm, ClipNormGrowth, Modular, Recorder, SkipStep, ZClip, before_step
from torchzero_clip.integrations import metrics, numbers

accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
pytestmark = [pytest.mark.peers, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


class Run:
    """Two micro-batches for each step."""

    def __init__(self):
        torch.manual_seed(0)
        self.accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
        model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
        optimizer = Modular(model, ClipNorm(0.1, dim="global"), ClipNormGrowth(), AdamW(0.1))
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        self.model, self.optimizer, self.schedule = self.accelerator.prepare(model, optimizer, schedule)

    def train(self, steps):
        for step in steps:
            x = torch.randn(4, 3, generator=torch.Generator().manual_seed(step))
            with self.accelerator.accumulate(self.model):
                self.accelerator.backward((self.model(x).squeeze(-1) - x.sum(1).sin()).square().mean())
                self.optimizer.step()
                self.schedule.step()
                self.optimizer.zero_grad()


class Kept(Run):
    """An optimizer of torch, with transforms before its steps."""

    def __init__(self, when):
        torch.manual_seed(0)
        self.accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
        model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(model.parameters(), 0.1)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        if when == "before":
            before_step(optimizer, SkipStep(max_norm=1.0), ZClip(warmup_steps=4, max_norm=0.5))
        self.model, self.optimizer, self.schedule = self.accelerator.prepare(model, optimizer, schedule)
        if when == "after":
            before_step(self.optimizer, SkipStep(max_norm=1.0), ZClip(warmup_steps=4, max_norm=0.5))


def test_transforms_before_the_steps_of_an_optimizer_resume(tmp_path):
    whole, half, resumed = Kept("before"), Kept("after"), Kept("after")
    whole.train(range(16))
    half.train(range(6))
    half.accelerator.save_state(str(tmp_path))
    resumed.accelerator.load_state(str(tmp_path))
    resumed.train(range(6, 16))
    assert all(map(torch.equal, resumed.model.parameters(), whole.model.parameters()))
    assert numbers(resumed.optimizer) == numbers(whole.optimizer)
    assert 0 < numbers(whole.optimizer)["skipped_steps"] < 8


def test_metrics_are_found_under_the_wrapper():
    run = Run()
    run.train(range(4))
    assert not hasattr(run.optimizer, "metrics")
    assert metrics(run.optimizer) == run.optimizer.optimizer.metrics()
    assert metrics(run.optimizer)["clip_norm/factor"].item() < 1


def test_a_recorder_is_found_under_the_wrapper_and_saved_with_a_run(tmp_path):
    whole, half, resumed = Run(), Run(), Run()
    recorders = [Recorder(run.optimizer) for run in (whole, half, resumed)]
    for run, recorder in zip((half, resumed), recorders[1:], strict=True):
        run.accelerator.register_for_checkpointing(recorder)
    whole.train(range(16))
    half.train(range(8))
    half.accelerator.save_state(str(tmp_path))
    resumed.accelerator.load_state(str(tmp_path))
    resumed.train(range(8, 16))
    expected, found = recorders[0].record(), recorders[2].record()
    assert found.steps == expected.steps == list(range(8))
    assert torch.equal(found.layer_norms, expected.layer_norms)
