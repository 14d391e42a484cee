"""Parameters in turn on the simulated device and on the CPU, each first once: the numbers are those of the CPU."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from contract.entries import ENTRIES
from contract.training import gradients, parameters
from pretended.device import CPU, CUDA, numbers, on_cuda
from torch import Tensor, nn

from torchzero_clip import (
    SGD,
    Adam,
    AdamW,
    ClipNorm,
    Modular,
    Muon,
    Recorder,
    RMSprop,
    SkipStep,
    Wrap,
    ZClip,
    before_step,
    centralize_grads_,
    clip_grad_norm_,
    clip_grad_value_,
    clip_grads_with_norm_,
    get_total_norm,
    normalize_grads_,
)

PLACES = {CPU: torch.Tensor.clone, CUDA: on_cuda}
ORDERS = {"cpu alone": [CPU], "cuda alone": [CUDA], "cpu first": [CPU, CUDA], "cuda first": [CUDA, CPU]}
STEPS = 6
Start = Callable[[list[nn.Parameter]], Any]  # returns an optimizer, or a function that changes gradients


def joint() -> ClipNorm:
    return ClipNorm(0.5, dim="global")


def is_matrix(param: Tensor) -> bool:
    return param.ndim == 2


def modular(*make: Callable[[], Any], **options: Any) -> Start:
    return lambda params: Modular(params, *[one() for one in make], **options)


def before(make_optimizer: Start, *make: Callable[[], Any], **options: Any) -> Start:
    def start(params: list[nn.Parameter]) -> Any:
        optimizer = make_optimizer(params)
        before_step(optimizer, *[one() for one in make], **options)
        return optimizer

    return start


def recorded(make: Callable[[], Any]) -> Start:
    def start(params: list[nn.Parameter]) -> Any:
        optimizer = Modular(params, make(), AdamW())
        optimizer.recorder = Recorder(optimizer)  # pyright: ignore
        return optimizer

    return start


HOSTS: dict[str, Start] = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.01),
    "AdamW of lists": lambda params: torch.optim.AdamW(params, foreach=True),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "RMSprop": torch.optim.RMSprop,
}
FUNCTIONS: dict[str, Callable[[list[nn.Parameter]], object]] = {
    "clip each": lambda params: clip_grad_norm_(params, 0.5),
    "clip together": lambda params: clip_grad_norm_(params, 0.5, dim="global"),
    "clip values": lambda params: clip_grad_value_(params, 0.1),
    "clip in two calls": lambda params: clip_grads_with_norm_(params, 0.5, get_total_norm([p.grad for p in params])),
    "normalize": lambda params: normalize_grads_(params, 0.5),
    "centralize": lambda params: centralize_grads_(params),
    "centralize together": lambda params: centralize_grads_(params, dim="global"),
}
CHAINS: dict[str, Start] = {
    "skip": modular(lambda: SkipStep(max_ratio=10), joint, AdamW, nonfinite="skip"),
    "keep_grads": modular(joint, AdamW, keep_grads=True),
    "maximize": modular(joint, SGD, maximize=True),
    "RMSprop": modular(joint, RMSprop),
    "Muon": modular(lambda: Muon(0.1).only(is_matrix), lambda: Adam().without(is_matrix)),
    "Wrap": modular(joint, lambda: Wrap(torch.optim.Adagrad, lr=0.1)),
    "readable": modular(joint, ZClip, lambda: SGD(0.1, 0.9), fast=False),
    "recorded": recorded(joint),
}


def of_entry(make: Callable[[], Any]) -> Iterator[Start]:
    """An entry alone, and before rules and optimizers if it may stand there."""
    yield modular(make)
    for start in (modular(make, AdamW), modular(joint, make, lambda: SGD(0.1, 0.9)), before(HOSTS["AdamW"], make)):
        try:
            start([nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.zeros(2))])
        except (ValueError, TypeError):  # two rules, or a rule before an optimizer
            continue
        yield start


def trained(start: Start, order: str) -> list[Tensor]:
    """Parameters after some steps, or what a function leaves.

    In one step a gradient is not finite, and in the next one an optimizer gets none for the first parameter.
    """
    places, plain = ORDERS[order], [p.detach() for p in parameters(torch.float32)]
    params = [nn.Parameter(PLACES[places[k % len(places)]](p)) for k, p in enumerate(plain)]
    acting, left = start(params), []
    for k, row in enumerate(gradients(parameters(torch.float32), STEPS)):
        for j, (param, grad) in enumerate(zip(params, row, strict=True)):
            spoiled = grad * (torch.inf if k == 3 and param.ndim == 1 else 1.0)
            param.grad = PLACES[places[j % len(places)]](spoiled)
        if isinstance(acting, torch.optim.Optimizer):
            params[0].grad = None if k == 4 else params[0].grad
            acting.step()
        else:
            acting(params)
            left += [numbers(param.grad) for param in params]
    record = getattr(acting, "recorder", None)
    kept = [] if record is None else [record.record().norm.float(), record.record().layer_norms.float()]
    return [*(numbers(param) for param in params), *left, *kept]


def numbers_are_those_of_the_cpu(agree: Callable[..., None]) -> None:
    """Every chain, optimizer and function; ``agree`` compares two lists of tensors."""
    entries = [
        entry for entry in ENTRIES if not entry.varies and entry.name != "TrackJointNorm"
    ]  # which has one device
    starts = {f"{entry.name} {k}": start for entry in entries for k, start in enumerate(of_entry(entry.make))}
    starts |= {name: lambda params, act=act: act for name, act in FUNCTIONS.items()} | CHAINS
    starts |= {f"before {name}": before(host, joint) for name, host in HOSTS.items()}
    starts |= {f"skip before {n}": before(h, ZClip, nonfinite="skip") for n, h in HOSTS.items()}
    for name, start in starts.items():
        alone = trained(start, "cpu alone")
        for order in ("cpu first", "cuda first"):
            agree(trained(start, order), alone, (name, order), torch.float32)
