"""timm: layer decay, its schedulers, its registry, its clipping, and its checkpoints."""

import pytest
import torch
from clients.runs import SPIKE, weights

from torchzero_clip import (
    AdamW,
    AdaptiveGradientClip,
    ClipNorm,
    ClipNormByEMA,
    Modular,
    Recorder,
    SkipStep,
    ZClip,
    before_step,
)

timm = pytest.importorskip("timm", reason="timm is not installed")
from timm.optim import OptimInfo, create_optimizer_v2  # noqa: E402
from timm.optim._optim_factory import default_registry  # noqa: E402
from timm.scheduler import CosineLRScheduler  # noqa: E402
from timm.utils import CheckpointSaver, dispatch_clip_grad  # noqa: E402

pytestmark = [pytest.mark.clients, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

LIMIT = 0.1
GATES = [SkipStep(max_ratio=20.0), ZClip(warmup_steps=4), ClipNormByEMA()]
DECAYS = {"weight_decay": 0.05, "layer_decay": 0.7}
default_registry.register(OptimInfo("clipped", Modular.of(ClipNorm(LIMIT, dim="global"), AdamW()), has_betas=True))


def with_transforms(optimizer, *transforms):
    before_step(optimizer, *transforms)
    return optimizer


OPTIMIZERS = {
    "timm": lambda model: create_optimizer_v2(model, "adamw", lr=1e-2, **DECAYS),
    "groups": lambda model: Modular(
        OPTIMIZERS["timm"](model).param_groups, ClipNorm(LIMIT, dim="global"), AdamW(lr=1e-2)
    ),
    "registry": lambda model: create_optimizer_v2(model, "clipped", lr=1e-2, **DECAYS),
    "handle": lambda model: with_transforms(OPTIMIZERS["timm"](model), ClipNorm(LIMIT, dim="global")),
    "gate": lambda model: with_transforms(
        OPTIMIZERS["timm"](model), SkipStep(max_ratio=20.0), ZClip(warmup_steps=4), ClipNormByEMA()
    ),
    "chain with a gate": lambda model: Modular(OPTIMIZERS["timm"](model).param_groups, GATES, AdamW(lr=1e-2)),
}


class Run:
    """Epochs of two steps, as `train.py` of timm trains them."""

    def __init__(self, way, clip=None):
        torch.manual_seed(0)
        size = {"img_size": 16, "patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2, "num_classes": 3}
        self.model = timm.create_model("vit_tiny_patch16_224", **size).double()
        self.optimizer = OPTIMIZERS[way](self.model)
        self.schedule = CosineLRScheduler(self.optimizer, t_initial=8, warmup_t=2, warmup_lr_init=1e-4)
        self.clip, self.rates = clip, []

    def train(self, epochs):
        for epoch in epochs:
            self.schedule.step(epoch)
            for step in (2 * epoch, 2 * epoch + 1):
                generator = torch.Generator().manual_seed(step)
                images = torch.randn(4, 3, 16, 16, generator=generator, dtype=torch.float64)
                self.model.zero_grad()
                loss = torch.nn.functional.cross_entropy(self.model(images), torch.tensor([0, 1, 2, step % 3]))
                (loss * (1e3 if step == SPIKE else 1)).backward()
                if self.clip is not None:
                    dispatch_clip_grad(self.model.parameters(), *self.clip)
                self.optimizer.step()
            self.rates.append([group["lr"] for group in self.optimizer.param_groups])


@pytest.mark.parametrize("way", ["groups", "registry", "handle"])
def test_layer_decay_trains_as_with_the_clip_of_timm(way):
    expected, found = Run("timm", (LIMIT, "norm")), Run(way)
    start = weights(found.model)
    expected.train(range(8))
    found.train(range(8))
    assert found.rates == expected.rates
    assert len({rate for rates in found.rates for rate in rates}) > 16  # each layer has its own
    torch.testing.assert_close(weights(found.model), weights(expected.model), rtol=0, atol=1e-7)
    assert (weights(found.model) - start).norm().item() > 0.1


def test_adaptive_gradient_clipping_is_that_of_timm():
    expected, found = Run("timm", (0.01, "agc")), Run("timm")
    handle = before_step(found.optimizer, AdaptiveGradientClip(0.01))
    expected.train(range(4))
    found.train(range(4))
    torch.testing.assert_close(weights(found.model), weights(expected.model), rtol=1e-5, atol=1e-6)
    assert handle.metrics()["adaptive_gradient_clip/clipped"].item() > 0


@pytest.mark.parametrize("way", ["registry", "gate", "chain with a gate"])
def test_a_run_resumes_from_a_checkpoint_of_timm(way, tmp_path):
    whole, half, resumed = Run(way), Run(way), Run(way)
    recorder = Recorder(resumed.optimizer)
    whole.train(range(8))
    half.train(range(4))
    saver = CheckpointSaver(half.model, half.optimizer, checkpoint_dir=str(tmp_path), recovery_dir=str(tmp_path))
    saver.save_checkpoint(3)
    start = timm.models.resume_checkpoint(resumed.model, str(tmp_path / "last.pth.tar"), resumed.optimizer)
    resumed.train(range(start, 8))
    assert torch.equal(weights(resumed.model), weights(whole.model))
    assert resumed.rates == whole.rates[4:]
    assert ["skip_step" in reason for reason in recorder.record().reasons].count(True) == ("gate" in way)
