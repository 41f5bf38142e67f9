"""Fits a model's unknowns to a few measurements: maximum a posteriori by Gauss-Newton, errors by Laplace's method.

The models of memory and speed are formulas with unknown factors, such as how much memory activations really need, or
how fast an engine really gathers. Each unknown has a standard normal prior, and the formula scales it: 0 is the prior's
value, and 1 is one standard deviation away. Unknowns that engines share carry what is learnt from one engine to the
others; unknowns of one engine describe what is particular to it. Without measurements the result is the prior.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import mul

Unknowns = Mapping[str, float]
Formula = Callable[[Unknowns], float]
"""The logarithm of the prediction, given the unknowns that are not zero."""

Factor = tuple[tuple[str, float], ...]
"""Unknowns and their standard deviations as logarithms, which together scale one term of a formula."""

_STEP = 1e-3
"""The step of an unknown for numerical derivatives. Chosen: small compared with a standard deviation, which is 1, and
large compared with rounding errors."""
_ITERATIONS = 10
"""The most Gauss-Newton iterations. Chosen: a fit usually converges sooner."""
_STRIDE = 1.5
"""The largest change of an unknown in one iteration. Chosen: far from the solution, the linearised formula goes too
far."""
_STANDS_STILL = 0.01
"""The fit has converged if no unknown changes by more. Chosen: a hundredth of a standard deviation changes no
decision."""
_LIMIT = 4.0
"""The largest absolute value of an unknown, so that an outlier does not distort everything. Chosen: the prior expects a
larger one once in 16,000."""
_FREEDOM = 6.0
"""Degrees of freedom of the Student-t noise, which gives outliers little weight. Chosen: nearly a normal distribution
in the middle, with tails for disturbed steps."""
_TRUST = 4.0
"""The prior counts as this many measurements that agree with it (`_surprise`). Chosen: with fewer, a single surprising
measurement would increase all uncertainty."""


def scale(factor: Factor, unknowns: Unknowns) -> float:
    """The number by which `factor` multiplies its term; 1 if its unknowns are 0."""
    return math.exp(deviation(factor, unknowns))


def deviation(factor: Factor, unknowns: Unknowns) -> float:
    """The sum of the factor's unknowns, each times its standard deviation."""
    total = 0.0
    for name, sigma in factor:  # the innermost loop of every fit, in which most time is spent
        if name in unknowns:
            total += sigma * unknowns[name]
    return total


def names_of(*factors: Factor) -> tuple[str, ...]:
    """The unknowns of several factors, without repetition."""
    return tuple(dict.fromkeys(name for factor in factors for name, _ in factor))


@dataclass(frozen=True, kw_only=True)
class Datum:
    """One measurement and the formula that predicts it."""

    formula: Formula
    names: tuple[str, ...]
    """The unknowns that `formula` reads."""
    target: float
    """The logarithm of what was measured."""
    noise: float
    """The expected relative error of such a measurement, including the error of the formula itself."""
    is_lower_bound: bool = False
    """The true value is at least `target`, so a formula above it already agrees."""


@dataclass(frozen=True)
class Estimate:
    """A formula's value (a logarithm) at the most probable unknowns, and its derivative for each unknown."""

    mean: float
    slopes: Mapping[str, float]

    def minus(self, other: Estimate) -> Estimate:
        """The difference of two estimates; the uncertainty of unknowns that they share cancels."""
        slopes = dict(self.slopes)
        for name, slope in other.slopes.items():
            slopes[name] = slopes.get(name, 0.0) - slope
        return Estimate(self.mean - other.mean, slopes)


@dataclass(frozen=True, kw_only=True)
class Fit:
    """The unknowns after some measurements; without arguments, the prior."""

    values: Mapping[str, float] = field(default_factory=dict)
    covariance: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    surprise: float = 1.0
    """How much further the measurements are from the prior than expected; all uncertainty is multiplied by it."""

    def estimate(self, formula: Formula, names: Sequence[str]) -> Estimate:
        """`formula` linearised around the most probable unknowns."""
        mean = formula(self.values)
        return Estimate(mean, dict(zip(names, _slopes(formula, names, self.values, mean), strict=True)))

    def deviation(self, estimate: Estimate) -> float:
        """The standard deviation of `estimate`, without measurement noise."""
        variance = 0.0
        known = [(name, slope) for name, slope in estimate.slopes.items() if slope and name in self.covariance]
        for name, slope in estimate.slopes.items():
            if name not in self.covariance:
                variance += slope * slope
        for name, slope in known:
            row = self.covariance[name]
            variance += slope * sum(row[other] * its for other, its in known)
        return self.surprise * math.sqrt(max(0.0, variance))

    def predict(self, formula: Formula, names: Sequence[str]) -> tuple[float, float]:
        """Mean and standard deviation of `formula` (a logarithm), without measurement noise."""
        estimate = self.estimate(formula, names)
        return estimate.mean, self.deviation(estimate)


def fit(data: Sequence[Datum]) -> Fit:
    """The most probable unknowns given `data`, with their covariance."""
    names = sorted({name for datum in data for name in datum.names})
    if not names:
        return Fit()
    index = {name: position for position, name in enumerate(names)}
    values = dict.fromkeys(names, 0.0)
    # Ordinary least squares first: far from the solution, every measurement looks like an outlier.
    for robust in (False, True):
        _descend(data, index, values, robust=robust)
    precision, _ = _normal_equations(data, index, values, robust=True)
    factor = _cholesky(precision)
    columns = [_solve(factor, [float(i == j) for i in range(len(names))]) for j in range(len(names))]
    covariance = {name: dict(zip(names, column, strict=True)) for name, column in zip(names, columns, strict=True)}
    return Fit(values=values, covariance=covariance, surprise=_surprise(data, values))


def _surprise(data: Sequence[Datum], values: Unknowns) -> float:
    """The Birge ratio, at least 1: the fit's total deviation divided by the number of measurements.

    If the prior is right, each measurement contributes 1 on average (chi squared); `_TRUST` more of these are added.
    """
    paid = math.fsum(value * value for value in values.values())
    number = 0
    for datum in data:
        residual = (datum.target - datum.formula(values)) / datum.noise
        if not datum.is_lower_bound or residual > 0:
            number += 1
            paid += (_FREEDOM + 1.0) * math.log1p(residual * residual / _FREEDOM)
    return max(1.0, math.sqrt((_TRUST + paid) / (_TRUST + number)))


def _descend(data: Sequence[Datum], index: Mapping[str, int], values: dict[str, float], *, robust: bool) -> None:
    """Gauss-Newton on `values`, in place."""
    for iteration in range(_ITERATIONS):
        precision, pull = _normal_equations(data, index, values, robust=robust)
        solution = _solve(_cholesky(precision), pull)
        moved = 0.0
        for name, wanted in zip(index, solution, strict=True):
            # Half steps in later iterations: the maximum over moments has kinks, across which full steps would jump.
            stride = (wanted - values[name]) * (1.0 if iteration < _ITERATIONS // 2 else 0.5)
            value = _within(_LIMIT, values[name] + _within(_STRIDE, stride))
            moved = max(moved, abs(value - values[name]))
            values[name] = value
        if moved < _STANDS_STILL:
            break


def _within(limit: float, value: float) -> float:
    """`value` limited to the range from -`limit` to `limit`."""
    return max(-limit, min(limit, value))


def _slopes(formula: Formula, names: Sequence[str], values: Unknowns, at: float) -> list[float]:
    moved = dict(values)
    slopes = []
    for name in names:
        before = moved.get(name, 0.0)
        moved[name] = before + _STEP
        slopes.append((formula(moved) - at) / _STEP)
        moved[name] = before
    return slopes


def _normal_equations(
    data: Sequence[Datum], index: Mapping[str, int], values: Unknowns, *, robust: bool
) -> tuple[list[list[float]], list[float]]:
    """Precision matrix and right-hand side of the linearised problem around `values`; the prior is the identity."""
    size = len(index)
    precision = [[float(i == j) for j in range(size)] for i in range(size)]
    pull = [0.0] * size
    for datum in data:
        predicted = datum.formula(values)
        residual = datum.target - predicted
        if datum.is_lower_bound and residual <= 0:
            continue
        slopes = _slopes(datum.formula, datum.names, values, predicted)
        weight = 1.0 / datum.noise**2
        if robust and not datum.is_lower_bound:
            weight *= (_FREEDOM + 1.0) / (_FREEDOM + residual * residual * weight)
        places = [index[name] for name in datum.names]
        wanted = residual + sum(slope * values[name] for slope, name in zip(slopes, datum.names, strict=True))
        for row, slope in zip(places, slopes, strict=True):
            scaled = weight * slope
            pull[row] += scaled * wanted
            line = precision[row]
            for column, other in zip(places, slopes, strict=True):
                line[column] += scaled * other
    return precision, pull


def _cholesky(matrix: list[list[float]]) -> list[list[float]]:
    """The lower triangular factor of a symmetric positive definite matrix."""
    factor: list[list[float]] = []
    for i, row in enumerate(matrix):
        line: list[float] = []
        for value, other in zip(row[:i], factor, strict=True):
            line.append((value - _dot(line, other)) / other[-1])
        line.append(math.sqrt(row[i] - _dot(line, line)))
        factor.append(line)
    return factor


def _solve(factor: list[list[float]], right: Sequence[float]) -> list[float]:
    """x with L·Lᵀ·x = `right`."""
    forward: list[float] = []
    for line, value in zip(factor, right, strict=True):
        forward.append((value - _dot(forward, line)) / line[-1])
    for i in range(len(forward) - 1, -1, -1):
        line = factor[i]
        forward[i] /= line[-1]
        for k in range(i):
            forward[k] -= line[k] * forward[i]
    return forward


def _dot(one: Sequence[float], other: Sequence[float]) -> float:
    """The scalar product, over the length of the shorter one."""
    return float(sum(map(mul, one, other)))
