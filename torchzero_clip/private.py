"""Epsilon of what a clipper has released, the noise for a target, and a loader that draws samples as both suppose."""

import importlib
from functools import partial

from torchzero_clip.checks import at_least_one, count, finite, instance, positive
from torchzero_clip.per_sample.private.poisson import check_sample_rate
from torchzero_clip.per_sample.private.poisson import poisson_loader as poisson_loader
from torchzero_clip.per_sample.private.private_clipper import PrivateGradientClipper

try:  # import_module, because dp_accounting has no types
    _dp = importlib.import_module("dp_accounting")
    _accountant = importlib.import_module("dp_accounting.pld").PLDAccountant
except ModuleNotFoundError as error:
    text = 'pip install ".[private]" in an environment of its own, because dp-accounting needs an old attrs'
    raise ModuleNotFoundError(f"torchzero_clip.private needs the extra private: {text}", name=error.name) from error


def epsilon(clipper: PrivateGradientClipper, *, delta: float, sample_rate: float) -> float:
    """Return the epsilon at ``delta`` of all releases of a clipper, for one sample more or less.

    Each step counts with the noise multiplier that it had, also before a checkpoint from which the clipper has loaded
    its state. The result is an upper bound by privacy loss distributions, inf if a step had no noise.

    Args:
        clipper: The clipper. Its ``releases`` count.
        delta: Above 0 and below 1, usually less than one over the number of samples.
        sample_rate: That of `poisson_loader`, the same in all steps. For shuffled batches, the result is wrong.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If the value of an argument is invalid.

    Examples:
        >>> import torch
        >>> from torchzero_clip import ConstantFlatClipper, PrivateGradientClipper
        >>> model, limit = torch.nn.Linear(2, 1), ConstantFlatClipper(1.0)
        >>> clipper = PrivateGradientClipper(model, limit, noise_multiplier=1.0, expected_batch_size=50)
        >>> for _ in range(20):
        ...     max_norms, count = clipper.pre_step()
        >>> round(epsilon(clipper, delta=1e-5, sample_rate=0.05), 2)
        1.98

    Source: Koskela et al., [Computing tight differential privacy guarantees using
    FFT](https://arxiv.org/abs/1906.03049), 2020.
    """
    instance("clipper", clipper, PrivateGradientClipper)
    _check_delta(delta)
    check_sample_rate(sample_rate)
    releases = clipper.releases
    smallest = min(releases, default=0.0)
    # a loss of a step is about sample_rate / multiplier: coarser numbers would add up over a million steps. Below a
    # multiplier of 1, losses range so far that finer numbers would need gigabytes
    interval = 1e-4 if smallest < 1 else min(max(sample_rate / smallest / 10, 1e-5), 1e-4)
    accountant = _accountant(value_discretization_interval=interval)
    for multiplier, steps in releases.items():
        accountant.compose(_event(multiplier, steps, sample_rate))
    return float(accountant.get_epsilon(delta))


def noise_multiplier(*, epsilon: float, delta: float, sample_rate: float, steps: int) -> float:
    """Return the noise multiplier with which so many steps have at most the target epsilon.

    Args:
        epsilon: The target, > 0.
        delta: As in `epsilon`.
        sample_rate: As in `epsilon`.
        steps: The number of steps of the whole training.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If the value of an argument is invalid.

    Examples:
        >>> round(noise_multiplier(epsilon=3.0, delta=1e-5, sample_rate=0.05, steps=200), 3)
        1.287
    """
    positive("epsilon", epsilon)
    finite("epsilon", epsilon)
    _check_delta(delta)
    check_sample_rate(sample_rate)
    count("steps", steps)
    at_least_one("steps", steps)
    # for large targets, the bounds of the search are coarser, which takes a tenth of the time
    account = partial(_accountant, value_discretization_interval=1e-4 * min(max(epsilon, 1.0), 10.0))
    event = partial(_event, steps=steps, sample_rate=sample_rate)
    return float(_dp.calibrate_dp_mechanism(account, event, epsilon, delta, tol=1e-4))


def _check_delta(value: float) -> None:
    positive("delta", value)
    if not value < 1:
        raise ValueError(f"delta must be below 1, got {value}")


def _event(multiplier: float, steps: int, sample_rate: float) -> object:
    return _dp.SelfComposedDpEvent(_dp.PoissonSampledDpEvent(sample_rate, _dp.GaussianDpEvent(multiplier)), steps)
