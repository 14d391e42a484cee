"""Every transform and chain that goes through every contract: one line each, at the end of this file."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from torchzero_clip import (
    LR,
    SGD,
    AdaGC,
    Adam,
    AdamW,
    AdaptiveGradientClip,
    AutoClip,
    Centralize,
    Chain,
    ClipByMaxEMA,
    ClipNorm,
    ClipNormByEMA,
    ClipNormGrowth,
    ClipRMS,
    ClipValue,
    ClipValueByEMA,
    ClipValueGrowth,
    Elementwise,
    GradientStabilizer,
    Hyperball,
    Muon,
    Normalize,
    NormalizeByEMA,
    RMSprop,
    Scaling,
    SkipStep,
    SoftSpectralClip,
    SpikeAwareClip,
    TensorwiseTransform,
    Transform,
    WeightDecay,
    Wrap,
    ZClip,
    rms,
)
from torchzero_clip import norm as norm_of
from torchzero_clip.checks import number, positive, unit_interval


class LimitRMS(TensorwiseTransform):
    """An author's whole transform, as the documentation shows it."""

    checks = {"max_rms": positive}

    def __init__(self, max_rms: float, *, target="update") -> None:
        super().__init__({"max_rms": max_rms}, target=target)

    def apply_tensor(self, tensor, param, grad, loss, state, setting):
        return tensor.mul_((setting["max_rms"] / rms(tensor)).clamp(max=1.0))


class ClipByWeights(Scaling):
    """An author's limit of units, from norms of parameters."""

    checks = {"clipping": positive}

    def __init__(self, clipping: float) -> None:
        super().__init__({"clipping": clipping})

    def slice_dims(self, tensor):
        return tuple(range(1, tensor.ndim)) or (0,)

    def factors(self, measured, updates, step):
        factors = []
        for i, norms, dims in zip(measured.indices, measured.norms, measured.dims, strict=True):
            weights = norm_of(step.params[i], dim=dims, keepdim=True)
            factors.append((step.settings[i]["clipping"] * weights.clamp(min=1e-3) / norms).clamp(max=1.0))
        return measured.joined(factors)


class ClipToUsual(Elementwise):
    """An author's limit of elements, with state: a formula."""

    checks = {"factor": positive, "beta": unit_interval}
    keys = ("average",)

    def __init__(self, factor: float, beta: float) -> None:
        super().__init__({"factor": factor, "beta": beta})

    def start(self, x, setting):
        return (x.abs(),)

    def formula(self, x, state, setting):
        average = state[0].lerp(x.abs(), 1 - setting["beta"])
        limit = setting["factor"] * average
        return x.clamp(-limit, limit), (average,)


class ClipToUsualInPlace(ClipToUsual):
    """The same with a faster form. The fast way runs `change`, and the readable way the formula."""

    start, formula = ClipToUsual.start, ClipToUsual.formula

    def change(self, x, result, state, setting, at):
        (average,) = state
        size = torch.abs(x, out=at.memory("size", x))
        at = at.only_finite(size)
        at.begin_(average, size)
        at.lerp_(average, size, 1 - setting["beta"])
        limit = torch.mul(average, setting["factor"], out=at.memory("limit", x))
        at.fill_new_(limit, torch.inf)
        count = at.count(torch.gt(size, limit, out=size))
        at.clamp(x, torch.neg(limit, out=size), limit, result)
        return count


class Mul(Transform):
    """Multiplies by a number; the partner of other transforms in ``vectors.json``."""

    checks = {"other": number}

    def __init__(self, other: float, *, target="update") -> None:
        super().__init__({"other": other}, target=target)

    def apply_tensors(self, updates, step):
        return [update.mul_(setting["other"]) for update, setting in zip(updates, step.settings, strict=True)]


class EMA(TensorwiseTransform):
    """An average of what it gets; a transform with state for ``ema_tfm``."""

    checks = {"momentum": number}

    def __init__(self, momentum: float = 0.5) -> None:
        super().__init__({"momentum": momentum})

    def init_state(self, param, setting):
        return {"average": torch.zeros_like(param, dtype=torch.promote_types(param.dtype, torch.float32))}

    def apply_tensor(self, tensor, param, grad, loss, state, setting):
        return (
            state["average"]
            .lerp_(tensor.to(state["average"].dtype), 1 - setting["momentum"])
            .to(tensor.dtype, copy=True)
        )


class ClipToMedian(Scaling):
    """An author's limit with a window of past norms."""

    checks = {"factor": positive}
    keeps_statistics = True

    def __init__(self, factor: float, window: int) -> None:
        super().__init__({"factor": factor})
        self.window = window  # structure: the state depends on it

    def init_state(self, param, setting):
        new = {"dtype": torch.float64, "device": param.device}
        return {"norms": torch.zeros(self.window, **new), "count": torch.zeros((), **new)}

    def factors(self, measured, updates, step):
        counts = step.numbers("count", measured.indices)
        norms = measured.vector
        usable = step.usable(counts > 0, indices=measured.indices) & norms.isfinite()
        factors = []
        for i, *row in zip(measured.indices, norms, counts, usable, strict=True):
            past, setting = step.states[i]["norms"], step.settings[i]
            norm, count, use = (number.to(past.device) for number in row)
            known = torch.arange(self.window, device=past.device) < count
            median = torch.where(known, past, torch.nan).nanmedian()
            limit = torch.where(count > 0, setting["factor"] * median, torch.inf)
            factors.append(torch.where(use, (limit / norm).clamp(max=1.0), 1.0))
            moved = torch.cat([norm.view(1), past.narrow(0, 0, self.window - 1)])
            torch.where(use, moved, past, out=past)
        step.keep("count", counts + usable.double(), measured.indices)
        return measured.joined(factors)


class TrackJointNorm(Transform):
    """Divides by an average of the joint norm: state of the whole chain."""

    checks = {"beta": number}

    def __init__(self, beta: float = 0.5) -> None:
        super().__init__({"beta": beta})

    def init_global_state(self):
        return {"average": torch.zeros((), dtype=torch.float64), "unit": 1}

    def apply_tensors(self, updates, step):
        (norms,) = step.tools.gathered(torch.stack([norm_of(update) for update in updates]).norm())
        joint = norms.norm()
        average = step.global_state["average"]
        average.lerp_(joint, (1 - step.settings[0]["beta"]) * (joint > 0))
        return [update.div_(step.global_state["unit"] + average) for update in updates]


def is_matrix(param):
    return param.ndim >= 2


def is_2d(param):
    return param.ndim == 2 and not param.is_complex()


def warm_up(step):
    return 0.1 * (step + 1)


def later_betas(step):
    return (0.9, 0.99 if step < 2 else 0.999)


@dataclass(frozen=True)
class Entry:
    name: str
    make: Callable[[], Any]
    joint: bool = False
    """One tensor's gradient changes what happens to the others."""
    looks: bool = False
    """A step has to look at values: whether to skip it, or in which step torch's optimizer is."""
    varies: bool = False
    """Another entry goes the same way through the code, but for the arithmetic: left out of the quick run."""

    @property
    def squares_in_param_dtype(self) -> bool:
        """Whether averages of squares are kept in half precision for half-precision parameters."""
        transforms = Chain(self.make()).transforms.values()
        return any(isinstance(t, RMSprop | Wrap) or (isinstance(t, Adam) and not t.state_dtype) for t in transforms)

    @property
    def only_statistics(self) -> bool:
        """Whether all that the chain remembers are sizes of gradients, and no moments of an optimizer."""
        transforms = [node.transform for node in Chain(self.make()).nodes()]
        return any(t.keeps_statistics for t in transforms) and not any(isinstance(t, Adam | SGD) for t in transforms)

    def __str__(self) -> str:
        return self.name


ENTRIES = [
    Entry("ClipNorm", lambda: ClipNorm(0.5)),
    Entry("ClipNorm-global", lambda: ClipNorm(0.5, dim="global"), joint=True),
    Entry("ClipNorm-rows", lambda: ClipNorm(0.5, dim=0, inverse_dims=True)),
    Entry("ClipNorm-columns", lambda: ClipNorm(0.5, dim=0, min_size=2), varies=True),
    Entry("ClipNorm-l3", lambda: ClipNorm(0.5, "l3"), varies=True),
    Entry("ClipNorm-linf-rows", lambda: ClipNorm(0.5, "linf", dim=-1), varies=True),
    Entry("ClipNorm-linf-global", lambda: ClipNorm(0.5, torch.inf, dim="global"), joint=True, varies=True),
    Entry("ClipNorm-l0", lambda: ClipNorm(2, 0), varies=True),
    Entry("ClipNorm-mad", lambda: ClipNorm(0.1, "mad"), varies=True),
    Entry("ClipNorm-std", lambda: ClipNorm(0.1, "std")),
    Entry("ClipNorm-var-rows", lambda: ClipNorm(0.1, "var", dim=0), varies=True),
    Entry("ClipNorm-sum-global", lambda: ClipNorm(0.1, "sum", dim="global"), joint=True, varies=True),
    Entry("ClipValue", lambda: ClipValue(0.1)),
    Entry("Normalize", lambda: Normalize(0.5)),
    Entry("Normalize-global", lambda: Normalize(0.5, dim="global"), joint=True, varies=True),
    Entry("Normalize-linf-rows", lambda: Normalize(0.5, "linf", dim=0, inverse_dims=True), varies=True),
    Entry("Normalize-std", lambda: Normalize(0.5, "std"), varies=True),
    Entry("Centralize", lambda: Centralize()),
    Entry("Centralize-rows", lambda: Centralize(dim=0, inverse_dims=True), varies=True),
    Entry("Centralize-global", lambda: Centralize("global"), joint=True),
    Entry("ClipNormByEMA", lambda: ClipNormByEMA(0.5)),
    Entry("ClipNormByEMA-joint", lambda: ClipNormByEMA(0.5, tensorwise=False), joint=True),
    Entry(
        "ClipNormByEMA-update", lambda: ClipNormByEMA(0.9, "linf", ema_init="update", max_ema_growth=1.1), varies=True
    ),
    Entry("NormalizeByEMA", lambda: NormalizeByEMA(0.5, "mad", max_ema_growth=None)),
    Entry("NormalizeByEMA-joint-var", lambda: NormalizeByEMA(0.5, "var", tensorwise=False), joint=True, varies=True),
    Entry("ClipValueByEMA", lambda: ClipValueByEMA(0.5)),
    Entry("ClipValueByEMA-tfm", lambda: ClipValueByEMA(0.5, "update", ema_tfm=[Mul(2.0), ClipNorm(0.5), EMA()])),
    Entry("ClipNormGrowth", lambda: ClipNormGrowth()),
    Entry("ClipNormGrowth-joint", lambda: ClipNormGrowth(0.1, ord="l1", parameterwise=False), joint=True, varies=True),
    Entry("ClipNormGrowth-var", lambda: ClipNormGrowth(ord="var", max_decay=None), varies=True),
    Entry("ClipValueGrowth", lambda: ClipValueGrowth()),
    Entry("ClipValueGrowth-add", lambda: ClipValueGrowth(0.1, None, max_decay=10), varies=True),
    Entry("ClipValueGrowth-none", lambda: ClipValueGrowth(mul=None)),
    Entry("AdaptiveGradientClip", lambda: AdaptiveGradientClip(0.1)),
    Entry("AdaptiveGradientClip-columns", lambda: AdaptiveGradientClip(0.1, unit_dim=-1), varies=True),
    Entry("AutoClip", lambda: AutoClip(50.0, window=3), joint=True),
    Entry("ZClip", lambda: ZClip(max_norm=None, z_thresh=0.5, warmup_steps=2), joint=True),
    Entry("ZClip-mean", lambda: ZClip(max_norm=0.5, warmup_steps=1, clip_option="mean"), joint=True, varies=True),
    Entry("AdaGC", lambda: AdaGC(max_norm=0.5, warmup_steps=5), joint=True),
    Entry("AdaGC-at once", lambda: AdaGC(2.0, 0.5, warmup_steps=0), varies=True),
    Entry("GradientStabilizer", lambda: GradientStabilizer(), varies=True),
    Entry("SpikeAwareClip", lambda: SpikeAwareClip(2.0, 0.5, warmup_steps=2)),
    Entry("ClipByMaxEMA", lambda: ClipByMaxEMA(0.5)),
    Entry("ClipRMS", lambda: ClipRMS(0.2), varies=True),
    Entry("ClipRMS behind Adam", lambda: [Adam(), ClipRMS(0.2), LR(0.1)], varies=True),
    Entry("SoftSpectralClip", lambda: SoftSpectralClip(0.5)),
    Entry("Adam", lambda: Adam()),
    Entry("Adam-amsgrad", lambda: Adam(lr=0.1, amsgrad=True), varies=True),
    Entry("Adam-float64-state", lambda: Adam(state_dtype=torch.float64), varies=True),
    Entry("SGD", lambda: SGD()),
    Entry("SGD-momentum", lambda: SGD(0.1, 0.9, dampening=0.1)),
    Entry("SGD-nesterov", lambda: SGD(0.1, 0.9, nesterov=True), varies=True),
    Entry("RMSprop", lambda: RMSprop(momentum=0.5, centered=True)),
    Entry("Muon+Adam", lambda: [Muon(0.1).only(is_2d), Adam().without(is_2d)]),
    Entry("Hyperball", lambda: [SGD(0.1, 0.5), Hyperball().only(is_matrix)]),
    Entry("WeightDecay", lambda: WeightDecay(0.1), varies=True),
    Entry("LR", lambda: LR(0.1)),
    Entry("AdamW", lambda: AdamW(lr=0.1), varies=True),
    Entry("AdamW-fused", lambda: AdamW(lr=0.1, fused=True)),
    Entry("ClipNorm+Wrap", lambda: [ClipNorm(0.5), Wrap(torch.optim.Adam, weight_decay=0.1)], looks=True),
    Entry("schedules", lambda: [ClipNorm(warm_up), Adam(betas=later_betas), WeightDecay(warm_up), LR(0.1)]),
    Entry("LimitRMS", lambda: LimitRMS(0.2)),
    Entry("ClipByWeights", lambda: ClipByWeights(0.2)),
    Entry("ClipToUsual", lambda: ClipToUsual(0.9, 0.5)),
    Entry("ClipToUsualInPlace", lambda: ClipToUsualInPlace(0.9, 0.5), varies=True),
    Entry("ClipToMedian", lambda: ClipToMedian(0.9, 3)),
    Entry("TrackJointNorm", lambda: TrackJointNorm(), joint=True),
    Entry("ClipNorm+AdamW", lambda: [ClipNorm(0.5, dim="global"), AdamW(), LR(0.1)], joint=True),
    Entry("L2+ClipValue+SGD", lambda: [WeightDecay(0.1), ClipValue(0.1), SGD(0.1, 0.9)], varies=True),
    Entry("Adam+two clips", lambda: [ClipNorm(0.5), Adam(), LR(0.1), ClipNorm(0.02)]),
    Entry("statistics+Adam", lambda: [ClipNorm(0.5), ClipNormGrowth(), ClipValueByEMA(0.5), Adam(), LR(0.1)]),
    Entry("WeightDecay+ClipNormByEMA", lambda: [WeightDecay(0.1), ClipNormByEMA(0.5), SGD(0.1, 0.5)], varies=True),
    Entry("unit chain of statistics", lambda: Chain(ClipNormGrowth(), ClipValueGrowth(), target="update_difference")),
    Entry("target grad statistics", lambda: [ClipNormByEMA(0.5, target="grad"), SGD(0.1, 0.5)], varies=True),
    Entry(
        "scopes",
        lambda: [
            ClipNorm(0.5, dim="global").only(is_matrix),
            ClipNormGrowth().without(is_matrix),
            SGD(momentum=0.5).only(is_matrix),
            Adam().without(is_matrix),
            LR(0.1),
        ],
        joint=True,
    ),
    Entry(
        "scoped unit", lambda: [Chain(ClipNormByEMA(0.5), ClipValue(0.1), target="grad").only(is_matrix), SGD(0.1, 0.5)]
    ),
    Entry("SkipStep", lambda: [SkipStep(1e30, max_ratio=1e30), ClipNorm(0.5), SGD(0.1, 0.5)], True, looks=True),
    Entry("SkipStep-sigma", lambda: [SkipStep(sigma=1e30, window=4), ClipNorm(0.5), SGD(0.1, 0.5)], True, looks=True),
    Entry("unit chain", lambda: Chain(LimitRMS(0.2), SGD(momentum=0.5), target="update_difference")),
    Entry("target grad", lambda: [Mul(2.0), ClipNorm(0.5, target="grad"), SGD(0.1, 0.5)]),
    Entry("target params", lambda: [Adam(0.1), ClipNorm(0.5, target="params_direct")]),
]
