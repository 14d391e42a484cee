"""The transforms that remember, as slow float64 loops over lists of numbers: one list per tensor."""

import math

from oracles.clipping import metric


def joined(rows):
    return [x for row in rows for x in row]


def metric_of(numbers, order):
    """The metric, its degree, and whether it is defined."""
    if len(numbers) < (2 if order in ("std", "var") else 1):
        return 0.0, 1, False
    return *metric(numbers, order), True


class NormByEMA:
    def __init__(self, beta, order, eps, joint, growth, init, normalize):
        self.beta, self.order, self.eps, self.joint = beta, order, eps, joint
        self.growth, self.init, self.normalize = growth, init, normalize
        self.emas, self.prevs, self.started = None, None, None

    def step(self, rows):
        units = [list(range(len(rows)))] if self.joint else [[i] for i in range(len(rows))]
        if self.emas is None:
            self.emas = [[0.0] * len(row) for row in rows]
            self.prevs, self.started = [None] * len(units), [False] * len(units)
        out = [list(row) for row in rows]
        for k, unit in enumerate(units):
            numbers = joined(rows[i] for i in unit)
            _, _, defined = metric_of(numbers, self.order)
            if not defined or not all(map(math.isfinite, numbers)) or not (self.started[k] or any(numbers)):
                continue
            if not self.started[k] and self.init == "update":
                for i in unit:
                    self.emas[i] = list(rows[i])
            for i in unit:
                self.emas[i] = [e + (1 - self.beta) * (u - e) for e, u in zip(self.emas[i], rows[i], strict=True)]
            m, d, _ = metric_of(joined(self.emas[i] for i in unit), self.order)
            if self.growth is not None and self.started[k]:
                allowed = max(self.prevs[k] * self.growth, 1e-6)
                if m > allowed:
                    for i in unit:
                        self.emas[i] = [e * (allowed / m) ** (1 / d) for e in self.emas[i]]
                    m = allowed
            self.prevs[k], self.started[k] = m, True
            size, _, _ = metric_of(numbers, self.order)
            if size == 0:
                continue
            denominator = max(size / max(m, self.eps), self.eps if self.normalize else 1.0)
            for i in unit:
                out[i] = [u / denominator ** (1 / d) for u in rows[i]]
        return out


class NormGrowth:
    def __init__(self, add, mul, min_value, max_decay, order, joint):
        self.add, self.mul, self.min_value, self.max_decay = add, mul, min_value, max_decay
        self.order, self.joint = order, joint
        self.prevs = None

    def step(self, rows):
        units = [list(range(len(rows)))] if self.joint else [[i] for i in range(len(rows))]
        self.prevs = self.prevs or [None] * len(units)
        out = [list(row) for row in rows]
        for k, unit in enumerate(units):
            numbers = joined(rows[i] for i in unit)
            m, d, defined = metric_of(numbers, self.order)
            prev = self.prevs[k]
            if not defined or not all(map(math.isfinite, numbers)) or (prev is None and not any(numbers)):
                continue
            if prev is None:
                self.prevs[k] = m
                continue
            allowed = math.inf if self.add is None else prev + self.add
            if self.mul is not None:
                allowed = min(allowed, (prev if self.min_value is None else max(prev, self.min_value)) * self.mul)
            if m > allowed:
                for i in unit:
                    out[i] = [u * (allowed / m) ** (1 / d) for u in rows[i]]
            slow = self.max_decay is not None and m < prev / self.max_decay
            self.prevs[k] = prev / self.max_decay if slow else min(m, allowed)
        return out


class ValueGrowth:
    def __init__(self, add, mul, min_value, max_decay):
        self.add, self.mul, self.min_value, self.max_decay = add, mul, min_value, max_decay
        self.prevs = None

    def step(self, rows):
        self.prevs = self.prevs or [None] * len(rows)
        return [self._tensor(i, row) for i, row in enumerate(rows)]

    def _tensor(self, i, row):
        if (self.add is None and self.mul is None) or not all(map(math.isfinite, row)):
            return list(row)
        if self.prevs[i] is None:
            if any(row):
                self.prevs[i] = [abs(u) for u in row]
            return list(row)
        pairs = [self._element(u, prev) for u, prev in zip(row, self.prevs[i], strict=True)]
        self.prevs[i] = [prev for _, prev in pairs]
        return [u for u, _ in pairs]

    def _element(self, u, prev):
        floor = prev if self.min_value is None else max(prev, self.min_value)
        a = abs(u) if self.add is None else min(abs(u), prev + self.add)
        b = a if self.mul is None else min(a, floor * self.mul)
        slow = self.max_decay is not None and a < floor / self.max_decay
        return math.copysign(b, u), prev / self.max_decay if slow else b


class ValueByEMA:
    def __init__(self, beta, init):
        self.beta, self.init = beta, init
        self.emas = None

    def step(self, rows):
        self.emas = self.emas or [None] * len(rows)
        return [self._tensor(i, row) for i, row in enumerate(rows)]

    def _tensor(self, i, row):
        if not all(map(math.isfinite, row)) or (self.emas[i] is None and not any(row)):
            return list(row)
        if self.emas[i] is None:
            self.emas[i] = [abs(u) if self.init == "update" else 0.0 for u in row]
        self.emas[i] = [e + (1 - self.beta) * (abs(u) - e) for e, u in zip(self.emas[i], row, strict=True)]
        return [min(max(u, -e), e) for e, u in zip(self.emas[i], row, strict=True)]
