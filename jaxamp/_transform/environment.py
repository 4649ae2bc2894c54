"""The values of variables while a plan runs."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from .._compat import Literal, Var
from .._formats import Format, cast, cast_constant, saturate
from .._jaxpr import bind
from .._plan.sensitivity import OUT_OF_RANGE, Value


class Env:
    """The values of variables, with one cast of each per dtype."""

    def __init__(self) -> None:
        self._values: dict[Var, tuple[Any, Value]] = {}
        self._casts: dict[tuple[Var, np.dtype], Any] = {}
        self._constants: dict[Var, Any] = {}

    def write(self, var: Var, x: Any, value: Value) -> None:
        self._values[var] = x, value

    def with_values(self, variables: Sequence[Var], xs: Sequence[Any]) -> "Env":
        """An environment of other values for some variables, and of constants, alone."""
        env = Env()
        env._constants = dict(self._constants)
        for var, x in zip(variables, xs, strict=True):
            env.write(var, x, self._values[var][1])
        return env

    def format_of(self, var: Var) -> Format | None:
        """The format that a value is held in; None for a constant that is not made yet."""
        return self._values[var][1].format if var in self._values else None

    def postpone(self, eqn: Any) -> None:
        """Broadcast a literal when it is read, in the format that it is read in."""
        self._constants[eqn.outvars[0]] = eqn

    def read(self, atom: Any, format: Format | None = None) -> Any:
        """The value of `atom` in `format`; None: in the one it is held in."""
        dtype = None if format is None else format.dtype
        if isinstance(atom, Literal):
            return atom.val if dtype is None or atom.val.dtype == dtype else cast_constant(atom.val, dtype)
        if atom in self._constants:
            dtype = atom.aval.dtype if dtype is None else dtype
            if (atom, dtype) not in self._casts:
                eqn = self._constants[atom]
                (self._casts[atom, dtype],) = bind(eqn, [cast_constant(v.val, dtype) for v in eqn.invars])
            return self._casts[atom, dtype]
        x, value = self._values[atom]
        if dtype is None or value.format is None or x.dtype == dtype:
            return x
        if (atom, dtype) not in self._casts:
            narrow = value.sensitivity is OUT_OF_RANGE and dtype.itemsize < x.dtype.itemsize
            self._casts[atom, dtype] = saturate(x, dtype) if narrow else cast(x, dtype)
        return self._casts[atom, dtype]
