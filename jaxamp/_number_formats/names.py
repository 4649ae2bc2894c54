"""Names of number formats, and `jaxamp.format`, which makes one from a name, a dtype or numbers."""

import dataclasses
import re
from typing import Any, Literal

import numpy as np

from .._errors import nearest
from .number_format import KNOWN, NumberFormat, Rounding, Scale, Specials, complete, integer_format

_PATTERN = re.compile(r"e(\d+)m(\d+)(fn|fnuz)?")
_INTEGERS = re.compile(r"int(\d+)")


def format(
    name: Any = None,
    /,
    *,
    exponent: int | None = None,
    mantissa: int | None = None,
    bias: int | None = None,
    subnormals: bool | None = None,
    saturate: bool | None = None,
    specials: Specials | None = None,
    rounding: Rounding | None = None,
    block: int | Literal["axis", "tensor"] | None = None,
    scale: Scale | None = None,
) -> NumberFormat:
    """Describe a number format, by a name, by a dtype, or by its bits.

    Returns:
        The format, for `jaxamp.use_formats` and `compute_dtype=`.

    >>> import jaxamp
    >>> jaxamp.format("e4m3").max
    448.0
    >>> jaxamp.format(exponent=5, mantissa=2) == jaxamp.format("e5m2")
    True
    >>> jaxamp.format("mxfp4", rounding="stochastic")
    jaxamp.format('mxfp4', rounding='stochastic')

    Args:
        name: One of these, or another format, which the keywords change.

            - `"e4m3"`, `"e5m2"`, `"e3m2"`, `"e2m3"`, `"e2m1"`: the formats of the Open Compute Project (OCP).
            - `"e4m3fnuz"`, `"e5m2fnuz"`: those of some AMD devices.
            - any `"e<exponent>m<mantissa>"`, as `"e3m4"`; IEEE-like, or with `fn` or `fnuz` at its end.
            - `"mxfp8"` (of e4m3), `"mxfp8_e5m2"`, `"mxfp6"` (of e3m2), `"mxfp6_e2m3"`, `"mxfp4"`, `"mxint8"`: the OCP's
              microscaling formats, blocks of 32 with a power of two as their scale.
            - `"nvfp4"`: blocks of 16 of e2m1, whose scales are e4m3, and one float32 scale of the tensor.
            - `"int8"`, `"int4"`: symmetric integers, with one float32 scale of the tensor.
            - `"tf32"`, and the floating point dtypes of JAX or their names: `jnp.float8_e4m3fn`, `"bfloat16"`.
        exponent: Bits of the exponent, 1 to 8.
        mantissa: Bits of the mantissa, 0 to 23.
        bias: What is subtracted from the exponent's code; IEEE's `2**(exponent - 1) - 1` unless given, and one more
            with `fnuz`.
        subnormals: Whether there are numbers between zero and the smallest normal one. Without, results below it are
            flushed to zero, also if they were rounded stochastically.
        saturate: Whether numbers too large, infinities among them, become the largest finite one. Otherwise they become
            infinite, or NaN in a format without infinities. By default, formats of 8 bits or fewer do.
        specials: Codes that are not finite numbers. `"ieee"`: infinities and NaNs, in the whole last exponent. `"fn"`:
            only the last code, a NaN. `"fnuz"`: a NaN in place of negative zero. `"finite"`: none. `"integer"`: none,
            and evenly spaced numbers. By default the OCP's choice for its formats, and `"ieee"` for others.
        rounding: `"nearest"`, with ties to even, or `"stochastic"`: up or down, with probabilities that keep the mean.
        block: How many neighbours share a scale: a number along an axis, `"axis"` for all of them, `"tensor"`.
        scale: How scales are held. `"e8m0"`: a power of two. `"float32"`. `"e4m3"`: times one float32 of the tensor.
            `"none"`: there are none.

    **Sharp edges**: `"e4m3"` is the OCP's, the dtype `float8_e4m3fn`; `"float8_e4m3"` is IEEE-like, as its dtype.
    """
    bits = {"exponent": exponent, "mantissa": mantissa, "bias": bias, "specials": specials}
    rest = {"subnormals": subnormals, "saturate": saturate, "rounding": rounding, "block": block, "scale": scale}
    changes: dict[str, Any] = {field: value for field, value in (bits | rest).items() if value is not None}
    base = None if name is None else name if isinstance(name, NumberFormat) else _from_name(name)
    if changes.get("scale") == "none":
        changes = {"block": "tensor"} | changes
    elif block is not None and not (base and base.is_scaled):
        changes = {"scale": "e8m0"} | changes
    if base is not None:
        return dataclasses.replace(base, **changes)
    if exponent is None or mantissa is None:
        raise ValueError(
            "jaxamp.format: neither a name nor both exponent= and mantissa= were given. "
            "Write a name as jaxamp.format('e4m3'), or jaxamp.format(exponent=4, mantissa=3)."
        )
    return complete(**changes)


_ALIASES = {
    "e4m3fn": "e4m3",
    "e3m2fn": "e3m2",  # here and in the next two, "fn" means that all codes are finite
    "e2m3fn": "e2m3",
    "e2m1fn": "e2m1",
    "float8_e4m3fn": "e4m3",
    "float8_e5m2": "e5m2",
    "float8_e4m3fnuz": "e4m3fnuz",
    "float8_e5m2fnuz": "e5m2fnuz",
    "float6_e3m2fn": "e3m2",
    "float6_e2m3fn": "e2m3",
    "float4_e2m1fn": "e2m1",
    "mxfp8_e4m3": "mxfp8",
    "mxfp6_e3m2": "mxfp6",
    "mxfp4_e2m1": "mxfp4",
}


def _from_name(given: Any) -> NumberFormat:
    name = given if isinstance(given, str) else _dtype_name(given)
    name = _ALIASES.get(name, name)
    if name in KNOWN:
        return KNOWN[name]
    if (found := _PATTERN.fullmatch(name)) and name != "e8m0":
        ending = {"specials": found[3]} if found[3] else {}
        return complete(exponent=int(found[1]), mantissa=int(found[2]), **ending)
    if (found := _INTEGERS.fullmatch(name)) and 2 <= int(found[1]) <= 16:
        return integer_format(int(found[1]))
    if name in ("e8m0", "float8_e8m0fnu"):
        raise ValueError(
            f"jaxamp.format: {name!r} is a format of scales, and has neither zero nor a sign. "
            "Write scale='e8m0' beside the name of a format with numbers, or 'mxfp8'."
        )
    raise ValueError(
        f"jaxamp.format: there is no format {name!r}.{nearest(name, [*KNOWN, *_ALIASES])} "
        f"Write one of {', '.join(KNOWN)}, or exponent= and mantissa=."
    )


def _dtype_name(given: Any) -> str:
    try:
        return np.dtype(given).name
    except TypeError:
        raise TypeError(
            f"jaxamp.format: {given!r} is neither a name nor a dtype. "
            "Write a name as 'e4m3', a dtype as jnp.float8_e4m3fn, or exponent= and mantissa=."
        ) from None
