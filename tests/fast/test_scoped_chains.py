"""Random chains whose scopes cross: the fast way of a step equals the readable one."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from contract.entries import ClipToUsual, ClipToUsualInPlace
from fast.comparison import Run, assert_same
from torch import nn

from torchzero_clip import (
    LR,
    SGD,
    Adam,
    AdamW,
    Centralize,
    Chain,
    ClipByMaxEMA,
    ClipNorm,
    ClipNormByEMA,
    ClipNormGrowth,
    ClipValue,
    ClipValueByEMA,
    ClipValueGrowth,
    Modular,
    Muon,
    Normalize,
    SpikeAwareClip,
    Transform,
    WeightDecay,
)

SHAPES = {"a": (2,), "b": (3, 2), "c": (4,), "d": (), "e": (2, 3)}
MATRICES = ("b", "e")
TRANSFORMS: Sequence[Callable[[random.Random], Transform]] = (
    lambda r: ClipNorm(r.choice([0.3, 1.0, 9.0]), dim=r.choice([None, None, "global", 0])),
    lambda r: ClipNorm(r.choice([0.3, 1.0, 9.0])),
    lambda r: ClipValue(r.choice([0.2, 0.5])),
    lambda r: ClipValue(r.choice([0.2, 0.5])),
    lambda r: Normalize(r.choice([0.5, 2.0])),
    lambda r: Centralize(),
    lambda r: ClipNormGrowth(mul=1.1),
    lambda r: ClipNormByEMA(0.7, tensorwise=r.random() < 0.7),
    lambda r: ClipValueByEMA(0.7, r.choice(["zeros", "update"])),
    lambda r: ClipValueGrowth(mul=1.1),
    lambda r: SpikeAwareClip(1.5, 0.5, warmup_steps=1),
    lambda r: ClipByMaxEMA(0.5),
    lambda r: r.choice([ClipToUsual, ClipToUsualInPlace])(0.9, 0.5),
)


def some(r: random.Random) -> list[str]:
    return r.sample(sorted(SHAPES), r.choice([1, 1, 2]))


def scoped(transform: Any, r: random.Random) -> Any:
    choice = r.random()
    if choice < 0.15:
        return transform
    return transform.only(*some(r)) if choice < 0.85 else transform.without(*some(r))


ENDS: Sequence[Callable[[random.Random], list[Any]]] = (
    lambda r: [],
    lambda r: [SGD(0.5)],
    lambda r: [AdamW(0.1)],
    lambda r: [Muon(0.1).only(*MATRICES), AdamW(0.1).without(*MATRICES)],
    lambda r: (lambda names: [SGD(0.5, 0.9).only(*names), Adam(0.1).without(*names)])(some(r)),
    lambda r: [Adam(), scoped(WeightDecay(0.1), r), scoped(ClipNorm(0.5), r), LR(0.3)],
)


def random_chain(r: random.Random) -> list[Any]:
    made = [scoped(r.choice(TRANSFORMS)(r), r) for _ in range(r.randint(4, 7))]
    if r.random() < 0.3:
        cut = r.randrange(len(made) - 1)
        target = r.choice(["update", "update", "update_difference"])
        made[cut : cut + 2] = [scoped(Chain(*made[cut : cut + 2], target=target), r)]
    return [*made, *r.choice(ENDS)(r)]


def compare(make: Callable[[], Sequence[Any]], grads: Sequence[dict[str, Any]], what: str = "", **options: Any) -> None:
    values = {name: torch.ones(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
    fast, readable = (
        Run(make, {name: nn.Parameter(value.clone()) for name, value in values.items()}, fast=fast, **options)
        for fast in (True, False)
    )
    for row in grads:
        for run in (fast, readable):
            run.step(list(row.values()))
    assert_same(fast, readable, 1e-9, 1e-9, what)


def compare_random(seed: int) -> None:
    r, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    options = {"maximize": r.random() < 0.2, "keep_grads": r.random() < 0.2}
    grads = [
        {name: torch.randn(shape, generator=generator, dtype=torch.float64) * scale for name, shape in SHAPES.items()}
        for scale in (1.0, 3.0, 0.5)
    ]
    state = r.getstate()

    def make() -> list[Any]:
        r.setstate(state)
        return random_chain(r)

    compare(make, grads, f"seed {seed}: {make()}: ", **options)


def is_vector(param: Any) -> bool:
    return param.ndim == 1


CROSSING: dict[str, Callable[[], list[Any]]] = {
    "a value clip between norm clips": lambda: [
        ClipNorm(1).only(is_vector),
        ClipValue(0.5),
        ClipNorm(9).only(*MATRICES),
        SGD(1),
    ],
    "a value clip that joins two norm clips": lambda: [
        ClipNorm(1).only("c"),
        ClipNorm(1).only("a", "b"),
        ClipValue(0.5).only("b", "c"),
        ClipNorm(0.3).only("a"),
        SGD(1),
    ],
    "statistics beside Muon": lambda: [
        Normalize(),
        ClipValueGrowth().without(*MATRICES),
        Muon().only(*MATRICES),
        AdamW().without(*MATRICES),
    ],
}


@pytest.mark.parametrize("make", CROSSING.values(), ids=CROSSING)
def test_chains_of_crossing_scopes(make):
    grads = [{name: torch.full(shape, 3.0 + k) for k, (name, shape) in enumerate(SHAPES.items())}] * 3
    compare(make, grads)


def test_operations_keep_their_order_across_scopes():
    params = {name: nn.Parameter(torch.zeros(2)) for name in "abc"}
    optimizer = Modular(list(params.items()), *CROSSING["a value clip that joins two norm clips"]())
    for param in params.values():
        param.grad = torch.tensor([9.0, 12.0])
    optimizer.step()
    assert params["a"].tolist() == pytest.approx([-0.18, -0.24])
    assert params["b"].tolist() == pytest.approx([-0.5, -0.5])
    assert params["c"].tolist() == pytest.approx([-0.5, -0.5])


@pytest.mark.quick_cases(1)
@pytest.mark.filterwarnings("ignore:.*:UserWarning")
@pytest.mark.parametrize("block", [*range(10), *(pytest.param(k, marks=pytest.mark.slow) for k in range(10, 14))])
def test_random_chains_of_crossing_scopes(block):
    for seed in range(10 * block, 10 * block + 10):
        compare_random(seed)
