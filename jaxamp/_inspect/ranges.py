"""Which powers of two the magnitudes of values have, and so which dtypes can hold them."""

from collections import Counter
from typing import Any, NamedTuple

import numpy as np


class Range(NamedTuple):
    """A histogram of magnitudes."""

    powers: Counter[int]  # by power: how many values have a magnitude in [2**power, 2**(power + 1))
    zeros: int

    def __add__(self, other: Any) -> "Range":
        return Range(self.powers + other.powers, self.zeros + other.zeros)


def range_of(x: Any) -> Range:
    """The range of the finite values of an array.

    >>> range_of(np.array([0.0, 1.0, 1.5, 0.25]))
    Range(powers=Counter({0: 2, -2: 1}), zeros=1)
    """
    values = np.abs(np.asarray(x).astype(np.float64))
    values = values[np.isfinite(values)]
    _, exponents = np.frexp(values[values > 0])
    powers, counts = np.unique(exponents - 1, return_counts=True)
    counted = Counter(dict(zip(powers.tolist(), counts.tolist(), strict=True)))
    return Range(counted, int((values == 0).sum()))
