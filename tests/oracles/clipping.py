"""Slow, obvious float64 versions of the definitions: plain Python loops over numbers."""

import itertools
import math

import torch


def metric(numbers, order):
    """The metric of a list of numbers, and the power of a factor by which it grows."""
    n = len(numbers)
    if order in ("std", "var"):
        mean = math.fsum(numbers) / n
        variance = math.fsum((x - mean) ** 2 for x in numbers) / (n - 1)
        return (variance, 2) if order == "var" else (math.sqrt(variance), 1)
    if order == "sum":
        return abs(math.fsum(numbers)), 1
    sizes = [abs(x) for x in numbers]
    if order == "mad":
        return math.fsum(sizes) / n, 1
    p = {"l0": 0, "l1": 1, "l2": 2, "l3": 3, "l4": 4, "linf": math.inf}.get(order, order)
    if p == 0:
        return float(sum(x != 0 for x in numbers)), 1
    if math.isinf(p):
        return (max(sizes) if p > 0 else min(sizes)), 1
    if p < 0 and 0 in sizes:
        return 0.0, 1
    scale = (max(sizes) if p > 0 else min(sizes)) or 1.0
    return scale * math.fsum((x / scale) ** p for x in sizes) ** (1 / p), 1


def clip_factor(numbers, high, order, low=None):
    m, degree = metric(numbers, order)
    if low is not None and 0 < m < low:
        return (low / m) ** (1 / degree)
    return 1.0 if m <= high else (high / m) ** (1 / degree)


def normalize_factor(numbers, value, order):
    m, degree = metric(numbers, order)
    return 1.0 if m ** (1 / degree) <= 1e-12 else (value / m) ** (1 / degree)


def clip_norm(tensors, max_norm, order=2, dim=None, inverse_dims=False, min_size=1, min_norm=None):
    """New tensors: every slice scaled to its limit."""
    high = math.inf if max_norm is None else max_norm

    def clipped(numbers):
        factor = clip_factor(numbers, high, order, min_norm)
        return [x * factor for x in numbers]

    return each_slice(tensors, clipped, dim, inverse_dims, min_size, order)


def normalize(tensors, value, order=2, dim=None, inverse_dims=False, min_size=1):
    """New tensors: every slice scaled to the value."""

    def normalized(numbers):
        factor = normalize_factor(numbers, value, order)
        return [x * factor for x in numbers]

    return each_slice(tensors, normalized, dim, inverse_dims, min_size, order)


def centralize(tensors, dim=None, inverse_dims=False, min_size=2):
    """New tensors: every slice less its mean; scalars only where all tensors are joined."""

    def centralized(numbers):
        mean = math.fsum(numbers) / len(numbers)
        return [x - mean for x in numbers]

    results = each_slice(tensors, centralized, dim, inverse_dims, min_size, 1)
    return [r if t.ndim or dim == "global" else t.clone() for t, r in zip(tensors, results, strict=True)]


def each_slice(tensors, function, dim, inverse_dims, min_size, order):
    """New tensors: every slice as the function makes it, from a list of its numbers."""
    smallest = 2 if order in ("std", "var") else 1
    if dim == "global":
        numbers = [x for tensor in tensors for x in tensor.flatten().tolist()]
        changed = function(numbers) if len(numbers) >= smallest else numbers
        flat = torch.tensor(changed, dtype=torch.float64)
        return [c.reshape(t.shape) for c, t in zip(flat.split([t.numel() for t in tensors]), tensors, strict=True)]
    return [_slices(tensor, function, dim, inverse_dims, max(min_size, smallest)) for tensor in tensors]


def _slices(tensor, function, dim, inverse_dims, smallest):
    result = tensor.clone().reshape(tensor.shape or (1,))
    listed = range(result.ndim) if dim is None else [dim] if isinstance(dim, int) else dim
    named = {d + result.ndim if d < 0 else d for d in listed}
    reduced = [d for d in range(result.ndim) if (d in named) != inverse_dims]
    if not reduced:
        return tensor.clone()
    fixed = [range(n) if d not in reduced else [slice(None)] for d, n in enumerate(result.shape)]
    for index in itertools.product(*fixed):
        numbers = result[index].flatten().tolist()
        if len(numbers) >= smallest:
            result[index] = torch.tensor(function(numbers), dtype=result.dtype).reshape(result[index].shape)
    return result.reshape(tensor.shape)


def norm_of_all(tensors, order):
    numbers = [x for tensor in tensors for x in tensor.flatten().tolist()]
    return metric(numbers, order)[0] if numbers else 0.0


def as_double(tensors):
    return [tensor.detach().to(torch.float64) for tensor in tensors]
