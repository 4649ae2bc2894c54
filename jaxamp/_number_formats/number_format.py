"""A number format as data: its bits, its codes without a number, how it rounds, and who shares a scale.

Every format here is a float format, scaled integers too: `int8` is a sign, one exponent bit and six mantissa bits, of
which the subnormals and the normals have the same spacing.
"""

import dataclasses
import math
from typing import Any, Literal

import numpy as np

Specials = Literal["ieee", "fn", "fnuz", "finite", "integer"]
Rounding = Literal["nearest", "stochastic"]
Scale = Literal["none", "e8m0", "float32", "e4m3"]

SPECIALS = ("ieee", "fn", "fnuz", "finite", "integer")
ROUNDINGS = ("nearest", "stochastic")
_OF_CODES = ("exponent", "mantissa", "bias", "specials")  # fields that say which numbers there are
SCALE_BITS = {"none": 0, "e8m0": 8, "float32": 32, "e4m3": 8}

_OWN_SPECIALS: dict[tuple[int, int], Specials] = {(4, 3): "fn", (3, 2): "finite", (2, 3): "finite", (2, 1): "finite"}
_RANGES = {"exponent": (1, 8), "mantissa": (0, 23), "bias": (-127, 149)}
_MOST_LISTED = 16  # bits of a format whose values are listed


@dataclasses.dataclass(frozen=True)
class NumberFormat:
    """A number format. `jaxamp.format` makes one, and explains the fields.

    Attributes:
        exponent: Bits of the exponent.
        mantissa: Bits of the mantissa.
        bias: What is subtracted from the bits of the exponent.
        subnormals: Whether it has subnormal numbers.
        saturate: Whether numbers beyond the largest become the largest.
        specials: Which codes are not numbers.
        rounding: How numbers are rounded.
        block: How many numbers share a scale.
        scale: The format of scales.

    >>> import jaxamp
    >>> e2m1 = jaxamp.format("e2m1")
    >>> e2m1.max, e2m1.smallest_subnormal, e2m1.bits
    (6.0, 0.5, 4)
    >>> e2m1.values()[7:].tolist()
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    """

    exponent: int
    mantissa: int
    bias: int
    subnormals: bool = True
    saturate: bool = True
    specials: Specials = "ieee"
    rounding: Rounding = "nearest"
    block: int | Literal["axis", "tensor"] = "tensor"
    scale: Scale = "none"

    def __post_init__(self) -> None:
        self._check_words()
        self._check_bits()
        self._check_together()

    def _check_words(self) -> None:
        for field, words in (("specials", SPECIALS), ("rounding", ROUNDINGS), ("scale", tuple(SCALE_BITS))):
            if getattr(self, field) not in words:
                _refuse(f"{field}={getattr(self, field)!r} is unknown", f"{field}= as {_listed(words)}")
        for field in ("subnormals", "saturate"):
            if not isinstance(getattr(self, field), bool):
                _refuse(f"{field}={getattr(self, field)!r} is not a bool", f"{field}=True or {field}=False")
        if self.block not in ("axis", "tensor") and not (_is_integer(self.block) and int(self.block) > 0):
            what = f"block={self.block!r} is not a size"
            _refuse(what, "block= as a positive integer, as 'axis' for one scale per row, or as 'tensor' for one scale")

    def _check_bits(self) -> None:
        for field in _RANGES:
            _check_integer(field, getattr(self, field))
            object.__setattr__(self, field, int(getattr(self, field)))  # NumPy's integers make an equal format
        if self.block not in ("axis", "tensor"):
            object.__setattr__(self, "block", int(self.block))
        if self.largest_exponent < self.smallest_exponent:
            what = f"exponent={self.exponent} with specials={self.specials!r} leaves no normal number"
            _refuse(what, "a larger exponent=, or specials='finite'")
        if self.largest_exponent > 127 or self.smallest_exponent - self.mantissa * self.subnormals < -149:
            what = (
                f"exponent={self.exponent}, mantissa={self.mantissa} and bias={self.bias} reach from "
                f"2**{self.smallest_exponent - self.mantissa * self.subnormals} to 2**{self.largest_exponent}, and "
                "float32, in which formats are emulated, from 2**-149 to 2**127"
            )
            _refuse(what, "a smaller exponent=, or a bias= between these")

    def _check_together(self) -> None:
        if self.specials in ("finite", "integer") and not self.saturate:
            what = f"saturate=False, and specials={self.specials!r} has no code for an overflow"
            _refuse(what, "saturate=True, or specials='ieee' or 'fn'")
        if self.specials == "integer" and (self.exponent != 1 or not self.subnormals):
            _refuse(
                "specials='integer' has evenly spaced numbers", "exponent=1 and subnormals=True, or a name as 'int8'"
            )
        if self.scale == "none" and self.block != "tensor":
            _refuse(f"block={self.block!r} with scale='none'", "scale='e8m0', or no block=")
        if self.scale == "e4m3" and self.block == "tensor":
            _refuse("scale='e4m3' is the scale of a block, beside one of the tensor", "block=16 with it")

    @property
    def smallest_exponent(self) -> int:
        """Of the smallest normal number, a power of two."""
        return 1 - self.bias

    @property
    def largest_exponent(self) -> int:
        """The logarithm of `max` to base 2, rounded down."""
        taken = self.specials == "ieee" or (self.specials == "fn" and self.mantissa == 0)
        return 2**self.exponent - 1 - taken - self.bias

    @property
    def largest_significand(self) -> int:
        """`max` without its power of two, as an integer of `mantissa + 1` bits."""
        return 2 ** (self.mantissa + 1) - 1 - (self.specials == "fn" and self.mantissa > 0)

    @property
    def max(self) -> float:
        """The largest finite number, of an element if there are scales."""
        return math.ldexp(self.largest_significand, self.largest_exponent - self.mantissa)

    @property
    def smallest_normal(self) -> float:
        """The smallest normal number."""
        return 2.0**self.smallest_exponent

    @property
    def smallest_subnormal(self) -> float:
        """The smallest positive number; that is the smallest normal one in a format without subnormals."""
        return 2.0 ** (self.smallest_exponent - self.mantissa * self.subnormals)

    @property
    def epsilon(self) -> float:
        """The distance from a power of two to the next number, relative to it."""
        return 2.0**-self.mantissa

    @property
    def bits(self) -> int:
        """Of one element, its sign included and its share of a scale not."""
        return 1 + self.exponent + self.mantissa

    @property
    def bits_with_scale(self) -> float:
        """Of one element and its share of a block's scale: 4.25 for `mxfp4`."""
        return self.bits + (SCALE_BITS[self.scale] / self.block if isinstance(self.block, int) else 0)

    @property
    def has_infinity(self) -> bool:
        """Whether it has infinities."""
        return self.specials == "ieee"

    @property
    def has_nan(self) -> bool:
        """Whether it has a NaN."""
        return self.specials in ("ieee", "fn", "fnuz")

    @property
    def has_negative_zero(self) -> bool:
        """Whether it has a negative zero."""
        return self.specials not in ("fnuz", "integer")

    @property
    def is_scaled(self) -> bool:
        """Whether elements share scales."""
        return self.scale != "none"

    def values(self) -> np.ndarray:
        """All finite numbers of the format (of an element, if there are scales), each once, in rising order.

        Returns:
            An array, in increasing order.
        """
        if self.bits > _MOST_LISTED:
            _refuse(f"{self} has 2**{self.bits} values, too many to list", f"values() of at most {_MOST_LISTED} bits")
        last = (self.largest_exponent - self.smallest_exponent + 1) << self.mantissa
        codes = np.arange(last + self.largest_significand - 2**self.mantissa + 1)
        field, significand = codes >> self.mantissa, codes & (2**self.mantissa - 1)
        exponents = np.maximum(field, 1) + self.smallest_exponent - 1 - self.mantissa
        positive = np.ldexp(np.where(field > 0, significand + 2**self.mantissa, significand), exponents)
        positive = positive[(field > 0) | (codes == 0)] if not self.subnormals else positive
        return np.concatenate([-positive[:0:-1], positive]).astype(np.float32)

    def __repr__(self) -> str:
        name, changes = _description(self)
        words = [repr(name)] * bool(name) + [f"{field}={value!r}" for field, value in changes.items()]
        return f"jaxamp.format({', '.join(words)})"

    def __str__(self) -> str:
        name, changes = _description(self)
        return " ".join([name] * bool(name) + [f"{field}={value}" for field, value in changes.items()])


def _is_integer(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _check_integer(field: str, value: Any) -> None:
    low, high = _RANGES[field]
    instead = f"{field}= as an integer from {low} to {high}"
    if not _is_integer(value):
        _refuse(f"{field}={value!r} is not an integer", instead)
    if not low <= value <= high:
        _refuse(f"{field}={value!r} is out of range, as formats are emulated in float32", instead)


def _listed(words: tuple[str, ...]) -> str:
    return " or ".join(repr(word) for word in words)


def _refuse(what: str, instead: str) -> None:
    raise ValueError(f"jaxamp.format: {what}. Write {instead}.")


def complete(**fields: Any) -> NumberFormat:
    """A format of these fields, which have `exponent` and `mantissa`; the others are what these two suggest."""
    for field in ("exponent", "mantissa"):
        _check_integer(field, fields[field])
        fields[field] = int(fields[field])
    fields.setdefault("specials", _own_specials(fields["exponent"], fields["mantissa"]))
    return NumberFormat(**(_defaults(fields["exponent"], fields["mantissa"], fields["specials"]) | fields))


def _own_specials(exponent: int, mantissa: int) -> Specials:
    return _OWN_SPECIALS.get((exponent, mantissa), "ieee")


def _defaults(exponent: int, mantissa: int, specials: Specials) -> dict[str, Any]:
    bias = 1 - mantissa if specials == "integer" else 2 ** (exponent - 1) - (specials != "fnuz")
    saturate = 1 + exponent + mantissa <= 8 or specials in ("finite", "integer")
    return {"bias": bias, "saturate": saturate}


def integer_format(bits: int) -> NumberFormat:
    """Integers with one scale of the tensor."""
    return complete(exponent=1, mantissa=bits - 2, specials="integer", scale="float32")


def _known() -> dict[str, NumberFormat]:
    """The names that are listed where one is misspelt, and by which formats are shown."""
    own = {f"e{e}m{m}": complete(exponent=e, mantissa=m) for e, m in ((4, 3), (5, 2), (3, 2), (2, 3), (2, 1))}
    fnuz = {f"e{e}m{m}fnuz": complete(exponent=e, mantissa=m, specials="fnuz") for e, m in ((4, 3), (5, 2))}
    elements = {"mxfp8": "e4m3", "mxfp8_e5m2": "e5m2", "mxfp6": "e3m2", "mxfp6_e2m3": "e2m3", "mxfp4": "e2m1"}
    blocks = {name: dataclasses.replace(own[of], scale="e8m0", block=32) for name, of in elements.items()}
    blocks["mxint8"] = complete(exponent=1, mantissa=6, bias=1, specials="integer", scale="e8m0", block=32)
    blocks["nvfp4"] = dataclasses.replace(own["e2m1"], scale="e4m3", block=16)
    integers = {f"int{bits}": integer_format(bits) for bits in (8, 4)}
    dtypes = {
        "bfloat16": complete(exponent=8, mantissa=7),
        "float16": complete(exponent=5, mantissa=10),
        "float32": complete(exponent=8, mantissa=23),
        "tf32": complete(exponent=8, mantissa=10),
        "float8_e4m3": complete(exponent=4, mantissa=3, specials="ieee"),
        "float8_e4m3b11fnuz": complete(exponent=4, mantissa=3, bias=11, specials="fnuz"),
        "float8_e3m4": complete(exponent=3, mantissa=4),
    }
    return own | fnuz | blocks | integers | dtypes


KNOWN = _known()


def _description(format: NumberFormat) -> tuple[str, dict[str, Any]]:
    """A name and changes to it that make the format: `("mxfp4", {"rounding": "stochastic"})`. As few as possible."""
    fields = {field.name: getattr(format, field.name) for field in dataclasses.fields(format)}
    candidates = [
        (name, changes)
        for name, known in KNOWN.items()
        if (changes := _changes(dataclasses.asdict(known), fields)).keys().isdisjoint(_OF_CODES)
    ]
    if candidates:
        return min(candidates, key=lambda each: len(each[1]))
    own = _own_specials(format.exponent, format.mantissa)
    others = {field.name: field.default for field in dataclasses.fields(format)} | {"specials": own}
    changes = _changes(others | _defaults(format.exponent, format.mantissa, format.specials), fields)
    if "bias" not in changes and "specials" not in changes:
        del changes["exponent"], changes["mantissa"]
        return f"e{format.exponent}m{format.mantissa}", changes
    return "", changes


def _changes(base: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
    found = {field: value for field, value in fields.items() if value != base[field]}
    if found.get("scale") == "none":
        found.pop("block", None)
    return found
