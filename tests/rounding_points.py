"""Numbers at which rounding to a format can go wrong, and what it should give, from the list of its values."""

import dataclasses

import numpy as np

from jaxamp._number_formats.number_format import KNOWN, NumberFormat

F32 = np.float32
PLAIN = {name: known for name, known in KNOWN.items() if not known.is_scaled}
SMALL = {name: known for name, known in PLAIN.items() if known.bits <= 8}
OTHERS = F32([0, 1, 2**-126, 2**-127, 2**-149, 3e-45, 1.1754942e-38, 65519.996, 65520, 1e30, 3.4028235e38, np.inf])


def with_neighbours(x: np.ndarray) -> np.ndarray:
    """Floats, those beside them in float32, and the same with the other sign."""
    x = np.asarray(x, F32)
    with np.errstate(over="ignore", invalid="ignore"):
        every = np.concatenate([x, np.nextafter(x, F32(np.inf)), np.nextafter(x, F32(-np.inf))])
    return np.concatenate([every, -every])


def points(format: NumberFormat) -> np.ndarray:
    """All values, the points halfway between them, both with their float32 neighbours, and numbers out of range."""
    grid = grid_of(format)
    halves = (grid[1:] + grid[:-1]) / 2
    fit = halves[halves.astype(F32) == halves]
    with np.errstate(over="ignore", invalid="ignore"):
        found = np.concatenate([grid.astype(F32), fit.astype(F32), (4 * grid[-1:]).astype(F32), OTHERS])
    found = np.append(with_neighbours(found), F32(np.nan))
    return np.resize(found, 2**11 if len(found) <= 2**11 else 2**19)  # of few shapes, to compile seldom


def grid_of(format: NumberFormat) -> np.ndarray:
    """The values from zero up, and the one that would follow the largest, in float64."""
    values = format.values().astype(np.float64)
    step = 2.0 ** (format.largest_exponent - format.mantissa)
    return np.append(values[values >= 0], format.max + step)


def rounded(x: np.ndarray, format: NumberFormat) -> np.ndarray:
    """Rounded to nearest with ties to the even code: looked up in the list of values. For formats with subnormals."""
    grid = grid_of(format)
    magnitude = np.abs(np.asarray(x, np.float64))
    with np.errstate(invalid="ignore"):
        finite = np.where(np.isfinite(magnitude), np.minimum(magnitude, grid[-1]), grid[-1])
    above = np.clip(np.searchsorted(grid, finite), 1, len(grid) - 1)
    half = (grid[above - 1] + grid[above]) / 2
    index = np.where((finite > half) | ((finite == half) & (above % 2 == 0)), above, above - 1)
    too_large = format.max if format.saturate else np.inf if format.has_infinity else np.nan
    result = np.where(index == len(grid) - 1, too_large, grid[index])
    result = np.where(np.isnan(x), np.nan, np.copysign(result, x))
    return np.where(result == 0, 0.0, result) if not format.has_negative_zero else result


def other_saturation(format: NumberFormat) -> NumberFormat:
    return dataclasses.replace(format, saturate=not format.saturate)


def assert_same(found: object, expected: object, at: np.ndarray) -> None:
    """Equal in every bit, with the numbers that were rounded in the message; any NaN equals any."""
    found, expected = np.asarray(found).astype(F32), np.asarray(expected).astype(F32)
    same = (found.view(np.int32) == expected.view(np.int32)) | (np.isnan(found) & np.isnan(expected))
    assert same.all(), [(float(a), float(b), float(c)) for a, b, c in zip(at[~same], found[~same], expected[~same])][:8]
