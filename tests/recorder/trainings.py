"""Small trainings of two processes with a recorder, for `test_processes`: they save, and may be killed and resumed."""

import importlib
import itertools
import os
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from recorder.launches import Place
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from torchzero_clip import AdamW, ClipNorm, ClipNormGrowth, Modular, Recorder

STEPS, SAVED, KILLED = 8, 4, 6
"""How many steps a run has, and after which ones it is saved and killed."""
RECORD = {"flush_every": 1, "ratios_every": 3}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        found = self.layers(x).squeeze(-1)
        return {"loss": nn.functional.mse_loss(found, labels), "logits": found}


class Data(torch.utils.data.Dataset):
    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        x = torch.randn(3, generator=torch.Generator().manual_seed(i))
        return {"x": x, "labels": x.sum().sin()}


def chain(model: nn.Module) -> Modular:
    return Modular(model, ClipNorm(0.1, dim="global"), ClipNormGrowth(), AdamW(0.1))


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def norms_by_hand(optimizer: Any) -> Tensor:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    return torch.stack([whole(param.grad).double().square().sum().sqrt() for param in params])


def result(model: nn.Module, norms: list[Tensor], recorder: Recorder | None) -> dict[str, Any]:
    """What is compared: parameters, the norms of the gradients of this process, and what the recorder keeps."""
    found = {"params": [whole(param.detach()) for param in model.parameters()], "norms": torch.stack(norms)}
    return found if recorder is None else found | {"record": recorder.record()}


def hugging_face(place: Place, folder: Path, is_resumed: bool, is_own: bool) -> dict[str, Any]:
    """Five steps are an epoch, so that the checkpoint and the kill are in the middle of one."""
    transformers = importlib.import_module("transformers")
    integrations = importlib.import_module("torchzero_clip.integrations")
    norms: list[Tensor] = []

    class Watch(transformers.TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            norms.append(norms_by_hand(kwargs["optimizer"]))

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == KILLED:
                place.wait_for_the_kill()

    arguments = transformers.TrainingArguments(
        str(folder),
        max_steps=STEPS,
        save_steps=SAVED,
        logging_steps=1,
        per_device_train_batch_size=4,
        max_grad_norm=0,
        learning_rate=0.1,
        ddp_backend="gloo",
        use_cpu=True,
        disable_tqdm=True,
        report_to=[],
    )
    model = Net()
    own = integrations.TrainerCallback(partial(Recorder, path=folder / "run.jsonl", **RECORD))
    optimizer = None if is_own else chain(model)
    schedule = None if is_own else torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    trainer = transformers.Trainer(
        model, arguments, train_dataset=Data(40), optimizers=(optimizer, schedule), callbacks=[own, Watch()]
    )
    trainer.train(resume_from_checkpoint=str(folder / f"checkpoint-{SAVED}") if is_resumed else None)
    assert isinstance(trainer.model_wrapped, nn.parallel.DistributedDataParallel)
    logged = {log["step"]: log["loss"] for log in trainer.state.log_history if "loss" in log}
    return result(model, norms, own.recorder) | {"logged": logged}


def lightning(place: Place, folder: Path, resumed_from: str | None, records: bool) -> dict[str, Any]:
    """Three epochs of four steps. Checkpoints are saved at the ends of epochs, and every three steps."""
    trainers = importlib.import_module("lightning.pytorch")
    integrations = importlib.import_module("torchzero_clip.integrations")
    norms: list[Tensor] = []

    class Module(trainers.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def training_step(self, batch: Any, index: int) -> Tensor:
            return self.net(**batch)["loss"]

        def configure_optimizers(self) -> Any:
            optimizer = chain(self)
            return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)}

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            norms.append(norms_by_hand(optimizer))

        def on_train_batch_end(self, *args: Any) -> None:
            assert isinstance(self.trainer.strategy.model, nn.parallel.DistributedDataParallel)
            if self.global_step == KILLED + 1:
                place.wait_for_the_kill()

    saves = partial(trainers.callbacks.ModelCheckpoint, folder, auto_insert_metric_name=False, save_top_k=-1)
    callbacks = [
        saves(filename="end-of-{epoch}", save_on_train_epoch_end=True),
        saves(filename="step-{step}", every_n_train_steps=3),
    ]
    if records:
        callbacks.append(integrations.LightningCallback(partial(Recorder, path=folder / "run.jsonl", **RECORD)))
    module = Module()
    trainer = trainers.Trainer(
        default_root_dir=folder,
        max_epochs=3,
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        callbacks=callbacks,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    batches = torch.utils.data.DataLoader(Data(32), 4, shuffle=True)
    trainer.fit(module, batches, ckpt_path=None if resumed_from is None else folder / resumed_from, weights_only=False)
    return result(module, norms, callbacks[-1].recorder if records else None)


def accelerate(place: Place, folder: Path, is_resumed: bool) -> dict[str, Any]:
    accelerator = importlib.import_module("accelerate").Accelerator(cpu=True)
    model = Net()
    wrapped, optimizer = accelerator.prepare(model, chain(model))
    assert isinstance(wrapped, nn.parallel.DistributedDataParallel)
    recorder = Recorder(optimizer, path=folder / "run.jsonl", **RECORD)
    accelerator.register_for_checkpointing(recorder)
    if is_resumed:
        accelerator.load_state(str(folder / "saved"))
    norms: list[Tensor] = []
    for step in range(SAVED if is_resumed else 0, STEPS):
        loss = wrapped(**batch(step, place.rank))["loss"]
        accelerator.backward(loss)
        norms.append(norms_by_hand(optimizer))
        recorder.report_loss(loss)
        optimizer.step()
        optimizer.zero_grad()
        if step + 1 == SAVED:
            accelerator.save_state(str(folder / "saved"))
        if step + 1 == KILLED:
            place.wait_for_the_kill()
    recorder.close()
    return result(model, norms, recorder)


def sharded(place: Place, folder: Path, is_resumed: bool, flush_every: int) -> dict[str, Any]:
    """FSDP2 by hand. The recorder exists before torch takes a step to find out what the state looks like."""
    model = Net()
    fully_shard(model)
    optimizer = chain(model)
    recorder = Recorder(optimizer, path=folder / "run.jsonl", **(RECORD | {"flush_every": flush_every}))
    if is_resumed:
        recorder.load_state_dict(torch.load(folder / "recorder.pt"))
        state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        dcp.load(state, checkpoint_id=folder / "saved")
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    norms: list[Tensor] = []
    for step in range(SAVED if is_resumed else 0, STEPS):
        loss = model(**batch(step, place.rank))["loss"]
        loss.backward()
        norms.append(norms_by_hand(optimizer))
        recorder.report_loss(loss)
        optimizer.step()
        optimizer.zero_grad()
        if step + 1 == SAVED:
            state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
            dcp.save(state, checkpoint_id=folder / "saved")
            if place.rank == 0:
                torch.save(recorder.state_dict(), folder / "recorder.pt")
            dist.barrier()
        if step + 1 == KILLED:
            place.wait_for_the_kill()
    recorder.close()
    return result(model, norms, recorder)


def endless(place: Place, path: Path, taken: Path) -> None:
    """Record steps until the process is killed, and write how many steps were taken to a file of 8 bytes."""
    model = Net()
    optimizer = chain(model)
    recorder = Recorder(optimizer, path=path, flush_every=1)
    inputs = batch(0, 0)
    with open(taken, "wb", buffering=0) as file:
        for step in itertools.count(1):
            loss = model(**inputs)["loss"]
            loss.backward()
            recorder.report_loss(loss)
            optimizer.step()
            optimizer.zero_grad()
            os.pwrite(file.fileno(), step.to_bytes(8), 0)
            if step == 3:
                (place.folder / f"{place.rank}.reached").touch()


def batch(step: int, rank: int) -> dict[str, Tensor]:
    data = Data(64)
    rows = [data[8 * step + 4 * rank + i] for i in range(4)]
    return {key: torch.stack([row[key] for row in rows]) for key in ("x", "labels")}
