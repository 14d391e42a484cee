"""Rules that turn the norms of samples into factors."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import cast

import torch
from torch import Tensor, nn
from typing_extensions import override

from torchzero_clip.checks import instance, non_negative, positive
from torchzero_clip.hints import Explained

STABILITY = 1e-6  # added to norms, as in privacy libraries: the limit still holds, and norm 0 is no special case


class NormClipper(ABC):
    """Computes, from the norms of B samples, the factors that bring their gradients to a limit.

    Subclass it for a limit of your own: `PerSampleGradientClipper` takes any subclass.

    Examples:
        >>> import torch
        >>> from itertools import repeat
        >>> from torchzero_clip import NormClipper
        >>> class Normalizing(NormClipper):  # every sample counts the same, however small its gradient
        ...     is_per_layer = False
        ...     thresholds = torch.ones(1)
        ...
        ...     def calc_clipping_factors(self, norms):
        ...         return repeat(1 / (norms[0] + 0.01))
        >>> next(Normalizing().calc_clipping_factors([torch.tensor([0.09, 0.99])]))
        tensor([10.,  1.])
    """

    @abstractmethod
    def calc_clipping_factors(self, norms: Sequence[Tensor]) -> Iterable[Tensor]:
        """Return one tensor of factors, of shape (B,), for each parameter tensor.

        Args:
            norms: Tensors of shape (B,). If `is_per_layer` is True, there is one for each parameter tensor. Otherwise
                there is one, with the norms over all parameters.
        """

    def check_count(self, count: int) -> None:  # noqa: B027  most clippers take any number
        """Raise if it has no limits for so many parameter tensors."""

    @property
    @abstractmethod
    def is_per_layer(self) -> bool:
        """True if `calc_clipping_factors` takes the norms of each parameter tensor."""

    @property
    @abstractmethod
    def thresholds(self) -> Tensor:
        """The limits as a vector, with a single limit or one for each parameter tensor."""


class _FlatClipper(NormClipper):
    """A limit for the gradient of each sample over all parameters."""

    is_per_layer = False  # pyright: ignore  (in place of the property, as users write it)

    def __init__(self, flat_value: float) -> None:
        non_negative("flat_value", flat_value)
        self.flat_value = float(flat_value)

    @abstractmethod
    def _factors(self, norms: Tensor) -> Tensor:
        """The factors of the samples."""

    @override
    def calc_clipping_factors(self, norms: Sequence[Tensor]) -> Iterable[Tensor]:
        """Return an iterator that repeats one tensor without end: all parameter tensors have the same factors.

        Args:
            norms: One tensor of shape (B,): the norms over all parameters.

        Raises:
            ValueError: If ``norms`` is not exactly one tensor of that shape.
        """
        if len(norms) != 1 or norms[0].ndim != 1:
            shapes = [tuple(norm.shape) for norm in norms]
            raise ValueError(
                f"norms must be one tensor of shape (B,) for a flat limit, got shapes {shapes}; "
                "ConstantPerLayerClipper takes one per parameter tensor"
            )
        return repeat(self._factors(norms[0]))

    @property
    @override
    def thresholds(self) -> Tensor:
        return torch.tensor([self.flat_value], dtype=torch.float64, device="cpu")


class ConstantFlatClipper(_FlatClipper, Explained):  # in this order, inspect finds the arguments
    """Scales each sample so that its gradient over all parameters has a norm of at most ``flat_value``.

        factor = min(1, flat_value / (norm + 1e-6))

    Args:
        flat_value: The limit, >= 0, in units of the gradient.

    Raises:
        ValueError: If the limit is negative or NaN.
        TypeError: If it is not a number.

    | norm | factor |
    | --- | --- |
    | 0 | 1; 0 with a limit of 0 |
    | the limit C | C / (C + 1e-6), a little below 1 |
    | inf | 0 |
    | NaN | NaN |

    Examples:
        >>> import torch
        >>> from torchzero_clip import ConstantFlatClipper
        >>> next(ConstantFlatClipper(1.0).calc_clipping_factors([torch.tensor([0.0, 0.5, 4.0])]))
        tensor([1.0000, 1.0000, 0.2500])

    Source: Abadi et al., [Deep learning with differential privacy](https://arxiv.org/abs/1607.00133), 2016.
    """

    @override
    def _factors(self, norms: Tensor) -> Tensor:
        return (self.flat_value / (norms + STABILITY)).clamp(max=1.0)

    @override
    def __repr__(self) -> str:
        return f"ConstantFlatClipper({self.flat_value})"


class ConstantPerLayerClipper(Explained, NormClipper):
    """Scales each sample so that its gradient in parameter tensor k has a norm of at most ``flat_values[k]``.

        factorₖ = min(1, flat_values[k] / (normₖ + 1e-6))

    So the contribution of one sample to the sum has an L2 norm of at most the L2 norm of the vector of limits. The
    weight and the bias of a layer are two parameter tensors. Frozen parameters have no limit.

    Args:
        flat_values: The limits, each >= 0, in the order of the trainable parameters. A single limit is used for all.

    Raises:
        ValueError: If a limit is negative or NaN, or the list is empty.
        TypeError: If a limit is not a number.

    Norms of 0, inf and NaN are treated as in `ConstantFlatClipper`.

    Examples:
        >>> import torch
        >>> from torchzero_clip import ConstantPerLayerClipper
        >>> clipper = ConstantPerLayerClipper([1.0, 2.0])
        >>> clipper.calc_clipping_factors([torch.tensor([0.0, 4.0]), torch.tensor([4.0, 4.0])])
        [tensor([1.0000, 0.2500]), tensor([0.5000, 0.5000])]

    Source: McMahan, Ramage, Talwar, Zhang, [Learning differentially private recurrent language
    models](https://arxiv.org/abs/1710.06963), 2018.
    """

    is_per_layer = True  # pyright: ignore  (in place of the property, as users write it)

    def __init__(self, flat_values: Sequence[float]) -> None:
        instance("flat_values", flat_values, Sequence, "write a list, such as [1.0]")
        if not flat_values:
            raise ValueError("flat_values must hold at least one limit")
        for i, value in enumerate(flat_values):
            non_negative(f"flat_values[{i}]", value)
        self.flat_values = [float(value) for value in flat_values]
        self._repeated = 1  # how many tensors share a single limit, which the first call tells

    @override
    def check_count(self, count: int) -> None:
        """Raise unless there is one limit, or one for each parameter tensor."""
        if len(self.flat_values) not in (1, count):
            raise ValueError(
                f"flat_values must hold 1 limit or one for each of {count} norms, got {len(self.flat_values)}: each "
                "trainable parameter has a norm"
            )

    @override
    def calc_clipping_factors(self, norms: Sequence[Tensor]) -> list[Tensor]:
        """Return the factors of each parameter tensor.

        Args:
            norms: One tensor of shape (B,) for each parameter tensor.

        Raises:
            ValueError: If there are several limits, and their number is not the number of norms.
        """
        self.check_count(len(norms))
        values = self.flat_values
        if len(values) == 1 and len(norms):
            self._repeated = len(norms)
            values = values * self._repeated
        return [(value / (norm + STABILITY)).clamp(max=1.0) for value, norm in zip(values, norms, strict=True)]

    @property
    @override
    def thresholds(self) -> Tensor:
        return torch.tensor(self.flat_values * self._repeated, dtype=torch.float64, device="cpu")

    @override
    def __repr__(self) -> str:
        return f"ConstantPerLayerClipper({self.flat_values})"


class AutomaticClipper(_FlatClipper):
    """Scales the gradient of each sample over all parameters to a norm just below ``flat_value``, however small it is.

        factor = flat_value / (norm + stability)

    So samples count about the same, and the limit acts like a factor of the learning rate: it needs no tuning.

    Args:
        flat_value: The norm that large gradients get, and the limit, >= 0.
        stability: Gradients much smaller than this stay small, > 0, in units of the gradient.

    Raises:
        ValueError: If ``flat_value`` is negative, ``stability`` is not positive, or one is NaN.
        TypeError: If one is not a number.

    | norm | factor |
    | --- | --- |
    | 0 | flat_value / stability |
    | inf | 0 |
    | NaN | NaN |

    Examples:
        >>> import torch
        >>> from torchzero_clip import AutomaticClipper
        >>> next(AutomaticClipper(1.0).calc_clipping_factors([torch.tensor([0.0, 0.09, 0.99])]))
        tensor([100.,  10.,   1.])

    Source: Bu, Wang, Zha, Karypis, [Automatic clipping: differentially private deep learning made easier and
    stronger](https://arxiv.org/abs/2206.07136), 2023 (AUTO-S).
    """

    def __init__(self, flat_value: float, *, stability: float = 0.01) -> None:
        super().__init__(flat_value)
        positive("stability", stability)
        self.stability = float(stability)

    @override
    def _factors(self, norms: Tensor) -> Tensor:
        return self.flat_value / (norms + self.stability)

    @override
    def __repr__(self) -> str:
        return f"AutomaticClipper({self.flat_value}, stability={self.stability})"


def checked_norm_clipper(value: object) -> NormClipper:
    """The value, if it is a norm clipper."""
    order = "the model first, then " if isinstance(value, nn.Module) else ""
    limit = value if isinstance(value, int | float) else 1.0
    instance("norm_clipper", value, NormClipper, f"write {order}ConstantFlatClipper({limit})")
    return cast(NormClipper, value)
