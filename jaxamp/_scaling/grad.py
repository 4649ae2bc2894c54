"""Gradients through a dynamic loss scaler: `dynamic_scale_grad`, `dynamic_scale_value_and_grad`, `dynamic_scale_tx`.

The law: the results are those of the plain transform, along with the next state of the scaler. The loss and aux are
untouched. The backward pass starts from the scale instead of one (`cotangent.py`); the gradients are unscaled, checked,
and recomputed if they overflow (`evaluation.py`, `step.py`, `retry.py`).
"""

import functools
import operator
from collections.abc import Callable
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar, overload

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from .._jaxpr import along
from .._transform.call import split_call
from .._transform.loss_scaling import is_scaled_already, scaling
from .._transform.nnx_state import has_modules, loaded_nnx, node_test, nodes_of, split_nodes
from .._tree import is_inexact_array, is_inexact_array_like, is_none
from .cotangent import as_cotangent, scale_cotangent
from .evaluation import Evaluation, evaluation_of
from .nnx_snapshot import snapshot_of
from .signatures import ScaledFunction, ScaledGrad, check_names, wraps_with_state
from .state import DynamicScalerState, check_state
from .step import scaler_step

P = ParamSpec("P")
First = TypeVar("First")
Value = TypeVar("Value")
Aux = TypeVar("Aux")
Out = TypeVar("Out")

_STATE = "dynamic_scaler_state"


@overload
def dynamic_scale_grad(
    fun: Callable[Concatenate[First, ...], tuple[Value, Aux]],
    *,
    has_aux: Literal[True],
    redo_on_nan: int = ...,
    filter: Literal[True] = ...,
    axis_name: Any = ...,
    state_if_finite: bool = ...,
) -> ScaledGrad[First, tuple[First, Aux]]: ...
@overload
def dynamic_scale_grad(
    fun: Callable[Concatenate[First, ...], Value],
    *,
    has_aux: Literal[False] = ...,
    redo_on_nan: int = ...,
    filter: Literal[True] = ...,
    axis_name: Any = ...,
    state_if_finite: bool = ...,
) -> ScaledGrad[First, First]: ...
@overload
def dynamic_scale_grad(
    fun: Callable[..., Any],
    *,
    has_aux: bool = ...,
    redo_on_nan: int = ...,
    filter: bool = ...,
    axis_name: Any = ...,
    state_if_finite: bool = ...,
    **kwargs: Any,
) -> ScaledFunction[Any]: ...
def dynamic_scale_grad(
    fun: Callable[..., Any],
    *,
    has_aux: bool = False,
    redo_on_nan: int = 0,
    filter: bool = True,
    axis_name: Any = None,
    state_if_finite: bool = False,
    **kwargs: Any,
) -> Any:
    """Differentiate a loss with dynamic loss scaling, without its value. See `dynamic_scale_value_and_grad`.

    Args:
        fun: The loss, most often `jaxamp.amp(loss_fn)`.
        has_aux: Whether `fun` returns a pair, as in `jax.grad`.
        redo_on_nan: How many times to recompute non-finite gradients at a smaller scale.
        filter: If `True`, as `equinox.filter_grad`; if `False`, as `jax.grad`.
        axis_name: In `pmap` and `shard_map`, the axes along which devices take part in one step.
        state_if_finite: Whether a step with non-finite gradients leaves the state of Flax NNX objects as it was.
        **kwargs: Passed to `jax.value_and_grad` if `filter` is `False`.

    Returns:
        A function like `fun` with the keyword `dynamic_scaler_state`. It returns `(next_state, grads)`, or
        `(next_state, (grads, aux))`.

    >>> import jax.numpy as jnp, jaxamp
    >>> grad_fn = jaxamp.dynamic_scale_grad(lambda w, x: jnp.sum(w * x))
    >>> state, grads = grad_fn(jnp.ones(2), jnp.ones(2), dynamic_scaler_state=jaxamp.DynamicScalerState())
    >>> grads, int(state.count)
    (Array([1., 1.], dtype=float32), 1)
    """
    name = "dynamic_scale_grad"

    def assemble(value: Any, aux: Any, grads: Any) -> Any:
        return (grads, aux) if has_aux else grads

    return _dynamic_scale(name, fun, assemble, has_aux, redo_on_nan, filter, axis_name, state_if_finite, kwargs)


@overload
def dynamic_scale_value_and_grad(
    fun: Callable[Concatenate[First, ...], tuple[Value, Aux]],
    *,
    has_aux: Literal[True],
    redo_on_nan: int = ...,
    filter: Literal[True] = ...,
    axis_name: Any = ...,
    state_if_finite: bool = ...,
) -> ScaledGrad[First, tuple[tuple[Value, Aux], First]]: ...
@overload
def dynamic_scale_value_and_grad(
    fun: Callable[Concatenate[First, ...], Value],
    *,
    has_aux: Literal[False] = ...,
    redo_on_nan: int = ...,
    filter: Literal[True] = ...,
    axis_name: Any = ...,
    state_if_finite: bool = ...,
) -> ScaledGrad[First, tuple[Value, First]]: ...
@overload
def dynamic_scale_value_and_grad(
    fun: Callable[..., Any],
    *,
    has_aux: bool = ...,
    redo_on_nan: int = ...,
    filter: bool = ...,
    axis_name: Any = ...,
    state_if_finite: bool = ...,
    **kwargs: Any,
) -> ScaledFunction[Any]: ...
def dynamic_scale_value_and_grad(
    fun: Callable[..., Any],
    *,
    has_aux: bool = False,
    redo_on_nan: int = 0,
    filter: bool = True,
    axis_name: Any = None,
    state_if_finite: bool = False,
    **kwargs: Any,
) -> Any:
    """Differentiate a loss with dynamic loss scaling.

    The backward pass starts from the scale instead of one, so that small gradients don't vanish in float16; afterwards
    the gradients are divided by it, in float32. The loss itself is never multiplied, so scaling can't make it overflow;
    the loss and aux come back unchanged. Only the gradients decide whether the step counts as finite.

    Args:
        fun: The loss, most often `jaxamp.amp(loss_fn)`. Returns a scalar, or `(scalar, aux)`.
        has_aux: Whether `fun` returns a pair, as in `jax.value_and_grad`.
        redo_on_nan: How many times to recompute non-finite gradients at a smaller scale, inside the compiled step. If
            they never become finite, the last ones are returned as they are, the scale is lowered once, and `skipped`
            in the state counts the step. If the loss itself is not finite, no scale would help, and none is tried.
        filter: If `True`, differentiate the first argument's floating-point arrays, with
            `equinox.filter_value_and_grad`; of a Flax NNX model the `nnx.Param`s, with `nnx.value_and_grad`. If
            `False`, use `jax.value_and_grad`, which takes `argnums`, `holomorphic` and `allow_int`.
        axis_name: In `pmap` and `shard_map`, the axis or axes along which all devices take part in one step, so that
            they agree on whether it was finite. Not needed under `jit`, where sharded arrays are seen as a whole.
        state_if_finite: What a step with non-finite gradients does to the state of Flax NNX objects, such as batch
            statistics and the counters of dropout. If `False`, it moves on, once, as with `nnx.value_and_grad`; if
            `True`, it stays as it was. Variables that the step has created stay in both cases.
        **kwargs: Passed to `jax.value_and_grad` if `filter` is `False`.

    Returns:
        A function like `fun` with the keyword `dynamic_scaler_state`, a `DynamicScalerState`. It returns
        `(next_state, (value, grads))`, or `(next_state, ((value, aux), grads))`. Gradients are float32 or wider, even
        those of float16 parameters.

    >>> import jax.numpy as jnp, jaxamp
    >>> loss = jaxamp.amp(lambda w, x: jnp.sum((x @ w) ** 2))
    >>> grad_fn = jaxamp.dynamic_scale_value_and_grad(loss, redo_on_nan=3)
    >>> state = jaxamp.DynamicScalerState()
    >>> state, (value, grads) = grad_fn(jnp.ones((2, 1)), jnp.ones((4, 2)) / 2, dynamic_scaler_state=state)
    >>> float(value), grads[0, 0].item(), float(state.scaler), int(state.total_redos)
    (4.0, 4.0, 16384.0, 1)

    **Sharp edges**

    - Non-finite gradients are returned as they are. Pass `state.finite` to `jaxamp.update_if_finite`.
    - In `pmap`, and in `shard_map` where the gradients differ between devices, leave out `axis_name` only if each
      device trains its own model. With `redo_on_nan`, devices that disagree would wait for each other forever.
    - A float16 loss has a float16 cotangent, which holds scales up to 2**15, so the state's scale stays within that.
    - Outside `jit`, `redo_on_nan` compiles its loop at each call, which takes about a second. With `redo_on_nan`, the
      result can't be differentiated again in reverse mode.
    """
    name = "dynamic_scale_value_and_grad"

    def assemble(value: Any, aux: Any, grads: Any) -> Any:
        return ((value, aux), grads) if has_aux else (value, grads)

    return _dynamic_scale(name, fun, assemble, has_aux, redo_on_nan, filter, axis_name, state_if_finite, kwargs)


def _dynamic_scale(
    name: str,
    fun: Callable[..., Any],
    assemble: Callable[[Any, Any, Any], Any],
    has_aux: bool,
    redo_on_nan: int,
    filter: bool,
    axis_name: Any,
    state_if_finite: bool,
    kwargs: dict[str, Any],
) -> Callable[..., Any]:
    """Differentiate `fun` with loss scaling; `assemble` arranges value, aux and gradients as the user gets them."""
    _check_options(name, fun, redo_on_nan)
    check_names(name, kwargs, "has_aux", "redo_on_nan", "filter", "axis_name", "state_if_finite")
    if filter and kwargs:
        raise TypeError(
            f"{name} got {', '.join(kwargs)} with filter=True; expected them only with filter=False. Equinox always "
            f"differentiates the first argument: put it first, or write {name}(fun, filter=False, ...)."
        )

    @wraps_with_state(fun, _STATE)
    def scaled_grad(*args: Any, **f_kwargs: Any) -> tuple[DynamicScalerState, Any]:
        state = _pop_state(name, f_kwargs)
        transform: Any = jax.value_and_grad
        if filter:
            _check_first_argument(name, args)
            transform = eqx.filter_value_and_grad
            if nodes_of((args, f_kwargs)):
                transform = functools.partial(_nnx_value_and_grad, name)
        else:
            _check_argnums(name, args, kwargs)

        def evaluate(scale: jax.Array, *args: Any, **f_kwargs: Any) -> Evaluation:
            def loss(*args: Any, **f_kwargs: Any) -> Any:
                out = fun(*args, **f_kwargs) if filter else _with_state_kept(name, fun, args, f_kwargs)
                value, aux = _split_loss(name, out, has_aux)
                _check_not_scaled(name, out[0] if has_aux else out, state)
                used = as_cotangent(scale, value.dtype)
                return scale_cotangent(name, value, used), (used, aux)

            with scaling():
                (value, (used, aux)), grads = transform(loss, has_aux=True, **kwargs)(*args, **f_kwargs)
            return evaluation_of(grads, used, axis_name, functools.partial(assemble, value, aux), value)

        return _step(evaluate, args, f_kwargs, state, redo_on_nan, state_if_finite)

    return scaled_grad


def _step(
    evaluate: Callable[..., Evaluation],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    state: DynamicScalerState,
    redo_on_nan: int,
    state_if_finite: bool = False,
) -> tuple[DynamicScalerState, Any]:
    """Evaluate, with retries, and return the scaler's next state and the results.

    NNX objects get the state that the last evaluation leaves, however often it was repeated.
    """
    if not nodes_of((args, kwargs)):
        return scaler_step(lambda scale: evaluate(scale, *args, **kwargs), state, redo_on_nan)
    snapshot = snapshot_of((args, kwargs))
    nodes = split_call(evaluate, args, kwargs).nodes

    def evaluate_without_nodes(scale: jax.Array) -> Evaluation:
        found: list[Evaluation] = []

        def run(*args: Any, **kwargs: Any) -> Any:
            found.append(evaluate(scale, *args, **kwargs))
            return found[-1].results

        call, arrays, _ = split_call(run, args, kwargs)
        results = call(*arrays)
        return found[-1]._replace(results=results)

    state, (arrays, result) = scaler_step(evaluate_without_nodes, state, redo_on_nan)
    results = result.with_arrays(arrays, nodes)
    if state_if_finite:
        snapshot.restore_unless(state.finite)
    return state, results


def _nnx_value_and_grad(name: str, loss: Callable[..., Any], *, has_aux: bool) -> Callable[..., Any]:
    """Differentiate the parameters of NNX modules, or the floats of any other first argument.

    NNX objects among the other arguments, such as an `nnx.Rngs`, are updated too.
    """
    nnx = loaded_nnx()
    transform = getattr(nnx, "compat", nnx).value_and_grad  # the same in all modes of NNX

    def value_and_grad(first: Any, *others: Any, **kwargs: Any) -> Any:
        if has_modules(first):

            def of_first(first: Any, others: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
                return loss(first, *others, **kwargs)

            return transform(of_first, has_aux=has_aux)(first, others, kwargs)
        leaves, structure = jax.tree.flatten(first)
        which = [i for i, x in enumerate(leaves) if eqx.is_inexact_array(x)]

        def of_floats(floats: list[Any], others: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            whole = along(lambda *xs: jax.tree.unflatten(structure, xs), leaves, which)(*floats)
            return _with_state_kept(name, lambda first: loss(first, *others, **kwargs), (whole,), {})

        out, grads = transform(of_floats, has_aux=has_aux)([leaves[i] for i in which], others, kwargs)
        found = dict(zip(which, grads, strict=True))
        return out, jax.tree.unflatten(structure, [found.get(i) for i in range(len(leaves))])

    return value_and_grad


def dynamic_scale_tx(
    transform: Callable[Concatenate[Any, P], Callable[..., Out]],
    redo_on_nan: int = 0,
    *,
    where: Callable[[Any], Any] | None = None,
    axis_name: Any = None,
) -> Callable[Concatenate[Callable[..., Any], P], ScaledFunction[Out]]:
    """Add a dynamic loss scaler to any transform that computes gradients.

    Args:
        transform: Takes a function and returns one that differentiates it: `jax.grad`, `jax.jacrev`, a per-example
            gradient, or your own.
        redo_on_nan: As for `dynamic_scale_value_and_grad`.
        where: Picks the gradients out of the results of the transformed function, as in `equinox.tree_at`. By default,
            gradients are expected where JAX and Equinox return them: all results; the first with `has_aux=True`; the
            second for `value_and_grad`.
        axis_name: As for `dynamic_scale_value_and_grad`.

    Returns:
        A transform. The functions it returns take the keyword `dynamic_scaler_state` and return
        `(next_state, results)`.

    >>> import jax, jax.numpy as jnp, jaxamp
    >>> per_example = dynamic_scale_tx(lambda loss: jax.vmap(jax.grad(loss), (None, 0)))
    >>> state = jaxamp.DynamicScalerState()
    >>> state, grads = per_example(lambda w, x: w * x)(3.0, jnp.arange(3.0), dynamic_scaler_state=state)
    >>> grads
    Array([0., 1., 2.], dtype=float32)

    `jax.jacrev`, and a transform of your own that returns more than gradients:

    >>> state, jacobian = dynamic_scale_tx(jax.jacrev)(jnp.square)(jnp.ones(2), dynamic_scaler_state=state)
    >>> def grad_and_norm(loss):
    ...     return lambda w: (jax.grad(loss)(w), jnp.linalg.norm(w))
    >>> transform = dynamic_scale_tx(grad_and_norm, where=lambda results: results[0])
    >>> state, (grads, norm) = transform(lambda w: jnp.sum(w**2))(jnp.ones(4), dynamic_scaler_state=state)
    >>> float(grads[0]), float(norm)
    (2.0, 2.0)

    **Sharp edges**

    - If your own transform returns more than gradients, it needs `where`. The other results come back unchanged.
    - The transform is applied at each call. If it compiles, it compiles each time: put `jit` around the outermost call.
    - A float16 result has a float16 cotangent. A scale above 2**15 overflows there and gets lowered.
    """
    name = "dynamic_scale_tx"
    _check_options(name, transform, redo_on_nan)

    def scaled_transform(fun: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if _STATE in kwargs or not callable(fun):
            given = f"{_STATE}, where it takes the loss" if _STATE in kwargs else f"{_describe(fun)} as the loss"
            raise TypeError(
                f"the transform that {name} returned got {given}; expected a function alone, and the state where its "
                f"gradients are asked for. Write jaxamp.{name}(jax.grad)(loss_fn)(params, {_STATE}=state)."
            )
        has_aux = bool(kwargs.get("has_aux", False))
        grads_of = where or _default_where(transform, has_aux)

        @wraps_with_state(fun, _STATE)
        def scaled_fun(*f_args: Any, **f_kwargs: Any) -> tuple[DynamicScalerState, Any]:
            state = _pop_state(name, f_kwargs)

            def evaluate(scale: jax.Array, *f_args: Any, **f_kwargs: Any) -> Evaluation:
                def scale_leaf(x: Any) -> Any:
                    return scale_cotangent(name, jnp.asarray(x), scale) if is_inexact_array(x) else x

                @functools.wraps(fun, updated=())
                def fun_with_scaled_cotangent(*f_args: Any, **f_kwargs: Any) -> Any:
                    out = fun(*f_args, **f_kwargs)
                    for x in jax.tree.leaves(out[0] if has_aux else out):
                        _check_not_scaled(name, x, state)
                    return (jax.tree.map(scale_leaf, out[0]), out[1]) if has_aux else jax.tree.map(scale_leaf, out)

                with scaling():
                    results = transform(fun_with_scaled_cotangent, *args, **kwargs)(*f_args, **f_kwargs)
                if grads_of is None:
                    return evaluation_of(results, scale, axis_name, lambda grads: grads)
                put_back = functools.partial(eqx.tree_at, grads_of, results, is_leaf=is_none)
                return evaluation_of(grads_of(results), scale, axis_name, put_back)

            return _step(evaluate, f_args, f_kwargs, state, redo_on_nan)

        return scaled_fun

    return scaled_transform


def _default_where(transform: Any, has_aux: bool) -> Callable[[Any], Any] | None:
    """Pick the gradients out of the results of the libraries' transforms; None if all results are gradients."""
    known = [jax.value_and_grad, eqx.filter_value_and_grad, getattr(loaded_nnx(), "value_and_grad", None)]
    if transform in known:
        return lambda results: results[1]
    return (lambda results: results[0]) if has_aux else None


# -- bad input


def _check_options(name: str, fun: Any, redo_on_nan: Any) -> None:
    if not callable(fun):
        raise TypeError(
            f"{name} got {fun!r}, of type {type(fun).__name__}; expected a function. "
            f"Write jaxamp.{name}({'jax.grad' if name.endswith('tx') else 'jaxamp.amp(loss_fn)'})."
        )
    if isinstance(redo_on_nan, bool) or not isinstance(redo_on_nan, int | np.integer) or redo_on_nan < 0:
        raise ValueError(
            f"{name} got redo_on_nan={redo_on_nan!r}; expected a number of recomputations, 0 or more. "
            "Write redo_on_nan=3, or leave it out to skip steps that overflow."
        )


def _pop_state(name: str, kwargs: dict[str, Any]) -> DynamicScalerState:
    state = kwargs.pop(_STATE, None)
    if state is None:
        raise TypeError(
            f"a function returned by {name} was called without dynamic_scaler_state; expected a DynamicScalerState. "
            "Write grad_fn(..., dynamic_scaler_state=state), starting from state = jaxamp.DynamicScalerState()."
        )
    check_state(name, state)
    return state


def _split_loss(name: str, out: Any, has_aux: bool) -> tuple[jax.Array, Any]:
    """Split the output of the user's function into the loss and aux."""
    if has_aux and not (isinstance(out, tuple) and len(out) == 2):
        raise TypeError(
            f"{name} got a function that returned {_describe(out)}; with has_aux=True, expected a pair. "
            "Write `return loss, aux`."
        )
    value, aux = out if has_aux else (out, None)
    if not is_inexact_array_like(value) or np.shape(value):
        maybe_aux = isinstance(value, tuple) and not has_aux
        raise TypeError(
            f"{name} got a function whose loss is {_describe(value)}; expected one floating-point number. "
            + ("Write has_aux=True if it is (loss, aux)." if maybe_aux else "Reduce it, for instance with jnp.mean.")
        )
    return jnp.asarray(value), aux


def _check_not_scaled(name: str, loss: Any, state: DynamicScalerState) -> None:
    if is_scaled_already(loss, state.scaler):
        raise ValueError(
            f"{name} got a loss that is multiplied by a loss scale already; expected the loss itself, because {name} "
            "scales it, and its gradients would come out too large by that factor. Return the loss as it is."
        )


def _describe(x: Any) -> str:
    if hasattr(x, "shape") and hasattr(x, "dtype"):
        return f"an array of shape {x.shape} and dtype {x.dtype}"
    return f"a tuple of {len(x)}" if isinstance(x, tuple) else repr(x)


def _check_first_argument(name: str, args: tuple[Any, ...]) -> None:
    """Refuse a first argument without floats: Equinox would return no gradients, and that would count as finite."""
    leaves = jax.tree.leaves(args[:1])
    if has_modules(args[:1]):
        params = [x for _, x, trained in split_nodes(nodes_of(args[:1])).items() if trained]
        leaves = [*jax.tree.leaves(params), *jax.tree.leaves(args[:1], is_leaf=node_test())]
    if args and not any(map(eqx.is_inexact_array, leaves)):
        raise TypeError(
            f"{name} found no floating-point array in the first argument, of type {type(args[0]).__name__}; expected "
            "the parameters there. Put them first, or write filter=False and argnums=."
        )


def _with_state_kept(name: str, fun: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function on copies of NNX objects, and refuse new state in them, which would be lost."""
    before = snapshot_of(args) if nodes_of(args) else None
    out = fun(*args, **kwargs)
    changed = before.changed() if before else []
    if changed:
        path = ".".join(map(str, changed[0][0][1:])) or type(changed[0][1]).__name__
        raise ValueError(
            f"{name} got a function that changes {path!r} of a Flax NNX object; expected objects that stay as they "
            "are, because JAX gives the function a copy. Put the nnx.Module first, and leave filter=False out."
        )
    return out


def _check_argnums(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse integers: JAX refuses them too, but later, and its message doesn't know about `filter`."""
    if kwargs.get("allow_int"):
        return
    argnums = kwargs.get("argnums", 0)
    for i in map(operator.index, argnums if isinstance(argnums, tuple | list) else (argnums,)):
        if not -len(args) <= i < len(args):
            return  # JAX raises the error
        for path, leaf in jax.tree_util.tree_leaves_with_path(args[i]):
            dtype = jnp.result_type(leaf) if isinstance(leaf, int | float | complex) or hasattr(leaf, "dtype") else None
            if dtype is not None and not jnp.issubdtype(dtype, jnp.inexact):
                raise TypeError(
                    f"{name} was asked to differentiate argument {i}{jax.tree_util.keystr(path)}, of dtype {dtype}; "
                    "expected floating-point numbers. Write filter=True to skip such leaves, or allow_int=True."
                )
