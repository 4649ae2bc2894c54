"""MPX's interface over jaxamp: change the import to `from jaxamp import mpx`.

The law: a program written for MPX 0.1.8 runs unchanged, and gives the same bits wherever MPX's are right. Casting,
loss scaling and the optimizer step are jaxamp's own; this file gives them MPX's names. `filter_grad` and
`filter_value_and_grad` take one keyword more, `use_amp`.

>>> import equinox as eqx, jax, jax.numpy as jnp, optax
>>> from jaxamp import mpx
>>> model, optimizer = eqx.nn.Linear(2, 1, key=jax.random.key(0)), optax.sgd(0.1)
>>> optimizer_state = optimizer.init(eqx.filter(model, eqx.is_array))
>>> loss_scaling = mpx.DynamicLossScaling(mpx.FLOAT16_MAX, min_loss_scaling=jnp.ones(()), period=2000)
>>> def loss(model, batch):
...     return mpx.force_full_precision(jnp.mean)(jax.vmap(model)(batch) ** 2)
>>> loss_scaling, grads_finite, grads = mpx.filter_grad(loss, loss_scaling)(model, jnp.ones((4, 2)))
>>> model, optimizer_state = mpx.optimizer_update(model, optimizer, optimizer_state, grads, grads_finite)

What differs from MPX 0.1.8, each for a fault of it:

1. Gradients and loss are divided by the scale that they were made with. MPX takes the next one: a step that raises the
   scale halves them.
2. A float16 loss is returned as it is. MPX multiplies it by the scale first, and returns inf where that overflows.
3. A scale that is no power of two, such as `FLOAT16_MAX`, costs no precision: the backward pass starts from a power of
   two if the loss is float16.
4. `scale` multiplies in float32 at least. MPX casts the scale to float16, where 2**16 is inf.
5. `scale` and `unscale` leave integers, PRNG keys and leaves that are no numbers alone. MPX makes floats of integers,
   and raises at the others. So does `all_finite` at leaves that are no numbers.
6. The floor of a scale is positive, even if `min_loss_scaling` is zero. MPX's scale falls to zero and stays there.
7. The scale is held in float32, whatever numbers it is made with. MPX's `adjust` raises if it is made with float16, and
   Python numbers are refused.
8. `set_half_precision_datatype` takes names: MPX checks them and ignores them.
9. `HALF_PRECISION_DATATYPE` is the present dtype. MPX's is the one at import.
10. `force_full_precision` returns the half precision in use unless told otherwise. MPX returns float16, also for
    bfloat16.
11. `cast_function` casts results of any structure, and the arrays of a function that is a pytree. MPX casts arrays and
    plain tuples.
12. NumPy's float64 is cast where JAX would make it float32. MPX leaves it, and float32 creeps in.
13. `select_tree` selects numbers, and leaves of two dtypes. MPX takes Python numbers from the first tree whatever the
    predicate is, and raises at two dtypes.
14. Without mixed precision gradients are float32 too. MPX's are so in `filter_grad` without aux alone.
15. Errors say what was given, what was expected and what to write. MPX has assertions, which `python -O` removes.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

from ._scaling.cotangent import scaled as _scaled
from ._scaling.cotangent import unscaled
from ._scaling.grad import dynamic_scale_value_and_grad
from ._scaling.periods import as_scalar, as_state, counter_of
from ._scaling.state import DynamicScalerState
from ._scaling.update import update_if_finite
from ._transform.amp import amp, amp_stop
from ._tree import all_finite as all_finite
from ._tree import cast_floating, check_bool, is_inexact, tree_where

if TYPE_CHECKING:
    HALF_PRECISION_DATATYPE: Any
    FLOAT16_MAX: jax.Array
    BFLOAT16_MAX: jax.Array

Tree = TypeVar("Tree")

_FLOAT16_MAX, _BFLOAT16_MAX = (float(jnp.finfo(x).max) for x in (jnp.float16, jnp.bfloat16))

__all__ = [
    "DynamicLossScaling",
    "all_finite",
    "calculate_scaled_grad",
    "cast_function",
    "cast_to_bfloat16",
    "cast_to_float16",
    "cast_to_float32",
    "cast_to_full_precision",
    "cast_to_half_precision",
    "cast_tree",
    "filter_grad",
    "filter_value_and_grad",
    "force_full_precision",
    "half_precision_datatype",
    "optimizer_update",
    "scaled",
    "select_tree",
    "set_half_precision_datatype",
]


# -- the half precision in use

_HALVES = {np.dtype(x): x for x in (jnp.float16, jnp.bfloat16)}
_half: Any = jnp.float16


def half_precision_datatype() -> Any:
    """The dtype that stands for half precision: `jnp.float16` unless set otherwise."""
    return _half


def set_half_precision_datatype(datatype: Any) -> None:
    """Set the dtype that stands for half precision.

    Args:
        datatype: `jnp.float16` or `jnp.bfloat16`, or the name of one.

    **Sharp edges**

    - It holds for the whole process, and a function that is compiled already keeps what it was compiled with. Set it
      once, at the beginning.
    """
    global _half
    try:
        _half = _HALVES[jnp.dtype(datatype)]
    except (TypeError, KeyError) as error:
        raise (ValueError if isinstance(datatype, str) else TypeError)(
            f"set_half_precision_datatype got {datatype!r}; expected float16 or bfloat16. "
            "Write set_half_precision_datatype(jnp.bfloat16), or 'bfloat16'."
        ) from error


def __getattr__(name: str) -> Any:
    """What changes, and arrays: importing this module starts no backend."""
    match name:
        case "HALF_PRECISION_DATATYPE":
            return _half
        case "FLOAT16_MAX":
            return jnp.float32(_FLOAT16_MAX)
        case "BFLOAT16_MAX":
            return jnp.float32(_BFLOAT16_MAX)
    raise AttributeError(f"module 'jaxamp.mpx' has no attribute {name!r}")


# -- casting


def cast_tree(tree: Tree, dtype: Any) -> Tree:
    """Cast the arrays of a pytree that are float16, bfloat16 or float32.

    >>> from jaxamp import mpx
    >>> mpx.cast_tree({"w": jnp.ones(2), "step": jnp.int32(3)}, jnp.float16)
    {'step': Array(3, dtype=int32), 'w': Array([1., 1.], dtype=float16)}
    """
    return jax.tree.map(lambda x: cast_floating(x, dtype) if _is_short_float(x) else x, tree)


def _is_short_float(x: Any) -> bool:
    """NumPy's float64 is float32 to JAX, unless the user asked for 64 bits."""
    return is_inexact(x) and jax.dtypes.canonicalize_dtype(x.dtype) in (jnp.float16, jnp.bfloat16, jnp.float32)


def cast_to_float16(x: Tree) -> Tree:
    """`cast_tree` to float16."""
    return cast_tree(x, jnp.float16)


def cast_to_bfloat16(x: Tree) -> Tree:
    """`cast_tree` to bfloat16."""
    return cast_tree(x, jnp.bfloat16)


def cast_to_float32(x: Tree) -> Tree:
    """`cast_tree` to float32."""
    return cast_tree(x, jnp.float32)


def cast_to_full_precision(x: Tree) -> Tree:
    """`cast_tree` to float32."""
    return cast_tree(x, jnp.float32)


def cast_to_half_precision(x: Tree) -> Tree:
    """`cast_tree` to `half_precision_datatype()`."""
    return cast_tree(x, half_precision_datatype())


def cast_function(func: Callable[..., Any], dtype: Any, return_dtype: Any = None) -> Callable[..., Any]:
    """Call a function with its arguments cast.

    Args:
        func: The function. If it is a pytree, such as an Equinox module, its own arrays are cast too.
        dtype: The dtype of the arguments' floats.
        return_dtype: The dtype of the results' floats; `None` is `dtype`.

    >>> from jaxamp import mpx
    >>> mpx.cast_function(lambda x: {"y": x * 2}, jnp.float16, jnp.float32)(jnp.ones(2))
    {'y': Array([2., 2.], dtype=float32)}
    """

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        fn, args, kwargs = cast_tree((func, args, kwargs), dtype)
        return cast_tree(fn(*args, **kwargs), dtype if return_dtype is None else return_dtype)

    return wrapper


def force_full_precision(func: Callable[..., Any], return_dtype: Any = half_precision_datatype) -> Callable[..., Any]:
    """Run a function in float32: a sum, a mean, a softmax.

    With `use_amp` it is `jaxamp.amp_stop` as well.

    Args:
        func: The function.
        return_dtype: The dtype of the results' floats. By default the half precision in use when the function is
            called; `None` is float32.
    """

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        dtype = half_precision_datatype() if return_dtype is half_precision_datatype else return_dtype
        with amp_stop():
            return cast_function(func, jnp.float32, dtype)(*args, **kwargs)

    return wrapper


# -- loss scaling


class DynamicLossScaling(eqx.Module):
    """A loss scale that doubles after `period` finite steps, and is halved at an overflow.

    A pytree, to be carried from step to step. `jaxamp.DynamicScalerState` is what moves it.

    Attributes:
        loss_scaling: The scale, float32.
        min_loss_scaling: The scale is not lowered below this.
        counter: Finite steps in this period.
        factor: The scale is raised and lowered by this factor. It is never raised beyond 65504.
        period: Finite steps it takes to raise the scale.

    >>> from jaxamp import mpx
    >>> scaling = mpx.DynamicLossScaling(8.0, min_loss_scaling=1.0, period=2)
    >>> [float((scaling := scaling.adjust(finite)).loss_scaling) for finite in (True, True, False)]
    [8.0, 16.0, 8.0]
    """

    loss_scaling: jax.Array
    min_loss_scaling: jax.Array
    counter: jax.Array
    factor: int
    period: int

    def __init__(
        self, loss_scaling: Any, min_loss_scaling: Any, factor: Any = 2, period: Any = 2000, counter: Any = None
    ):
        name, counter = "DynamicLossScaling", 0 if counter is None else counter
        self.loss_scaling = as_scalar(name, "loss_scaling", loss_scaling, np.float32, "2.0**15")
        self.min_loss_scaling = as_scalar(name, "min_loss_scaling", min_loss_scaling, np.float32, "1.0", positive=False)
        self.counter = as_scalar(name, "counter", counter, np.int32, "0", positive=False)
        as_scalar(name, "factor", factor, np.float32, "2")
        as_scalar(name, "period", period, np.int32, "2000")
        self.factor, self.period = factor, period

    def scale(self, tree: Tree) -> Tree:
        """A pytree's floats times the scale, in float32 at least."""
        return _scaled(tree, self.loss_scaling)

    def unscale(self, tree: Tree) -> Tree:
        """A pytree's floats divided by the scale, in float32 at least."""
        return unscaled(tree, self.loss_scaling)

    def adjust(self, grads_finite: Any) -> "DynamicLossScaling":
        """The next loss scaling, given whether this step's gradients were finite."""
        check_bool("adjust", grads_finite, "loss_scaling.adjust(mpx.all_finite(grads))")
        return self._after(self._state().adjust(grads_finite))

    def _state(self) -> DynamicScalerState:
        return as_state(
            self.loss_scaling, self.counter, self.factor, self.period, self.min_loss_scaling, maximum=_FLOAT16_MAX
        )

    def _after(self, state: DynamicScalerState) -> "DynamicLossScaling":
        """Both bounds hold after a step, also for a scale that began beyond them."""
        scale = jnp.clip(state.scaler, state.min_scaler, state.max_scaler)
        return eqx.tree_at(lambda x: (x.loss_scaling, x.counter), self, (scale, counter_of(state)))


def scaled(func: Callable[..., Any], scaling: DynamicLossScaling, has_aux: bool = False) -> Callable[..., Any]:
    """A function whose result is scaled; with `has_aux` the first of the two that it returns."""
    _check_scaling("scaled", scaling)

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not has_aux:
            return scaling.scale(func(*args, **kwargs))
        value, aux = func(*args, **kwargs)
        return scaling.scale(value), aux

    return wrapper


def select_tree(pred: Any, a: Tree, b: Tree) -> Tree:
    """`a` where `pred` holds, else `b`, for a scalar bool. Leaves that are neither arrays nor numbers are `a`'s."""
    check_bool("select_tree", pred, "select_tree(mpx.all_finite(grads), new, old)")
    numbers = (jax.Array, np.ndarray, np.generic, bool, int, float, complex)
    return tree_where(pred, a, jax.tree.map(lambda x, y: y if isinstance(x, numbers) else x, a, b))


# -- gradients


def filter_grad(
    func: Callable[..., Any],
    scaling: DynamicLossScaling,
    has_aux: bool = False,
    use_mixed_precision: bool = True,
    *,
    use_amp: bool = False,
) -> Callable[..., Any]:
    """Differentiate a loss in mixed precision, with dynamic loss scaling.

    Args:
        func: The loss. Its first argument's floating-point arrays are differentiated, as with `equinox.filter_grad`.
        scaling: The loss scaling of this step.
        has_aux: Whether `func` returns `(loss, aux)`.
        use_mixed_precision: If `False`, this is `equinox.filter_grad`: no cast of the arguments, no scaling.
        use_amp: Run `jaxamp.amp(func)`, which decides for each operation, in place of casting all arguments to half
            precision. The loss can then do without `force_full_precision`.

    Returns:
        A function like `func` that returns `(scaling, grads_finite, grads)`, or `(scaling, grads_finite, grads, aux)`:
        the next loss scaling, whether the gradients are finite, and the gradients in float32.

    **Sharp edges**

    - Gradients that are not finite come back as they are. Give `grads_finite` to `optimizer_update`.
    - With `use_amp`, call it inside of `jit`. Outside, each call compiles the loss anew.
    """
    _check_scaling("filter_grad", scaling)

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        step = _differentiate(func, scaling, has_aux, use_mixed_precision, use_amp)
        out, next_scaling, finite, grads = step(*args, **kwargs)
        return (next_scaling, finite, grads, out[1]) if has_aux else (next_scaling, finite, grads)

    return wrapper


def filter_value_and_grad(
    func: Callable[..., Any],
    scaling: DynamicLossScaling,
    has_aux: bool = False,
    use_mixed_precision: bool = True,
    *,
    use_amp: bool = False,
) -> Callable[..., Any]:
    """Like `filter_grad`, with the loss: `(value, scaling, grads_finite, grads)`, or `((value, aux), ...)`.

    >>> from jaxamp import mpx
    >>> scaling = mpx.DynamicLossScaling(2.0**10, 1.0, period=1)
    >>> value, scaling, finite, grads = mpx.filter_value_and_grad(jnp.square, scaling)(jnp.float32(3))
    >>> float(value), float(grads), float(scaling.loss_scaling)
    (9.0, 6.0, 2048.0)
    """
    _check_scaling("filter_value_and_grad", scaling)

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return _differentiate(func, scaling, has_aux, use_mixed_precision, use_amp)(*args, **kwargs)

    return wrapper


def _differentiate(
    func: Callable[..., Any], scaling: DynamicLossScaling, has_aux: bool, use_mixed_precision: bool, use_amp: bool
) -> Callable[..., Any]:
    def plain(*args: Any, **kwargs: Any) -> Any:
        out, grads = eqx.filter_value_and_grad(func, has_aux=has_aux)(*args, **kwargs)
        return out, scaling, jnp.array(True), cast_to_full_precision(grads)

    def mixed(*args: Any, **kwargs: Any) -> Any:
        if use_amp:
            loss: Callable[..., Any] = amp(func, compute_dtype=half_precision_datatype())
        else:
            loss, (args, kwargs) = func, cast_to_half_precision((args, kwargs))
        step = dynamic_scale_value_and_grad(loss, has_aux=has_aux)
        state, (out, grads) = step(*args, dynamic_scaler_state=scaling._state(), **kwargs)
        out = (cast_to_full_precision(out[0]), out[1]) if has_aux else cast_to_full_precision(out)
        return out, scaling._after(state), state.finite, grads

    return mixed if use_mixed_precision else plain


def calculate_scaled_grad(
    func: Callable[..., Any], scaling: DynamicLossScaling, has_aux: bool = False, use_mixed_precision: bool = True
) -> Callable[..., Any]:
    """The loss and its gradients, both scaled, for `scaling.unscale`. The gradients are in half precision.

    It returns `(value, grads)`, or `((value, aux), grads)`. To get them unscaled, use `filter_value_and_grad`, which
    does not multiply the loss.
    """
    _check_scaling("calculate_scaled_grad", scaling)

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not use_mixed_precision:
            return eqx.filter_value_and_grad(func, has_aux=has_aux)(*args, **kwargs)
        args, kwargs = cast_to_half_precision((args, kwargs))
        return eqx.filter_value_and_grad(scaled(func, scaling, has_aux), has_aux=has_aux)(*args, **kwargs)

    return wrapper


def optimizer_update(
    model: Tree, optimizer: optax.GradientTransformation, optimizer_state: Any, grads: Any, grads_finite: Any
) -> tuple[Tree, Any]:
    """Take an optimizer step if the gradients are finite: `jaxamp.update_if_finite`."""
    check_bool("optimizer_update", grads_finite, "the grads_finite that filter_grad returned, or mpx.all_finite(grads)")
    return update_if_finite(model, optimizer, optimizer_state, grads, grads_finite)


# -- bad input


def _check_scaling(name: str, scaling: Any) -> None:
    if not isinstance(scaling, DynamicLossScaling):
        raise TypeError(
            f"{name} got {scaling!r}, of type {type(scaling).__name__}, as its loss scaling; expected a "
            f"jaxamp.mpx.DynamicLossScaling. Write mpx.{name}(loss, mpx.DynamicLossScaling(2.0**15, 1.0))."
        )
