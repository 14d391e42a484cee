"""Random chains on processes with different parameters, which `test_process_group` compares with one process."""

import random
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchzero_clip import (
    LR,
    SGD,
    AdaGC,
    Adam,
    AutoClip,
    Centralize,
    Chain,
    ClipByMaxEMA,
    ClipNorm,
    ClipNormByEMA,
    ClipNormGrowth,
    ClipValue,
    ClipValueByEMA,
    Modular,
    Normalize,
    NormalizeByEMA,
    SkipStep,
    WeightDecay,
    ZClip,
)
from torchzero_clip.core.chain_state import COUNTERS

NAMES, STEPS = "abcdef", 6
SHAPES = [(3,), (2, 2), (), (4,), (0,), (0, 3)]

# limits are random, because a norm that equals a limit is clipped or not, depending on rounding
LINKS: list[Callable[[random.Random], Any]] = [
    lambda r: ClipNorm(r.uniform(0.2, 2), r.choice([2, 1, 3, 0.5, "linf", "std", "mad", "sum"]), dim="global"),
    lambda r: Normalize(r.uniform(0.2, 2), r.choice([2, 1, -1, "linf", "var"]), dim="global"),
    lambda r: Centralize("global"),
    lambda r: ClipNormGrowth(mul=r.uniform(1, 2), parameterwise=False),
    lambda r: ZClip(max_norm=r.uniform(0.2, 2), warmup_steps=2),
    lambda r: AutoClip(r.uniform(20, 80)),
    lambda r: ClipNormByEMA(r.uniform(0.5, 1), tensorwise=False),
    lambda r: NormalizeByEMA(r.uniform(0.5, 1), tensorwise=False),
    lambda r: AdaGC(max_norm=r.uniform(0.2, 2), warmup_steps=r.randint(0, 3)),
    lambda r: ClipValueByEMA(0.5, ema_tfm=Normalize(r.uniform(0.2, 2), dim="global")),
    lambda r: ClipNorm(r.uniform(0.2, 2)),
    lambda r: ClipNormGrowth(mul=r.uniform(1, 2)),
    lambda r: ClipValue(r.uniform(0.2, 2)),
    lambda r: ClipByMaxEMA(r.uniform(0.2, 0.9)),
    lambda r: WeightDecay(0.1),
]
RULES: list[Callable[[], Any]] = [
    lambda: SGD(0.1, 0.5),
    lambda: Adam(0.1),
    lambda: LR(lambda step: 0.1 / (1 + step)),
]


def scoped(r: random.Random, transform: Any) -> Any:
    kind = r.random()
    if kind < 0.4:
        return transform.only(*r.sample(NAMES, r.randint(1, 3)))
    return transform.without(r.choice(NAMES)) if kind < 0.6 else transform


def links(r: random.Random, *, inside: bool = False) -> list[Any]:
    found: list[Any] = []
    for _ in range(r.randint(1, 3)):
        is_unit = not inside and r.random() < 0.25
        made = Chain(*links(r, inside=True), target="update_difference") if is_unit else r.choice(LINKS)(r)
        found.append(scoped(r, made))
    return found


def chain(r: random.Random) -> list[Any]:
    gates = [scoped(r, SkipStep(max_ratio=r.uniform(1.5, 4), beta=0.5))] if r.random() < 0.5 else []
    return [*gates, *links(r), r.choice(RULES)()]


def series(r: random.Random, generator: torch.Generator) -> list[list[Tensor | None]]:
    """Gradients, of which some are missing. In some steps one name, or all names, have none."""
    rows: list[list[Tensor | None]] = []
    for _ in range(STEPS):
        scale, share = r.choice([0.2, 1.0, 5.0]), r.choice([0.0, 0.0, 0.3, 0.7, 1.0])
        row = [torch.randn(shape, generator=generator, dtype=torch.float64) * scale for shape in SHAPES]
        rows.append([None if r.random() < share else grad for grad in row])
    return rows


def numbers(optimizer: Modular) -> dict[str, Any]:
    """The metrics, and the state of the whole chain."""
    group = optimizer.state_dict()["param_groups"][0]
    return {**optimizer.metrics(), **{k: v for k, v in group.items() if isinstance(v, Tensor) or k in COUNTERS}}


def differences(seed: int) -> str:
    """How a random training on all processes differs from one on this process alone; "" if it does not."""
    r, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    owners = [r.randrange(dist.get_world_size()) for _ in NAMES]
    options = {"fast": r.random() < 0.7, "nonfinite": r.choice(["propagate", "skip"])}
    initial = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]
    rows, state = series(r, generator), r.getstate()

    def train(names: str, group: Any) -> tuple[dict[str, Tensor], dict[str, Any], str]:
        r.setstate(state)
        transforms = chain(r)
        params = {n: nn.Parameter(value.clone()) for n, value in zip(NAMES, initial, strict=True) if n in names}
        optimizer = Modular(params.items(), transforms, process_group=group, **options)
        for row in rows:
            for name, param in params.items():
                grad = row[NAMES.index(name)]
                param.grad = None if grad is None else grad.clone()
            optimizer.step()
        return {name: param.detach() for name, param in params.items()}, numbers(optimizer), repr(optimizer)

    own = "".join(name for name, owner in zip(NAMES, owners, strict=True) if owner == dist.get_rank())
    params, found, text = train(own, dist.group.WORLD)
    expected_params, expected, _ = train(NAMES, None)
    # one process has metrics of a transform that got only tensors without elements
    empty = {k.rpartition("/")[0] for k, v in expected.items() if k.endswith("/norm") and k not in found and not v}
    expected = {k: v for k, v in expected.items() if k in found or k.rpartition("/")[0] not in empty}
    try:
        torch.testing.assert_close(params, {name: expected_params[name] for name in own}, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12, equal_nan=True, check_dtype=False)
    except AssertionError as error:
        return f"seed {seed}, {own!r} here, {text}: {error}"
    return ""


def all_differences(seeds: range) -> list[str]:
    return list(filter(None, map(differences, seeds)))
