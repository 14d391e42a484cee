"""The rows of the tables: torch, the bare calls, and this package as a user writes it."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_ as torch_clip_grad_norm_
from torch.nn.utils import clip_grad_value_ as torch_clip_grad_value_
from torch.optim import Optimizer

from benchmarks.timing import Case, Params, Timed
from torchzero_clip import (
    SGD,
    AdaGC,
    AdamW,
    AdaptiveGradientClip,
    AutoClip,
    Centralize,
    ClipByMaxEMA,
    ClipNorm,
    ClipNormByEMA,
    ClipNormGrowth,
    ClipRMS,
    ClipValue,
    ClipValueByEMA,
    ClipValueGrowth,
    GradientStabilizer,
    Modular,
    Muon,
    Normalize,
    NormalizeByEMA,
    Recorder,
    SkipStep,
    SoftSpectralClip,
    SpikeAwareClip,
    Transform,
    ZClip,
    before_step,
    clip_grad_norm_,
    clip_grad_value_,
    normalize_grads_,
)

_torch: Any = torch  # functions that are not in torch's type stubs
Make = Callable[[Params], Timed]
Clip = Callable[[Params], object]

CLIP_AND_FUSED = "torch clip_grad_norm_, AdamW(fused=True)"
CLIP_EACH_AND_FUSED = "torch clip_grad_norm_ per tensor, AdamW(fused=True)"
CLIP_AND_FOREACH = "torch clip_grad_norm_, AdamW(foreach=True)"
GLOBAL_CLIP = 'ClipNorm(1, dim="global"), AdamW()'
COPY = "copy of the gradients"
TORCH_NORM, TORCH_EACH = "torch clip_grad_norm_(params, 1)", "torch clip_grad_norm_(param, 1) per tensor"
TORCH_VALUE = "torch clip_grad_value_(params, 1e-3)"


def clip_jointly(params: Params) -> None:
    torch_clip_grad_norm_(params, 1)


def clip_each(params: Params) -> None:
    for param in params:
        torch_clip_grad_norm_(param, 1)


def clip_values(params: Params) -> None:
    torch_clip_grad_value_(params, 1e-3)


def by_torch(clip: Clip | None, *, fused: bool) -> Make:
    """A clip, then torch's AdamW: the fused one or the foreach one."""

    def make(params: Params) -> Timed:
        optimizer = torch.optim.AdamW(params, fused=fused, foreach=not fused)

        def step() -> None:
            if clip is not None:
                clip(params)
            optimizer.step()

        return Timed(step)

    return make


def bare_calls(params: Params) -> Timed:
    """The same arithmetic in two calls; dividing by ``grad_scale`` clips inside of the fused kernel."""
    averages, squares = ([torch.zeros_like(param) for param in params] for _ in range(2))
    count = torch.zeros((), device=params[0].device)
    counts = [count] * len(params)

    @torch.no_grad()
    def step() -> None:
        grads = grads_of(params)
        norm = torch.linalg.vector_norm(torch.stack(_torch._foreach_norm(grads)))
        count.add_(1)
        _torch._fused_adamw_(
            params,
            grads,
            averages,
            squares,
            [],
            counts,
            lr=1e-3,
            beta1=0.9,
            beta2=0.999,
            weight_decay=1e-2,
            eps=1e-8,
            amsgrad=False,
            maximize=False,
            grad_scale=norm.add_(1e-6).clamp_(min=1),
        )

    return Timed(step)


def ours(*transforms: Callable[[], Transform], **options: Any) -> Make:
    return lambda params: Timed(Modular(params, *(made() for made in transforms), **options).step)


def recorded(params: Params) -> Timed:
    optimizer = Modular(params, ClipNorm(1, dim="global"), AdamW())
    Recorder(optimizer)
    return Timed(optimizer.step)


def two_groups(params: Params) -> Timed:
    """Weight decay for the matrices, none for the vectors."""
    vectors = [param for param in params if param.ndim < 2]
    matrices = [param for param in params if param.ndim >= 2]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    return Timed(Modular(groups, ClipNorm(1, dim="global"), AdamW()).step)


def scheduled(every: int) -> Make:
    """A scheduler that steps each time, and metrics that are read every so many steps."""

    def make(params: Params) -> Timed:
        optimizer = Modular(params, ClipNorm(1, dim="global"), AdamW())
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=1000)
        steps = 0

        def step() -> None:
            nonlocal steps
            optimizer.step()
            scheduler.step()
            steps += 1
            if steps % every == 0:
                for value in optimizer.metrics().values():
                    value.item()

        return Timed(step)

    return make


def function(clip: Clip) -> Make:
    return lambda params: Timed(lambda: clip(params))


def copied(params: Params) -> Timed:
    copies = [torch.empty_like(param, requires_grad=False) for param in params]
    return Timed(lambda: _torch._foreach_copy_(copies, grads_of(params)))


def grads_of(params: Params) -> list[Tensor]:
    return [param.grad for param in params if param.grad is not None]


CLIP_EACH = partial(ClipNorm, 1)
TRANSFORMS: list[Callable[[], Transform]] = [
    CLIP_EACH,
    partial(ClipValue, 1e-3),
    Normalize,
    Centralize,
    ClipNormByEMA,
    NormalizeByEMA,
    ClipNormGrowth,
    ClipValueByEMA,
    ClipValueGrowth,
]


def written(made: Callable[[], Transform]) -> str:
    return repr(made()).replace("'", '"')


def step_cases() -> list[Case]:
    """Whole optimizer steps."""
    jointly = partial(ClipNorm, 1, dim="global")
    falling = partial(ClipNorm, lambda step: 1 / (1 + 1e-5 * step), dim="global")
    makes: dict[str, Make] = {
        CLIP_AND_FUSED: by_torch(clip_jointly, fused=True),
        CLIP_EACH_AND_FUSED: by_torch(clip_each, fused=True),
        "torch clip_grad_value_, AdamW(fused=True)": by_torch(clip_values, fused=True),
        "torch AdamW(fused=True), no clip": by_torch(None, fused=True),
        CLIP_AND_FOREACH: by_torch(clip_jointly, fused=False),
        "bare _foreach_norm, _fused_adamw_(grad_scale=...)": bare_calls,
        GLOBAL_CLIP: ours(jointly, AdamW),
        "  and two param groups": two_groups,
        "  and a scheduler, metrics() every 10 steps": scheduled(10),
        "  and a scheduler, metrics() every step": scheduled(1),
        '  and nonfinite="skip"': ours(jointly, AdamW, nonfinite="skip"),
        "  and a recorder": recorded,
        "  and a limit that is a function of the step": ours(falling, AdamW),
        "  and keep_grads=True": ours(jointly, AdamW, keep_grads=True),
        "  and SkipStep(max_norm=1e6)": ours(partial(SkipStep, max_norm=1e6), jointly, AdamW),
    }
    makes |= {f"{written(transform)}, AdamW()": ours(transform, AdamW) for transform in TRANSFORMS}
    makes |= {
        "AdaGC(warmup_steps=1), AdamW()": ours(partial(AdaGC, warmup_steps=1), AdamW),
        'ClipNorm(1, dim="global"), SGD(momentum=0.9)': ours(
            partial(ClipNorm, 1, dim="global"), partial(SGD, momentum=0.9)
        ),
        "AdamW()": ours(AdamW),
    }
    by_tensor = (CLIP_EACH_AND_FUSED, f"{written(CLIP_EACH)}, AdamW()")
    bases = dict.fromkeys(by_tensor, (CLIP_AND_FUSED, CLIP_EACH_AND_FUSED))
    return [Case(name, make, bases.get(name, (CLIP_AND_FUSED,))) for name, make in makes.items()]


def transform_cases() -> list[Case]:
    """Transforms without an optimizer: gradients in, parameters updated."""
    transforms = [partial(ClipNorm, 1, dim="global"), partial(ClipNorm, 1, dim=0), *TRANSFORMS]
    return [Case(COPY, copied, (COPY,)), *(Case(written(made), ours(made), (COPY,)) for made in transforms)]


def function_cases() -> list[Case]:
    """The functions for training loops with an optimizer of their own."""
    return [
        Case(TORCH_NORM, function(clip_jointly), (TORCH_NORM,)),
        Case(
            'clip_grad_norm_(params, 1, dim="global")',
            function(lambda p: clip_grad_norm_(p, 1, dim="global")),
            (TORCH_NORM,),
        ),
        Case(TORCH_EACH, function(clip_each), (TORCH_EACH,)),
        Case("clip_grad_norm_(params, 1)", function(lambda p: clip_grad_norm_(p, 1)), (TORCH_EACH,)),
        Case("normalize_grads_(params, 1)", function(lambda p: normalize_grads_(p, 1)), (TORCH_EACH,)),
        Case(TORCH_VALUE, function(clip_values), (TORCH_VALUE,)),
        Case("clip_grad_value_(params, 1e-3)", function(lambda p: clip_grad_value_(p, 1e-3)), (TORCH_VALUE,)),
    ]


def adaptive_cases() -> list[Case]:
    """Adaptive limits before AdamW, against the clip of the same scope; the spectral one against Muon."""

    def named(made: Callable[[], Transform]) -> str:
        return f"{written(made)}, AdamW()"

    jointly, elementwise = partial(ClipNorm, 1, dim="global"), ClipValueByEMA
    bases: dict[Callable[[], Transform], list[Callable[[], Transform]]] = {
        jointly: [jointly, AutoClip, ZClip, partial(SkipStep, sigma=6.0)],
        CLIP_EACH: [CLIP_EACH, AdaGC, GradientStabilizer, ClipRMS, AdaptiveGradientClip],
        elementwise: [elementwise, partial(SpikeAwareClip, warmup_steps=1), ClipByMaxEMA],
    }
    cases = [Case(named(made), ours(made, AdamW), (named(base),)) for base, all_of in bases.items() for made in all_of]
    spectral = [
        Case("Muon of matrices", matrices_only(Muon), ("Muon of matrices",)),
        Case("SoftSpectralClip(0.1) of matrices", matrices_only(partial(SoftSpectralClip, 0.1)), ("Muon of matrices",)),
    ]
    return [*cases, *spectral]


def recorder_cases() -> list[Case]:
    """A recorder beside chains, against the same chain without one, and beside torch's own optimizer."""

    def recorded(optimizer: Optimizer, ratios_every: int = 0) -> Timed:
        Recorder(optimizer, ratios_every=ratios_every)
        return Timed(optimizer.step)

    chains: dict[str, Callable[[], list[Transform]]] = {
        "ClipNorm(1), AdamW()": lambda: [ClipNorm(1), AdamW()],
        GLOBAL_CLIP: lambda: [ClipNorm(1, dim="global"), AdamW()],
        "SkipStep(max_norm=1e6), AdamW()": lambda: [SkipStep(max_norm=1e6), AdamW()],
        "AdamW()": lambda: [AdamW()],
    }
    cases: list[Case] = []
    name = ""
    for name, chain in chains.items():
        without = Case(name, lambda params, chain=chain: Timed(Modular(params, chain()).step), (name,))
        cases += [
            without,
            Case(f"{name} with a recorder", lambda p, chain=chain: recorded(Modular(p, chain())), (name,)),
        ]
    ratios = Case(f"{name} with ratios in every step", lambda p: recorded(Modular(p, AdamW()), 1), (name,))
    fused = "torch AdamW(fused=True)"
    return [
        *cases,
        ratios,
        Case(fused, lambda params: Timed(torch.optim.AdamW(params, fused=True).step), (fused,)),
        Case(f"{fused} with a recorder", lambda p: recorded(torch.optim.AdamW(p, fused=True)), (fused,)),
    ]


def before_cases() -> list[Case]:
    """Transforms before the step of an optimizer of torch, against torch's clip before the same optimizer."""

    def before(made: Callable[[], Transform], *, fused: bool) -> Make:
        def make(params: Params) -> Timed:
            optimizer = torch.optim.AdamW(params, fused=fused, foreach=not fused)
            before_step(optimizer, made())

            def step() -> None:
                optimizer.step()

            return Timed(step)

        return make

    jointly = partial(ClipNorm, 1, dim="global")
    makes = [jointly, *TRANSFORMS, ZClip, partial(AdaGC, warmup_steps=1)]
    return [
        Case(CLIP_AND_FUSED, by_torch(clip_jointly, fused=True), (CLIP_AND_FUSED,)),
        Case("four lines that set grad_scale, AdamW(fused=True)", four_lines, (CLIP_AND_FUSED,)),
        *(
            Case(f"before_step(AdamW(fused=True), {written(m)})", before(m, fused=True), (CLIP_AND_FUSED,))
            for m in makes
        ),
        Case(CLIP_AND_FOREACH, by_torch(clip_jointly, fused=False), (CLIP_AND_FOREACH,)),
        Case(
            f"before_step(AdamW(foreach=True), {written(jointly)})", before(jointly, fused=False), (CLIP_AND_FOREACH,)
        ),
    ]


def four_lines(params: Params) -> Timed:
    """A hook that lets the fused kernel clip, without a check of anything."""
    optimizer: Any = torch.optim.AdamW(params, fused=True)

    def clip(*_: object) -> None:
        norms = _torch._foreach_norm(grads_of(params))
        optimizer.grad_scale = torch.linalg.vector_norm(torch.stack(norms)).clamp_(min=1)

    optimizer.register_step_pre_hook(clip)
    return Timed(optimizer.step)


def compiled_cases() -> list[Case]:
    """Steps in `torch.compile`, against torch's two calls and the same steps without it."""

    def compiled(transforms: Sequence[Callable[[], Transform]]) -> Make:
        def make(params: Params) -> Timed:
            optimizer = Modular(params, *(made() for made in transforms))
            for param in params:
                param.grad = torch.full_like(param, 1e-3)
            optimizer.step()  # makes the state
            return Timed(torch.compile(optimizer.step))

        return make

    def clip_and_compiled(params: Params) -> Timed:
        optimizer = torch.optim.AdamW(params, foreach=True)
        update = torch.compile(optimizer.step)

        def step() -> None:
            clip_jointly(params)
            update()

        return Timed(step)

    cases = [
        Case(CLIP_AND_FUSED, by_torch(clip_jointly, fused=True), (CLIP_AND_FUSED,)),
        Case("torch clip_grad_norm_, AdamW(foreach=True) compiled", clip_and_compiled, (CLIP_AND_FUSED,)),
    ]
    for first in (partial(ClipNorm, 1, dim="global"), partial(ClipValue, 1e-3), ClipValueByEMA):
        name = f"{written(first)}, AdamW()"
        cases.append(Case(name, ours(first, AdamW), (CLIP_AND_FUSED,)))
        cases.append(Case(f"{name}, compiled", compiled([first, AdamW]), (CLIP_AND_FUSED, name)))
    return cases


def matrices_only(made: Callable[[], Transform]) -> Make:
    """Matrices of hidden layers; no token embeddings."""
    return lambda params: Timed(Modular(params, made().only(lambda p: p.ndim == 2 and len(p) < 10_000)).step)


CASES: dict[str, Callable[[], list[Case]]] = {
    "steps": step_cases,
    "transforms": transform_cases,
    "functions": function_cases,
    "adaptive": adaptive_cases,
    "recorder": recorder_cases,
    "before": before_cases,
    "compiled": compiled_cases,
}
