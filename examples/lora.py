"""Fine-tune with LoRA from peft. The second matrices have a learning rate of their own, as in LoRA+.

A small network knows the digits of scikit-learn, and adapts to digits that stand on their heads. `*lora_B*` are the
names that peft gives to the matrices that start at zero. The frozen model has no state. LoRA+ (Hayou et al.,
https://arxiv.org/abs/2402.12354) trains them 16 times as fast.
"""

import argparse

import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from sklearn.datasets import load_digits
from torch import Tensor, nn

from torchzero_clip import AdamW, ClipNorm, Modular


def digits() -> tuple[Tensor, Tensor]:
    pixels, labels = load_digits(return_X_y=True)
    return torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(labels)


def train(model: nn.Module, optimizer: Modular, images: Tensor, labels: Tensor, steps: int) -> float:
    """Train on 1,400 images, and return the accuracy on the others."""
    for _ in range(steps):
        batch = torch.randint(1400, (32,))
        optimizer.zero_grad()
        F.cross_entropy(model(images[batch]), labels[batch]).backward()
        optimizer.step()
    with torch.no_grad():
        return (model(images[1400:]).argmax(dim=1) == labels[1400:]).float().mean().item()


def run(steps: int) -> list[tuple[str, float, int]]:
    """The accuracy on them after each way of training, and how many numbers of state it needs."""
    images, labels = digits()
    report: list[tuple[str, float, int]] = []
    for name, ratio in (("before", 0), ("LoRA", 1), ("LoRA+", 16)):
        torch.manual_seed(0)
        base = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
        train(base, Modular(base, ClipNorm(1, dim="global"), AdamW(lr=3e-3)), images, labels, steps)
        model = get_peft_model(base, LoraConfig(r=4, target_modules=["0", "2", "4"]))  # pyright: ignore[reportArgumentType]
        slow = AdamW(lr=2e-3).without("*lora_B*")
        fast = AdamW(lr=2e-3 * max(ratio, 1)).only("*lora_B*")
        optimizer = Modular(model, ClipNorm(1, dim="global"), slow, fast)
        accuracy = train(model, optimizer, images.view(-1, 8, 8).flip(1).flatten(1), labels, steps // 4 if ratio else 0)
        state = sum(x.numel() for s in optimizer.state.values() for x in s.values() if isinstance(x, Tensor) and x.ndim)
        report.append((name, accuracy, state))
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    torch.set_num_threads(1)
    for name, accuracy, state in run(parser.parse_args().steps):
        print(f"{name:8} accuracy {accuracy:6.1%}, {state:6,} numbers of state")


if __name__ == "__main__":
    main()
