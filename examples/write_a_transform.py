"""A transform of one's own in a dozen lines: limit how far one step may move a tensor relative to its size.

Its setting is checked, may differ by param group, follows a schedule and is part of checkpoints without further code.
"""

import io

import torch
from torch import Tensor, nn

from torchzero_clip import LR, Adam, Modular, TensorwiseTransform, rms
from torchzero_clip.checks import positive
from torchzero_clip.types import Setting, State


class LimitRelativeStep(TensorwiseTransform):
    """Scales an update so that its RMS is at most ``limit`` times that of its parameter."""

    checks = {"limit": positive}

    def __init__(self, limit: float) -> None:
        super().__init__({"limit": limit})

    def apply_tensor(
        self, tensor: Tensor, param: Tensor, grad: Tensor, loss: Tensor | float | None, state: State, setting: Setting
    ) -> Tensor:
        """Scale one update, in place."""
        allowed = setting["limit"] * rms(param).clamp(min=1e-3)
        return tensor.mul_((allowed / rms(tensor)).clamp(max=1.0))


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "limit": 0.02}]
    optimizer = Modular(groups, Adam(), LR(0.1), LimitRelativeStep(0.05))
    print(optimizer)

    inputs = torch.randn(256, 8)
    target = inputs.prod(dim=1, keepdim=True).tanh()
    for step in range(201):
        loss = nn.functional.mse_loss(model(inputs), target)
        optimizer.zero_grad()
        loss.backward()
        before = [p.detach().clone() for p in model.parameters()]
        optimizer.step()
        moved = max(((p - b).norm() / b.norm()).item() for p, b in zip(model.parameters(), before, strict=True))
        if step % 50 == 0:
            print(f"step {step:3}: loss {loss.item():.4f}, largest relative step of a tensor {moved:.3f}")
        for group in optimizer.param_groups:
            group["limit"] *= 0.99  # a schedule

    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    optimizer.load_state_dict(torch.load(file, weights_only=True))
    print("limits after loading:", [round(group["limit"], 5) for group in optimizer.param_groups])


if __name__ == "__main__":
    main()
