"""Train a small GPT-2 with the Trainer of Hugging Face, stop half-way, and resume with the same bits.

Two things differ from a script without torchzero_clip: the Trainer gets a `Modular` as its optimizer and
`max_grad_norm=0`, so that only the chain clips. `TrainerCallback` adds what the chain measured to the Trainer's logs,
and refuses a run in which both would clip.
"""

import argparse
import tempfile
from pathlib import Path
from pydoc_data import topics
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.utils.data import Dataset

from torchzero_clip import AdamW, ClipNorm, ClipNormGrowth, Modular
from torchzero_clip.integrations import TrainerCallback

LENGTH = 32


class Text(Dataset[dict[str, Tensor]]):
    """Pieces of the reference manual of Python, as numbers of its bytes."""

    def __init__(self) -> None:
        text = "\n".join(topics.topics[name] for name in sorted(topics.topics))
        self.bytes = torch.tensor(list(text.encode()))

    def __len__(self) -> int:
        return len(self.bytes) // LENGTH

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        piece = self.bytes[index * LENGTH : (index + 1) * LENGTH]
        return {"input_ids": piece, "labels": piece}


def train(folder: Path, steps: int, until: int, resume: bool = False) -> tuple[Any, list[dict[str, float]]]:
    """The model after ``until`` of ``steps`` steps, and the logs."""
    transformers.set_seed(0)
    config = transformers.GPT2Config(vocab_size=256, n_positions=LENGTH, n_embd=32, n_layer=2, n_head=4)
    model = transformers.GPT2LMHeadModel(config)

    optimizer = Modular(model, ClipNorm(1, dim="global"), ClipNormGrowth(), AdamW(lr=3e-3))
    schedule = transformers.get_cosine_schedule_with_warmup(optimizer, steps // 10, steps)
    arguments = transformers.TrainingArguments(
        str(folder),
        max_steps=until,
        max_grad_norm=0,  # the chain clips; by default the Trainer clips to 1.0 before the optimizer gets the gradients
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        logging_steps=max(steps // 10, 1),
        save_steps=until,
        report_to=[],  # or ["tensorboard"], which gets the metrics of the chain too
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = transformers.Trainer(model, arguments, train_dataset=Text(), optimizers=(optimizer, schedule))
    trainer.add_callback(TrainerCallback(trainer=trainer))
    trainer.remove_callback(transformers.PrinterCallback)  # prints each log in one long line
    trainer.train(resume_from_checkpoint=resume)
    return model, [log for log in trainer.state.log_history if "loss" in log]


def run(steps: int) -> tuple[list[dict[str, float]], bool]:
    """The logs of an uninterrupted run, and whether one that was interrupted ends with the same bits."""
    half = max(steps // 2, 1)
    with tempfile.TemporaryDirectory() as folder:
        whole, logs = train(Path(folder, "whole"), steps, steps)
        train(Path(folder, "parts"), steps, half)
        resumed, _ = train(Path(folder, "parts"), steps, steps, resume=True)
    return logs, all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100, help="training steps (default: %(default)s)")
    steps = max(parser.parse_args().steps, 10)
    transformers.logging.set_verbosity_error()
    logs, same = run(steps)
    print(f"\n{'step':>6}  {'loss':>6}  {'norm before clipping':>21}  {'factor':>7}")
    for log in logs:
        print(f"{log['step']:6}  {log['loss']:6.3f}  {log['clip_norm/norm']:21.3f}  {log['clip_norm/factor']:7.3f}")
    print(f"\nStopped at step {steps // 2} and resumed: the parameters are {'the same bits' if same else 'DIFFERENT'}.")


if __name__ == "__main__":
    main()
