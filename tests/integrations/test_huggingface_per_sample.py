"""The Trainer of Hugging Face clips per sample with the `training_step` of the page, and then equals a plain loop."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from torchzero_clip import ConstantFlatClipper, PerSampleGradientClipper

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed")
pytestmark = [pytest.mark.peers, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

PAGE = Path(__file__).parents[2] / "docs" / "per_sample_norms.md"
LIMIT, LR, SAMPLES = 0.5, 0.1, 26


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return SAMPLES

    def __getitem__(self, i):
        x = torch.randn(3, generator=torch.Generator().manual_seed(i), dtype=torch.float64)
        return {"x": x, "labels": x.sum().sin()}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).double()

    def forward(self, x, labels=None):
        return {"logits": self.layers(x).squeeze(-1)}


def of_the_page():
    """The class that the page shows."""
    (block,) = re.findall(r"^```py\n(class PerSampleTrainer.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    names = {"F": F, "PerSampleGradientClipper": PerSampleGradientClipper, "transformers": transformers}
    exec(compile(block, str(PAGE), "exec"), names)
    return names["PerSampleTrainer"]


class InOrder(of_the_page()):
    def _get_train_sampler(self, *args):
        return torch.utils.data.SequentialSampler(self.train_dataset)


def by_loop(accumulation, epochs):
    """One backward for each sample, and a step after each group of batches, of which the last may be smaller."""
    model, data = Net(), [Data()[i] for i in range(SAMPLES)]
    params = list(model.parameters())
    for _ in range(epochs):
        for start in range(0, SAMPLES, 4 * accumulation):
            group = data[start : start + 4 * accumulation]
            sums = [torch.zeros_like(p) for p in params]
            for sample in group:
                loss = (model(sample["x"][None])["logits"][0] - sample["labels"]) ** 2
                grads = torch.autograd.grad(loss, params)
                norm = torch.stack([g.square().sum() for g in grads]).sum().sqrt()
                for total, grad in zip(sums, grads, strict=True):
                    total += grad * min(1.0, LIMIT / (norm.item() + 1e-6))
            with torch.no_grad():
                for p, total in zip(params, sums, strict=True):
                    p -= LR * total / len(group)
    return model


@pytest.mark.parametrize("accumulation", [1, 3])
def test_a_trainer_with_its_own_training_step_equals_a_loop(tmp_path, accumulation):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    arguments = transformers.TrainingArguments(
        str(tmp_path),
        per_device_train_batch_size=4,
        gradient_accumulation_steps=accumulation,
        num_train_epochs=2,
        max_grad_norm=0,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
    )
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    trainer = InOrder(
        model,
        arguments,
        train_dataset=Data(),
        optimizers=(optimizer, schedule),
        norm_clipper=ConstantFlatClipper(LIMIT),
    )
    trainer.train()
    for p, expected in zip(model.parameters(), by_loop(accumulation, 2).parameters(), strict=True):
        torch.testing.assert_close(p, expected, rtol=1e-9, atol=1e-11)
        assert p.grad is None or not p.grad.any()
    losses = [log["train_loss"] for log in trainer.state.log_history if "train_loss" in log]
    assert 0 < losses[0] < 1
