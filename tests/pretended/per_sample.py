"""Per-sample clipping, private training and steps in the backward on the simulated device, with and without float64."""

import copy
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from pretended.device import CPU, CUDA, DEVICE, numbers, on_cuda, without_float64
from pretended.worked import Agree
from torch import Tensor, nn

from torchzero_clip import (
    SGD,
    AdamW,
    ClipNorm,
    ConstantFlatClipper,
    ConstantPerLayerClipper,
    GradSampleModuleFastGradientClipping,
    Modular,
    PerSampleGradientClipper,
    PrivateGradientClipper,
    check_per_sample,
    step_in_backward,
)


class Tied(nn.Module):
    """An embedding and a head with one weight, which have different forms of gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(11, 6), nn.LayerNorm(6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.embedding(x)))


class Sorts(nn.Module):
    """Rows in the order of values."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        order = x[:, 0].argsort()
        return self.last(self.first(x[order]).relu()[order.argsort()])


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells, self.last = nn.GRU(5, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.cells(x)[0])


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.last = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.attention(x, x, x, need_weights=False)[0])


class Split(nn.Module):
    """The first layer stays on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x.to(self.first.weight.device)).tanh().to(self.last.weight.device))


def cases() -> dict[str, tuple[nn.Module, Tensor]]:
    """Models, and inputs of five samples."""
    torch.manual_seed(0)
    tokens = torch.randint(0, 11, (5, 7))
    images = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.Conv2d(4, 6, 3, stride=2), nn.Flatten(), nn.Linear(54, 3)
    )
    return {
        "vectors": (nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3)), torch.randn(5, 5)),
        "formed": (nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)), torch.randn(5, 40, 5)),
        "Gram matrices": (nn.Sequential(nn.Linear(50, 70), nn.Tanh(), nn.Linear(70, 60)), torch.randn(5, 4, 50)),
        "images": (images, torch.randn(5, 3, 8, 8)),
        "tied": (Tied(), tokens),
        "sorted": (Sorts(), torch.randn(5, 5)),
        "recurrent": (Recurrent(), torch.randn(5, 4, 5)),
        "attention": (Attends(), torch.randn(5, 4, 8)),
        "bag": (nn.Sequential(nn.EmbeddingBag(11, 6), nn.Linear(6, 2)), tokens),
        "split": (Split(), torch.randn(5, 5)),
    }


def there(model: nn.Module) -> nn.Module:
    """A copy of a model on the device, except for what `Split` leaves on the CPU."""
    model, moved = copy.deepcopy(model), dict[int, nn.Parameter]()
    for module in model.modules():
        if isinstance(model, Split) and module is model.first:
            continue
        for name, param in module._parameters.items():
            if param is not None:
                module._parameters[name] = moved.setdefault(id(param), nn.Parameter(on_cuda(param)))
    return model


def losses(model: nn.Module, x: Tensor, size: float) -> Tensor:
    return model(x).flatten(1).square().mean(1) * size


def of_losses(model: nn.Module, x: Tensor, size: float) -> Tensor:
    clipper = PerSampleGradientClipper(model, ConstantFlatClipper(0.5))
    return clipper.backward(losses(model, x, size)).norms


def per_layer(model: nn.Module, x: Tensor, size: float) -> Tensor:
    clipper = PerSampleGradientClipper(model, ConstantPerLayerClipper([0.5]))
    return clipper.backward(losses(model, x, size)).norms


def classic(model: nn.Module, x: Tensor, size: float) -> Tensor:
    clipper = PerSampleGradientClipper(model, ConstantFlatClipper(0.5))
    losses(model, x, size).mean().backward()
    norms = clipper.clip_and_accumulate().norms
    clipper.pre_step()
    return norms


def two_passes(model: nn.Module, x: Tensor, size: float) -> Tensor:
    wrapped = GradSampleModuleFastGradientClipping(model, max_grad_norm=0.5)
    of_samples = losses(wrapped, x, size)
    of_samples.mean().backward(retain_graph=True)
    norms, factors = wrapped.get_norm_sample(), wrapped.get_clipping_coef()
    wrapped.disable_hooks()
    (of_samples * factors).mean().backward()
    return norms


def private(model: nn.Module, x: Tensor, size: float) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    clipper = PrivateGradientClipper(
        model, ConstantFlatClipper(0.5), noise_multiplier=1.0, expected_batch_size=4, generator=generator
    )
    norms = clipper.backward(losses(model, x, size)).norms
    clipper.pre_step()
    return norms


FORMS: list[Callable[[nn.Module, Tensor, float], Tensor]] = [of_losses, per_layer, classic, two_passes, private]


def clipping_is_that_of_the_cpu(agree: Agree) -> None:
    """Norms and gradients of all forms, also for huge and tiny losses, and as many waits as with float64."""
    for name, (model, x) in cases().items():
        for form in FORMS:
            for size in (1.0, 1e18, 1e-20) if form is of_losses else (1.0,):
                expected = copy.deepcopy(model)
                norms = form(expected, x, size)
                waits = []
                for device in (nullcontext(), without_float64()):
                    with device:
                        found = there(model)
                        DEVICE.counts.clear()
                        agree([form(found, on_cuda(x), size)], [norms], (name, form, size), torch.float32)
                        waits.append(len(DEVICE.counts.waits))
                    for param, other in zip(found.parameters(), expected.parameters(), strict=True):
                        agree([param.grad], [other.grad], (name, form, size), torch.float32)
                assert waits[0] == waits[1], (name, form, size, waits)


def steps_in_the_backward(agree: Agree) -> None:
    """Those of `step_in_backward`, in which gradients are freed one by one."""
    chains = [lambda: [ClipNorm(1.0), AdamW(0.1)], lambda: [ClipNorm(0.1), SGD(0.1, 0.9)]]
    for name in ("vectors", "tied", "images", "split"):
        for make in chains:
            model, x = cases()[name]
            ends = []
            for place in (CPU, CUDA):
                with without_float64():
                    chosen = copy.deepcopy(model) if place == CPU else there(model)
                    optimizer = Modular(chosen.parameters(), *make())
                    step_in_backward(optimizer)
                    for _ in range(3):
                        losses(chosen, x if place == CPU else on_cuda(x), 1.0).mean().backward()
                        optimizer.step()
                    ends.append([numbers(param) for param in chosen.parameters()])
            agree(ends[1], ends[0], name, torch.float32)


def a_check_is_refused_without_float64(_: Agree) -> None:
    """`check_per_sample` compares in float64."""
    model, x = cases()["vectors"]
    with without_float64():
        model = there(model)
        with pytest.raises(ValueError, match="check it on the CPU before you move it"):
            check_per_sample(model, on_cuda(x), lambda m, x: losses(m, x, 1.0))


CHECKS: dict[str, Callable[[Agree], None]] = {
    "per-sample clipping": clipping_is_that_of_the_cpu,
    "steps in the backward": steps_in_the_backward,
    "check_per_sample": a_check_is_refused_without_float64,
}
