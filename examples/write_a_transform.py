"""Two transforms of one's own: a formula that clips elements, and a limit of one step relative to the size of a tensor.

Their settings may differ by param group, follow a schedule and are part of checkpoints without further code.
"""

import io
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from torchzero_clip import LR, Adam, Elementwise, Modular, TensorwiseTransform, rms
from torchzero_clip.checks import positive
from torchzero_clip.types import Setting, State


class ClipToUsual(Elementwise):
    """Clips each element to a multiple of the average of its magnitudes."""

    keys = ("average",)

    def __init__(self, factor: float = 3.0, beta: float = 0.9) -> None:
        super().__init__({"factor": factor, "beta": beta})

    def start(self, x: Tensor, setting: Setting) -> tuple[Tensor]:
        """The average after the first update."""
        return (x.abs(),)

    def formula(self, x: Tensor, state: Sequence[Tensor], setting: Setting) -> tuple[Tensor, tuple[Tensor]]:
        """The clipped elements, and the new average."""
        average = state[0].lerp(x.abs(), 1 - setting["beta"])
        limit = setting["factor"] * average
        return x.clamp(-limit, limit), (average,)


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
    optimizer = Modular(groups, ClipToUsual(), Adam(), LR(0.1), LimitRelativeStep(0.05))
    print(optimizer)

    inputs = torch.randn(256, 8)
    target = inputs.prod(dim=1, keepdim=True).tanh()
    for step in range(201):
        loss = nn.functional.mse_loss(model(inputs), target)
        optimizer.zero_grad()
        (loss * (30 if step == 100 else 1)).backward()  # one spike
        before = [p.detach().clone() for p in model.parameters()]
        optimizer.step()
        moved = max(((p - b).norm() / b.norm()).item() for p, b in zip(model.parameters(), before, strict=True))
        if step % 50 == 0:
            clipped = optimizer.metrics()["clip_to_usual/clipped"].item()
            print(f"step {step:3}: loss {loss.item():.4f}, largest relative step {moved:.3f}, clipped {clipped:.1%}")
        for group in optimizer.param_groups:
            group["limit"] *= 0.99  # a schedule

    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    optimizer.load_state_dict(torch.load(file, weights_only=True))
    print("limits after loading:", [round(group["limit"], 5) for group in optimizer.param_groups])


if __name__ == "__main__":
    main()
