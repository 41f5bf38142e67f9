"""Learns a model's unknowns from a few measurements: maximum a posteriori by Gauss-Newton, errors by Laplace.

Both models of this package, memory and speed, are a formula with unknown factors: how much the activations really take,
how fast this engine really gathers. Each unknown is a standard normal number that the formula scales itself, so zero is
the prior and one is a surprise of one standard deviation. Unknowns shared by all engines carry what is learnt on one
engine to the others; unknowns of one engine take what is particular to it. With no measurement the result is the prior.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import mul

Unknowns = Mapping[str, float]
Formula = Callable[[Unknowns], float]
"""The logarithm of what is predicted, given the unknowns that are not zero."""

Factor = tuple[tuple[str, float], ...]
"""Unknowns and their standard deviations, as logarithms: together they scale one term of a formula."""

_STEP = 1e-3
"""Of an unknown, to take a formula's slope. Chosen: small beside a standard deviation, which is 1, and large beside
rounding."""
_ITERATIONS = 10
"""At most, of Gauss-Newton. Chosen: a fit mostly ends sooner, as soon as the unknowns stand still."""
_STRIDE = 1.5
"""How far an unknown moves at once, at most. Chosen: from far away a linearised formula points too far."""
_STANDS_STILL = 0.01
"""An unknown that moves by less stands still. Chosen: a hundredth of a standard deviation changes no decision."""
_LIMIT = 4.0
"""No unknown is believed to be further out: a freak measurement must not bend everything else. Chosen: the prior
expects an unknown beyond it once in 16,000."""
_FREEDOM = 6.0
"""Degrees of freedom of the Student-t noise: a measurement that fits nothing else loses its weight. Chosen: nearly a
normal distribution in its middle, with tails that forgive a disturbed step."""
_TRUST = 4.0
"""Measurements that count as having agreed with the prior (`_surprise`). Chosen: with fewer, a single surprise would
widen all doubt."""


def scale(factor: Factor, unknowns: Unknowns) -> float:
    """What `factor` multiplies its term by; 1 where nothing is known."""
    return math.exp(deviation(factor, unknowns))


def deviation(factor: Factor, unknowns: Unknowns) -> float:
    """The sum of the factor's unknowns, each times its standard deviation."""
    total = 0.0
    for name, sigma in factor:  # the innermost loop of every fit, and most of its time
        if name in unknowns:
            total += sigma * unknowns[name]
    return total


def names_of(*factors: Factor) -> tuple[str, ...]:
    """The unknowns of several factors, each once."""
    return tuple(dict.fromkeys(name for factor in factors for name, _ in factor))


@dataclass(frozen=True, kw_only=True)
class Datum:
    """One measured number and the formula that should have given it."""

    formula: Formula
    names: tuple[str, ...]
    """The unknowns that `formula` reads."""
    target: float
    """The logarithm of what was measured."""
    noise: float
    """The relative error expected of a measurement of this kind, the formula's own shape included."""
    is_lower_bound: bool = False
    """The truth is at least `target`: says nothing where the formula is above it already."""


@dataclass(frozen=True)
class Estimate:
    """A formula's value (a logarithm) where the unknowns are most probable, and its slope along each of them."""

    mean: float
    slopes: Mapping[str, float]

    def minus(self, other: Estimate) -> Estimate:
        """The difference of two estimates: what they have in common cancels, and with it its doubt."""
        slopes = dict(self.slopes)
        for name, slope in other.slopes.items():
            slopes[name] = slopes.get(name, 0.0) - slope
        return Estimate(self.mean - other.mean, slopes)


@dataclass(frozen=True, kw_only=True)
class Fit:
    """What is believed about the unknowns after some measurements; without arguments, the prior."""

    values: Mapping[str, float] = field(default_factory=dict)
    covariance: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    surprise: float = 1.0
    """How much further the measurements lie from the prior than it expected: all doubt grows by this factor."""

    def estimate(self, formula: Formula, names: Sequence[str]) -> Estimate:
        """`formula` linearised around the most probable unknowns."""
        mean = formula(self.values)
        return Estimate(mean, dict(zip(names, _slopes(formula, names, self.values, mean), strict=True)))

    def deviation(self, estimate: Estimate) -> float:
        """The standard deviation of `estimate`, the measurement noise not included."""
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
        """Mean and standard deviation of `formula` (a logarithm), the measurement noise not included."""
        estimate = self.estimate(formula, names)
        return estimate.mean, self.deviation(estimate)


def fit(data: Sequence[Datum]) -> Fit:
    """The most probable unknowns given `data`, with their covariance."""
    names = sorted({name for datum in data for name in datum.names})
    if not names:
        return Fit()
    index = {name: position for position, name in enumerate(names)}
    values = dict.fromkeys(names, 0.0)
    # Plain least squares first: far from the solution, every measurement looks like a freak.
    for robust in (False, True):
        _descend(data, index, values, robust=robust)
    precision, _ = _normal_equations(data, index, values, robust=True)
    factor = _cholesky(precision)
    columns = [_solve(factor, [float(i == j) for i in range(len(names))]) for j in range(len(names))]
    covariance = {name: dict(zip(names, column, strict=True)) for name, column in zip(names, columns, strict=True)}
    return Fit(values=values, covariance=covariance, surprise=_surprise(data, values))


def _surprise(data: Sequence[Datum], values: Unknowns) -> float:
    """The Birge ratio, at least 1: what the fit had to pay, over the number of measurements that it was to pay for.

    A prior that is right pays one a measurement (chi squared); `_TRUST` measurements are taken to have paid that.
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
            # Half steps late on: a maximum over moments makes the formula kink, and full steps would hop across.
            stride = (wanted - values[name]) * (1.0 if iteration < _ITERATIONS // 2 else 0.5)
            value = _within(_LIMIT, values[name] + _within(_STRIDE, stride))
            moved = max(moved, abs(value - values[name]))
            values[name] = value
        if moved < _STANDS_STILL:
            break


def _within(limit: float, value: float) -> float:
    """`value`, or the end of the range from -`limit` to `limit` that it lies beyond."""
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
    """The scalar product over the shorter one's length."""
    return float(sum(map(mul, one, other)))
