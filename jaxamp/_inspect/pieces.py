"""Compiles pieces of programs, each once for all places that do the same, and several at a time."""

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax

from .._compat import Literal
from .._jaxpr import bind
from .flat import Piece, Repeats


class Compiled:
    """Compiled pieces of programs, by what they do."""

    def __init__(self) -> None:
        self.kinds = Repeats()
        self._functions: dict[Any, tuple[Any, Callable[..., Any]]] = {}

    def prepare(self, pieces: Sequence[Piece], values: Iterable[Any]) -> None:
        """Begin to compile the pieces of a program that will run on `values`, on all cores.

        Nothing is prepared for values that are not on the default device: how their results are split is not known yet.
        """
        new = {(piece.key, id(None)): piece for piece in pieces if not piece.is_alone}
        new = {key: piece for key, piece in new.items() if key not in self._functions}
        if len(new) < 2 or not all(map(_is_on_default_device, values)):
            return
        pool = ThreadPoolExecutor(os.cpu_count())
        for key, piece in new.items():
            types = _types(piece)
            if types is not None:
                lowered = compiled_fast(run_piece(piece)).lower(*types)
                self._functions[key] = None, _Later(pool.submit(lowered.compile))
        pool.shutdown(wait=False)

    def run(self, piece: Piece, mapped: Any, operands: Sequence[Any]) -> Sequence[Any]:
        """What a piece returns. `mapped`: the `shard_map` that it is in, if any."""
        key = piece.key, id(mapped)
        if key not in self._functions:
            fun = run_piece(piece)
            function = compiled_fast(fun) if mapped is None else mapped.compiled(piece, fun)
            self._functions[key] = mapped, function
        return self._functions[key][1](*operands)

    def alone(self, eqn: Any, name: str, fun: Callable[..., Any]) -> Callable[..., Any]:
        """A function that says something of equations of this kind, compiled."""
        key = name, self.kinds.of(eqn)
        if key not in self._functions:
            self._functions[key] = eqn, compiled_fast(fun)
        return self._functions[key][1]


class _Later:
    """A function that is being compiled."""

    def __init__(self, future: Any):
        self._future = future

    def __call__(self, *operands: Any) -> Any:
        return self._future.result()(*operands)


def _types(piece: Piece) -> list[Any] | None:
    """The types of what a piece reads; None if some are not arrays."""
    pairs = [pair for op in piece.operations for pair in zip(op.operands, op.eqn.invars, strict=True)]
    avals = {x: v.aval for x, v in pairs if isinstance(x, int)}
    found = [avals[x] for x in piece.reads]
    if not all(isinstance(aval, jax.core.ShapedArray) for aval in found):
        return None
    return [jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type) for aval in found]


def _is_on_default_device(x: Any) -> bool:
    return not isinstance(x, jax.Array) or x.devices() == jax.numpy.zeros(()).devices()


def run_piece(piece: Piece) -> Callable[..., list[Any]]:
    """A piece as a function of the values that it reads."""

    def run(*operands: Any) -> list[Any]:
        env = dict(zip(piece.reads, operands, strict=True))
        for operation in piece.operations:
            eqn, ins = operation.eqn, [x.val if isinstance(x, Literal) else env[x] for x in operation.operands]
            with eqn.ctx.manager:
                env.update(zip(operation.results, bind(eqn, ins), strict=True))
        return [env[x] for x in piece.returns]

    return run


def compiled_fast(fun: Callable[..., Any]) -> Any:
    """A function that runs once or a few times: each result is rounded to its dtype, and little time is spent on speed.

    Without the first option, XLA may leave out a cast to a low dtype and back, and an overflow with it.
    """
    options: dict[str, Any] = {"xla_allow_excess_precision": False}
    if jax.default_backend() == "cpu":
        options |= {"xla_backend_optimization_level": "0", "xla_llvm_disable_expensive_passes": True}
    return jax.jit(fun, compiler_options=options)
