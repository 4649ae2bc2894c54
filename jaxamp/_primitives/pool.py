"""Maxima and minima over windows, place by place on a GPU, with a gradient in two kernels.

XLA has an operation for the gradient, `select_and_scatter`. On a GPU it looks for the place of each maximum, writes it
as four integers, fills an array with zeros, and adds the cotangents to it one by one, with atomics. Here each place is
a number of one byte, and each entry of the gradient asks the few windows that it is in: in a ResNet-50 that takes
.61 ms, and XLA's operation .85 (H200, jax 0.11). Other platforms keep XLA's.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import ad, mlir, xla

from .._compat import Primitive, jet_of
from .._jaxpr import bind_primitive
from .._traits import Traits, declare
from .batches import map_in_front

POOL = Primitive("pool")
PICKED = Primitive("picked_in_windows")  # of a tangent: the entries that were chosen
PUT_BACK = Primitive("put_into_windows")  # of a cotangent: where they came from

_OF_JAX = {True: lax.reduce_window_max_p, False: lax.reduce_window_min_p}
POOLS = tuple(_OF_JAX.values())  # JAX's primitives: maxima and minima over windows
_MOST_PLACES = 32  # in a window. A kernel looks at each of them.


class Windows(NamedTuple):
    """The windows of a pooling, and whether it takes the maximum."""

    size: tuple[int, ...]
    strides: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    maximum: bool

    @property
    def params(self) -> dict[str, Any]:
        """As JAX's primitives take them."""
        ones = (1,) * len(self.size)
        return {
            "window_dimensions": self.size,
            "window_strides": self.strides,
            "padding": self.padding,
            "base_dilation": ones,
            "window_dilation": ones,
        }

    @property
    def worst(self) -> float:
        return -np.inf if self.maximum else np.inf

    def better(self, a: Any, b: Any) -> Any:
        """Whether `a` is kept, if `b` comes after it: the first one, of equal ones."""
        return a >= b if self.maximum else a <= b

    def mapped(self) -> "Windows":
        """The windows of a batch."""
        return self._replace(size=(1, *self.size), strides=(1, *self.strides), padding=((0, 0), *self.padding))


def windows_of(eqn: Any) -> Windows | None:
    """The windows of a maximum or minimum; None if `pool` is not for them."""
    params, maximum = eqn.params, eqn.primitive is lax.reduce_window_max_p
    dilated = any(d != 1 for d in (*params["base_dilation"], *params["window_dilation"]))
    if dilated or int(np.prod(params["window_dimensions"])) > _MOST_PLACES:
        return None
    moving = [i for i, size in enumerate(params["window_dimensions"]) if size != 1 or params["window_strides"][i] != 1]
    if not all(isinstance(eqn.invars[0].aval.shape[i], int) for i in moving):
        return None
    padding = tuple((int(low), int(high)) for low, high in params["padding"])
    return Windows(tuple(params["window_dimensions"]), tuple(params["window_strides"]), padding, maximum)


def pool(x: Any, windows: Windows) -> Any:
    """The maximum or minimum over each window."""
    return bind_primitive(POOL, x, windows=windows)


# -- what they are made of


def _pooled(x: Any, *, windows: Windows) -> Any:
    return _OF_JAX[windows.maximum].bind(x, **windows.params)


def _picked(t: Any, x: Any, *, windows: Windows) -> Any:
    """By JAX's own rule."""
    return jax.jvp(functools.partial(_pooled, windows=windows), (x,), (t,))[1]


def _put_back(ct: Any, x: Any, *, windows: Windows) -> Any:
    return jax.vjp(functools.partial(_pooled, windows=windows), x)[1](ct)[0]


def put_back_by_places(ct: Any, x: Any, *, windows: Windows) -> Any:
    """The same in few kernels. Overlapping windows are added up in float32.

    Windows begin at each n-th entry, where the stride is n, so neighbouring entries are in different places of them.
    All that are in the same places are made together, and then they are put side by side.
    """
    chosen, wide = _chosen(x, windows), max(ct.dtype, np.dtype(np.float32), key=lambda dtype: dtype.itemsize)
    numbers = {place: i for i, place in enumerate(_places(windows))}
    counts = [-(-(n + low) // s) for n, s, (low, _) in zip(x.shape, windows.strides, windows.padding, strict=True)]

    def shifted(value: Any, fill: int, back: Sequence[int]) -> Any:
        """The windows that begin so many strides before each entry."""
        config = [(b, many - b - had, 0) for b, many, had in zip(back, counts, ct.shape, strict=True)]
        return lax.pad(value, value.dtype.type(fill), config)

    def together(first: tuple[int, ...]) -> Any:
        """All entries of which the first place in a window is `first`."""
        found = []
        every = zip(windows.size, first, windows.strides, strict=True)
        for back in itertools.product(*(range(-(-(size - at) // stride)) for size, at, stride in every)):
            place = tuple(at + b * stride for at, b, stride in zip(first, back, windows.strides, strict=True))
            is_mine = shifted(chosen, -1, back) == np.int8(numbers[place])
            found.append(jnp.where(is_mine, shifted(ct, 0, back), ct.dtype.type(0)).astype(wide))
        total = functools.reduce(lax.add, found) if found else jnp.zeros(counts, wide)
        return total.astype(ct.dtype)

    if windows.size == windows.strides:
        out = _in_windows(shifted(ct, 0, (0,) * ct.ndim), shifted(chosen, -1, (0,) * ct.ndim), windows)
    else:
        out = _side_by_side(together, windows.strides)
    begins = [low for low, _ in windows.padding]
    return lax.slice(out, begins, [begin + size for begin, size in zip(begins, x.shape, strict=True)])


def _in_windows(ct: Any, chosen: Any, windows: Windows) -> Any:
    """Each number of `ct` in its window, at the place that was chosen, in one kernel: no entry is in two windows."""
    alternating = lambda first, then: [size for pair in zip(first, then, strict=True) for size in pair]
    ones = (1,) * ct.ndim
    numbers = np.arange(math.prod(windows.size), dtype=np.int8).reshape(alternating(ones, windows.size))
    spread = lambda value: value.reshape(alternating(ct.shape, ones))
    out = jnp.where(spread(chosen) == numbers, spread(ct), ct.dtype.type(0))
    return out.reshape([many * size for many, size in zip(ct.shape, windows.size, strict=True)])


def _side_by_side(part: Callable[[tuple[int, ...]], Any], strides: Sequence[int], begin: tuple[int, ...] = ()) -> Any:
    """An array of which each part has the entries that begin somewhere, and then each n-th."""
    axis = len(begin)
    if axis == len(strides):
        return part(begin)
    parts = [_side_by_side(part, strides, (*begin, i)) for i in range(strides[axis])]
    if len(parts) == 1:
        return parts[0]
    shape = list(parts[0].shape)
    shape[axis] *= strides[axis]
    return jnp.stack(parts, axis=axis + 1).reshape(shape)


def pooled_by_places(x: Any, *, windows: Windows) -> Any:
    """The maximum or minimum, in the dtype of `x`: XLA would write one over windows in float32 too, for readers in
    float32."""
    return functools.reduce(lax.max if windows.maximum else lax.min, _entries(x, windows))


def _chosen(x: Any, windows: Windows) -> Any:
    """The number of the place in each window that is chosen."""
    best, *others = _entries(x, windows)
    chosen = jnp.zeros(best.shape, np.int8)
    for i, value in enumerate(others, 1):
        stays = windows.better(best, value)
        best, chosen = jnp.where(stays, best, value), jnp.where(stays, chosen, np.int8(i))
    return chosen


def _entries(x: Any, windows: Windows) -> Iterator[Any]:
    """For each place, the entries that all windows have there."""
    padded = lax.pad(x, x.dtype.type(windows.worst), [(low, high, 0) for low, high in windows.padding])
    for place in _places(windows):
        ends = [size - window + at + 1 for size, window, at in zip(padded.shape, windows.size, place, strict=True)]
        yield lax.slice(padded, place, ends, windows.strides)


def _places(windows: Windows) -> Iterator[tuple[int, ...]]:
    return itertools.product(*map(range, windows.size))


# -- the primitives


def _define(primitive: Primitive, fun: Callable[..., Any], aval: Callable[..., Any], traits: Traits) -> None:
    declare(primitive, traits)
    primitive.def_impl(functools.partial(xla.apply_primitive, primitive))
    primitive.def_abstract_eval(aval)
    mlir.register_lowering(primitive, mlir.lower_fun(fun, multiple_results=False))
    map_in_front(primitive, lambda params: {"windows": params["windows"].mapped()})


def _aval_of_pooled(x: Any, *, windows: Windows) -> Any:
    return _OF_JAX[windows.maximum].abstract_eval(x, **windows.params)[0]


def _jvp(primals: Any, tangents: Any, *, windows: Windows) -> tuple[Any, Any]:
    (x,), (t,) = primals, tangents
    return POOL.bind(x, windows=windows), PICKED.bind(t, x, windows=windows)


def _transpose(of: Primitive) -> Callable[..., Any]:
    def transpose(ct: Any, t: Any, x: Any, *, windows: Windows) -> list[Any]:
        return [ct if type(ct) is ad.Zero else of.bind(ct, x, windows=windows), None]

    return transpose


_define(POOL, _pooled, _aval_of_pooled, Traits(moves=True, plain_params=True, jet=jet_of(_pooled)))
_define(
    PICKED,
    _picked,
    lambda t, x, *, windows: _aval_of_pooled(x, windows=windows).update(dtype=t.dtype),
    Traits(fixed_dtype=True, jet=jet_of(_picked)),
)
_define(
    PUT_BACK,
    _put_back,
    lambda ct, x, *, windows: x.update(dtype=ct.dtype),
    Traits(fixed_dtype=True, jet=jet_of(_put_back)),
)
for _platform in ("cuda", "rocm"):
    for _primitive, _fun in ((POOL, pooled_by_places), (PUT_BACK, put_back_by_places)):
        mlir.register_lowering(_primitive, mlir.lower_fun(_fun, multiple_results=False), platform=_platform)
ad.primitive_jvps[POOL] = _jvp
for _primitive, _other in ((PICKED, PUT_BACK), (PUT_BACK, PICKED)):
    ad.defjvp(
        _primitive, functools.partial(lambda of, g, t, x, *, windows: of.bind(g, x, windows=windows), _primitive), None
    )
    ad.primitive_transposes[_primitive] = _transpose(_other)
