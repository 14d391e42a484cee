"""Rows of other packages, each with a global clip to norm 1 where it has one, and Adam with decoupled weight decay."""

import os
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from benchmarks.cases import CLIP_AND_FUSED, CLIP_EACH_AND_FUSED, grads_of, ours
from benchmarks.timing import Case, Params, Timed
from torchzero_clip import AdaGC, AdamW


def torchzero(dim: str | None) -> Callable[[Params], Timed]:
    def make(params: Params) -> Timed:
        tz: Any = import_module("torchzero")
        modules = [tz.m.ClipNorm(1, dim=dim), tz.m.Adam(), tz.m.WeightDecay(1e-2), tz.m.LR(1e-3)]
        return Timed(tz.Optimizer(params, *modules).step)

    return make


def heavyball(params: Params) -> Timed:
    package: Any = import_module("heavyball")
    clip = package.utils.global_l2norm_clip
    optimizer = package.AdamW(params, lr=1e-3, betas=(0.9, 0.999), weight_decay=1e-2, gradient_clipping=clip)
    return Timed(optimizer.step)


def adagc(params: Params) -> Timed:
    """AdaGC limits the norm of each tensor; after its warm-up it works on lists of tensors."""
    package: Any = import_module("pytorch_optimizer")
    return Timed(package.AdaGC(params, lr=1e-3, weight_decay=1e-2, warmup_steps=1).step)


def optax(params: Params) -> Timed:
    """One jitted function that may overwrite the parameters and the state; gradients are handed over before."""
    jax: Any = import_module("jax")
    package: Any = import_module("optax")
    chain = package.chain(package.clip_by_global_norm(1.0), package.adamw(1e-3, weight_decay=1e-2))

    def update(values: Any, state: Any, grads: Any) -> Any:
        updates, state = chain.update(grads, state, values)
        return package.apply_updates(values, updates), state

    def arrays(tensors: Sequence[Tensor]) -> Any:
        return jax.block_until_ready([jax.numpy.array(tensor.numpy()) for tensor in tensors])

    jitted = jax.jit(update, donate_argnums=(0, 1))
    values = arrays([param.detach() for param in params])
    state: Any = chain.init(values)
    grads: Any = None

    def before() -> None:
        nonlocal grads
        grads = arrays(grads_of(params))

    def step() -> None:
        nonlocal values, state
        values, state = jax.block_until_ready(jitted(values, state, grads))

    def extra_bytes() -> int:
        sizes = jitted.lower(values, state, grads).compile().memory_analysis()
        return sizes.temp_size_in_bytes + sizes.output_size_in_bytes - sizes.alias_size_in_bytes

    return Timed(step, before, extra_bytes)


PEERS: dict[str, list[Case]] = {
    "torchzero": [
        Case("torchzero, global clip", torchzero("global"), (CLIP_AND_FUSED,)),
        Case("torchzero, clip per tensor", torchzero(None), (CLIP_AND_FUSED, CLIP_EACH_AND_FUSED)),
    ],
    "heavyball": [Case("heavyball, compiled, global clip", heavyball, (CLIP_AND_FUSED,), most_tensors=100)],
    "optax": [Case("optax, jitted, donated buffers, global clip", optax, (CLIP_AND_FUSED,), most_tensors=1000)],
    "pytorch_optimizer": [
        Case("pytorch_optimizer AdaGC", adagc, (CLIP_AND_FUSED, CLIP_EACH_AND_FUSED)),
        Case("AdaGC(warmup_steps=1), AdamW()", ours(partial(AdaGC, warmup_steps=1), AdamW), (CLIP_AND_FUSED,)),
    ],
}


def installed_peers(device: str) -> dict[str, list[Case]]:
    """The rows of each package that is installed; prints which are missing."""
    limit_threads_of_jax()
    found: dict[str, list[Case]] = {}
    for package, cases in PEERS.items():
        if find_spec(package) is None:
            print(f"without {package}: it is not installed")
        elif package == "optax" and device != "cpu":
            print("without optax: it is measured on CPU only")
        else:
            found[package] = cases
    return found


def limit_threads_of_jax() -> None:
    """Give jax as many threads as torch has; it reads these variables when it is imported."""
    threads = torch.get_num_threads()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("NPROC", str(threads))  # the size of XLA's pool of threads
    if threads == 1:
        os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")
