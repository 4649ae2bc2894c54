"""Compiles pieces of programs, each once for all places that do the same."""

from collections.abc import Callable, Sequence
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


def compiled_fast(fun: Callable[..., Any]) -> Callable[..., Any]:
    """A function that runs once or a few times: each result is rounded to its dtype, and little time is spent on speed.

    Without the first option, XLA may leave out a cast to a low dtype and back, and an overflow with it.
    """
    options: dict[str, Any] = {"xla_allow_excess_precision": False}
    if jax.default_backend() == "cpu":
        options |= {"xla_backend_optimization_level": "0", "xla_llvm_disable_expensive_passes": True}
    return jax.jit(fun, compiler_options=options)
