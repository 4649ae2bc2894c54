"""The data of a report: its rows, and totals over them. How it is shown is decided elsewhere."""

import functools
from collections import Counter
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from .collectives import CompiledCollective
from .kept import BytesKept
from .rows import Row

# What `to_dict` tells of a row, in this order.
ROW_KEYS = (
    "phase",
    "scope",
    "primitive",
    "kind",
    "written",
    "run",
    "rule",
    "reason",
    "source",
    "times",
    "flops",
    "bytes",
    "dims",
    "format",
)


@dataclass(frozen=True)
class ReportData:
    """What `amp` does to one call of a function. `AmpReport` says what the fields are."""

    name: str
    compute_dtype: str
    rows: tuple[Row, ...]
    kept: BytesKept | None
    unmatched: tuple[str, ...]
    notes: tuple[str, ...]
    backward_error: str | None = None
    collectives: tuple[CompiledCollective, ...] = ()

    @functools.cached_property
    def matmuls(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.kind == "matmul")

    @functools.cached_property
    def matmul_flops(self) -> dict[str, int]:
        """FLOPs of matmuls by the dtype they multiply in, largest first."""
        found: Counter[str] = Counter()
        for row in self.matmuls:
            found[row.multiplied] += row.flops
        return dict(found.most_common())

    @functools.cached_property
    def low_share(self) -> float:
        """The share of floating-point matmul FLOPs that run low; 1 if there are none."""
        low = sum(row.flops for row in self.matmuls if self.is_low(row))
        total = low + sum(row.flops for row in self.matmuls if "float" in row.multiplied and not self.is_low(row))
        return low / total if total else 1.0

    @functools.cached_property
    def sent(self) -> dict[tuple[str, str], int]:
        """Bytes that a compiled program sends from device to device, by axes of the mesh and dtype, largest first."""
        found: Counter[tuple[str, str]] = Counter()
        for row in self.collectives:
            found[", ".join(row.axes), row.dtype] += row.total
        return dict(found.most_common())

    def is_low(self, row: Row) -> bool:
        """Whether a matmul multiplies in the compute dtype, or in a format that a rule of the policy asks for.

        Args:
            row: One of `matmuls`.

        Returns:
            True or False.
        """
        return bool(row.format) or row.multiplied == self.compute_dtype

    @functools.cached_property
    def casts(self) -> tuple[Row, ...]:
        """Casts between floats that the user did not write."""
        return tuple(row for row in self.rows if row.kind == "cast")

    @property
    def cast_count(self) -> int:
        """How often casts run, those in loops once a round."""
        return sum(row.times for row in self.casts)

    @property
    def cast_bytes(self) -> int:
        """The bytes that casts read and write, if XLA fuses none of them."""
        return sum(row.bytes for row in self.casts)

    @functools.cached_property
    def not_entered(self) -> dict[str, int]:
        """Primitives that `amp` does not know and runs as written, with how often they run."""
        found: Counter[str] = Counter()
        for row in self.rows:
            if row.kind == "not entered":
                found[row.primitive] += row.times
        return dict(found.most_common())

    @functools.cached_property
    def wide_matmuls(self) -> tuple[Row, ...]:
        """Matmuls left in float32, largest first. `amp` never lowers integers or float64, so they don't count."""
        wide = (row for row in self.matmuls if row.multiplied == "float32" != self.compute_dtype)
        return tuple(sorted(wide, key=lambda row: -row.flops))

    @functools.cached_property
    def wasteful_matmuls(self) -> tuple[Row, ...]:
        """Low-precision matmuls with a dimension that tensor cores pad, because it is not a multiple of `multiple`."""
        low = filter(self.is_low, self.matmuls)
        return tuple(row for row in low if row.dims is not None and any(size % self.multiple for size in row.dims))

    @property
    def multiple(self) -> int:
        """What the dimensions of a matmul should be a multiple of, so that tensor cores don't pad."""
        return 16 if jnp.dtype(self.compute_dtype).itemsize == 1 else 8

    def to_dict(self) -> dict[str, Any]:
        """Put the whole report in a form that is ready for JSON.

        Returns:
            A dictionary of `totals`, `rows`, `collectives` and `notes`.
        """
        return {
            "name": self.name,
            "compute_dtype": self.compute_dtype,
            "totals": {
                "matmul_flops": self.matmul_flops,
                "low_share": self.low_share,
                "casts": self.cast_count,
                "cast_bytes": self.cast_bytes,
                "bytes_kept": None if self.kept is None else self.kept._asdict(),
                "sent": [{"axes": axes, "dtype": dtype, "bytes": size} for (axes, dtype), size in self.sent.items()],
                "not_entered": self.not_entered,
                "unmatched_keys": list(self.unmatched),
                "wide_matmuls": len(self.wide_matmuls),
                "wasteful_matmuls": len(self.wasteful_matmuls),
            },
            "notes": list(self.notes),
            "backward_error": self.backward_error,
            "collectives": [row._asdict() for row in self.collectives],
            "rows": [{key: to_json(getattr(row, key)) for key in ROW_KEYS} for row in self.rows],
        }


def to_json(value: Any) -> Any:
    """An entry of a row, ready for JSON: a named tuple becomes a dictionary."""
    return value._asdict() if hasattr(value, "_asdict") else value
