"""Shapes of the parameters that are stepped."""

from collections.abc import Callable

Shapes = list[tuple[int, ...]]


def policy_like() -> Shapes:
    """10 tensors of a policy network, 9,197 parameters: they show what a step costs beside its arithmetic."""
    layers = [(64, 32), (64, 64), (32, 64), (12, 64), (1, 64)]
    return [shape for layer in layers for shape in (layer, layer[:1])]


def resnet_like() -> Shapes:
    """400 small tensors, 1.0M parameters."""
    channels = [16, 24, 32, 40]
    blocks = [[(c, c, 3, 3), (c,), (c,)] for c in (channels[i % 4] for i in range(133))]
    return [shape for block in blocks for shape in block] + [(10, 40)]


def decoder(width: int, blocks: int) -> Shapes:
    """The shapes of GPT-2, without a head of its own."""
    d = width
    block: Shapes = [(d,), (d,), (3 * d, d), (3 * d,), (d, d), (d,), (d,), (d,), (4 * d, d), (4 * d,), (d, 4 * d), (d,)]
    return [(50257, d), (1024, d), *block * blocks, (d,), (d,)]


def gpt_like() -> Shapes:
    """100 tensors of GPT-2's shapes, 51.5M parameters."""
    return decoder(512, 8)


def gpt2() -> Shapes:
    """The 148 tensors of the smallest GPT-2, 124M parameters."""
    return decoder(768, 12)


def billion() -> Shapes:
    """268 tensors of GPT-2's shapes, 1.2B parameters."""
    return decoder(2048, 22)


def big() -> Shapes:
    """4 tensors, 67M parameters."""
    return [(4096, 4096)] * 4


def equal(parameters: int, tensors: int) -> Shapes:
    """Tensors of one dimension and of equal length."""
    return [(parameters // tensors,)] * tensors


SETS: dict[str, Callable[[], Shapes]] = {
    "tiny": policy_like,
    "small": resnet_like,
    "gpt": gpt_like,
    "gpt2": gpt2,
    "big": big,
    "billion": billion,
}
