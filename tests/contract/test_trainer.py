"""The Trainer of Hugging Face saves and resumes a chain, also into another chain."""

import os
from functools import partial

import pytest
import torch
from torch import nn

from torchzero_clip import Adam, ClipNorm, ClipNormGrowth, Modular, adapt_state_dict

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


def trained(directory, steps, chain, resume=None, hook=None):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    model = Net()
    optimizer = Modular(model, *chain)
    if hook is not None:
        optimizer.register_load_state_dict_pre_hook(hook)
    arguments = transformers.TrainingArguments(
        str(directory), max_steps=steps, save_steps=4, per_device_train_batch_size=8, max_grad_norm=0, report_to=[],
        use_cpu=True, disable_tqdm=True, logging_steps=1000,
    )  # fmt: skip
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    trainer = transformers.Trainer(model, arguments, train_dataset=Data(), optimizers=(optimizer, schedule))
    trainer.train(resume_from_checkpoint=resume)
    return model, optimizer


def test_it_resumes_bit_for_bit(tmp_path):
    chain = [ClipNorm(0.1, dim="global"), ClipNormGrowth(), Adam(0.1)]
    model, optimizer = trained(tmp_path / "whole", 8, chain)
    trained(tmp_path / "parts", 4, chain)
    again, resumed = trained(tmp_path / "parts", 8, chain, resume=os.fspath(tmp_path / "parts" / "checkpoint-4"))
    for a, b in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)
    assert resumed.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]


def test_it_resumes_into_another_chain_by_a_hook(tmp_path):
    _, old = trained(tmp_path, 4, [ClipNorm(0.1), Adam(0.1)])
    hook = partial(adapt_state_dict, new=["clip_norm_growth"])
    checkpoint = os.fspath(tmp_path / "checkpoint-4")
    with pytest.raises(ValueError, match="belongs to another chain"):
        trained(tmp_path, 4, [ClipNormGrowth(), ClipNorm(9.0), Adam()], resume=checkpoint)
    _, new = trained(tmp_path, 5, [ClipNormGrowth(), ClipNorm(9.0), Adam()], resume=checkpoint, hook=hook)
    assert new.param_groups[0]["max_norm"] == 0.1
    assert next(iter(new.state.values()))["adam/step"].item() == next(iter(old.state.values()))["adam/step"].item() + 1
