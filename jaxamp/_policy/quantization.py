"""The rule that runs matmuls in number formats of few bits: fp8, and formats to experiment with.

    rule = use_formats("e4m3", gradients="e5m2")
    policy = load_policy("default") | {jax.lax.dot_general_p: rule}

A table says the same with the word `quantized` and a section of that name; `policies/fp8.toml` is one.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, get_args

import numpy as np

from .._compat import Primitive
from .._errors import nearest
from .._number_formats.names import format as number_format
from .._number_formats.number_format import NumberFormat
from .._primitives.quantized_matmul import Quantizing, Recipe, quantized_matmul
from .._traits import traits_of
from .rules import Replacement, ReplacingRule, Rule, Site, use_compute_precision

Scaling = Literal["current", "delayed", "none"]


@dataclasses.dataclass(frozen=True)
class Quantization(ReplacingRule):
    """A rule that runs matmuls in number formats. See `use_formats`."""

    operands: NumberFormat
    gradients: NumberFormat | None
    weight_gradients: NumberFormat | None
    scaling: Scaling = "current"
    powers_of_two: bool = False
    history: int = 16
    least_size: float = 0
    first_layer: bool = True
    last_layer: bool = True
    attention: bool = True

    @property
    def name(self) -> str:
        return "quantized"

    @property
    def recipe(self) -> Recipe:
        formats = self.operands, self.gradients, self.weight_gradients
        history = self.history if self.scaling == "delayed" else 0
        return Recipe(*formats, self.scaling != "none", self.powers_of_two, history)

    def at(self, site: Site) -> "Replacement | str":
        """The body of a matmul at one place of a program, or why it is not quantised there."""
        if not traits_of(site.eqn.primitive).matmul:
            return f"{site.eqn.primitive.name} is not a matmul"
        refusal = "" if site.is_scoped else self._refusal(site)
        if refusal:
            return refusal

        def body(primitive: Any, compute_dtype: np.dtype, *operands: Any, **params: Any) -> Any:
            first, second = (x.dtype == np.float32 for x in operands[:2])  # parameters; their order may have changed
            given = (first and any(site.given), second and any(site.given))
            quantizing = Quantizing(self.recipe, compute_dtype, given, (first, second))
            return quantized_matmul(primitive, operands, params, quantizing)

        return Replacement(body, self.name, str(self.operands))

    def _refusal(self, site: Site) -> str:
        traits = traits_of(site.eqn.primitive)
        if not self.first_layer and site.is_first:
            return "it is the first layer"
        if not self.last_layer and site.is_last:
            return "it is the last layer"
        if not self.attention and not any(site.parameters) and site.has_batch:
            return "it multiplies two activations, as attention does"
        if self.least_size and traits.dims is not None:
            dims = traits.dims(site.eqn)
            size = 1 / sum(1 / max(1, d) for d in dims)
            if size < self.least_size:
                return f"it is too small: 1/(1/m + 1/n + 1/k) is {size:.0f}, below {self.least_size:g}"
        return ""


def use_formats(
    operands: Any = "e4m3",
    *,
    gradients: Any = "e5m2",
    weight_gradients: Any = None,
    scaling: Scaling = "current",
    powers_of_two: bool = False,
    history: int = 16,
    least_size: float = 0,
    first_layer: bool = True,
    last_layer: bool = True,
    attention: bool = True,
) -> Rule:
    """A rule that runs matmuls and convolutions in number formats of few bits.

    Operands are divided by a scale and rounded to a format, then multiplied and multiplied by the scales; in the
    backward pass, cotangents likewise. On hardware with fp8 matmuls, `e4m3` and `e5m2` run there. Anywhere else, and
    for all other formats, the numbers are the same and the multiplication runs in the compute dtype.

    Args:
        operands: The format of both operands in the forward pass, and of the operand that the backward pass reads
            again: what `jaxamp.format` takes, or a format.
        gradients: The format of cotangents where gradients of activations are made of them; `"compute"` for the compute
            dtype.
        weight_gradients: The same for gradients of parameters; as `gradients` if None.
        scaling: `"current"`: one scale for each tensor, so that its largest number is the format's. `"delayed"`: so
            that the largest number of earlier steps is, which `jaxamp.init_scales` and
            `jaxamp.delayed_scale_value_and_grad` pass on from step to step; without them as `"current"`. `"none"`:
            numbers are rounded as they are. Formats with scales of their own, such as `mxfp8`, use those.
        powers_of_two: Whether scales are rounded up to powers of two.
        history: With delayed scaling, how many earlier steps count.
        least_size: Matmuls whose 1/(1/m + 1/n + 1/k) is below this stay in the compute dtype: rounding would take
            longer than it saves.
        first_layer: Whether a matmul is quantised that reads the function's arguments and nothing computed from them.
        last_layer: Whether one is that no other matmul depends on.
        attention: Whether one of two activations, with a batch axis, is.

    Returns:
        A rule. Under a key that names a scope, the last four arguments are not asked: `{"blocks": use_formats()}` means
        each matmul there.

    >>> import jax, jax.numpy as jnp, jaxamp
    >>> rule = use_formats("e2m1", gradients="e5m2", scaling="none")
    >>> policy = jaxamp.default_amp_policy | {jax.lax.dot_general_p: rule}
    >>> f = jaxamp.amp(lambda x, w: x @ w, amp_policy=policy)
    >>> f(jnp.array([[1.0, 0.3]]), jnp.array([[3.0], [6.0]])).tolist()
    [[6.0]]
    """
    given = {"operands": operands, "gradients": gradients, "weight_gradients": weight_gradients, "scaling": scaling}
    more = {"powers_of_two": powers_of_two, "history": history, "least_size": least_size}
    where = {"first_layer": first_layer, "last_layer": last_layer, "attention": attention}
    return quantization(given | more | where, "use_formats")


def quantization(words: dict[str, Any], caller: str, before: Quantization | None = None) -> Quantization:
    """The rule of some words; those that are not said are as `before`, or as `use_formats` has them."""
    fields = {} if before is None else {f.name: getattr(before, f.name) for f in dataclasses.fields(before)}
    if before is None:
        words = {"operands": "e4m3", "gradients": "e5m2", **words}
    for name, word in words.items():
        if name in _FORMATS:
            fields[name] = _format(caller, name, word)
        else:
            fields[name] = _checked(caller, name, word)
    if words.get("weight_gradients") is None and ("gradients" in words or before is None):
        fields["weight_gradients"] = fields["gradients"]
    return Quantization(**fields)


def quantizes(policy: Mapping[Any, Any]) -> bool:
    """Whether a policy has a rule that quantises."""
    return any(isinstance(rule, Quantization) for rule in policy.values())


def in_format(policy: Mapping[Any, Any], format: NumberFormat) -> dict[Any, Any]:
    """A policy whose matmuls in the compute dtype are in a number format instead."""
    rule = quantization({"operands": format}, "compute_dtype")
    is_matmul = {key: isinstance(key, Primitive) and traits_of(key).matmul for key in policy}
    return {key: rule if is_matmul[key] and old is use_compute_precision else old for key, old in policy.items()}


_FORMATS = ("operands", "gradients", "weight_gradients")
FIELDS = tuple(field.name for field in dataclasses.fields(Quantization))


def _format(caller: str, name: str, word: Any) -> NumberFormat | None:
    if word is None or (word == "compute" and name != "operands"):
        return None
    if isinstance(word, NumberFormat):
        return word
    try:
        return number_format(word)
    except (ValueError, TypeError) as error:
        reason = str(error).removeprefix("jaxamp.format: ")
        raise type(error)(f"{caller} got {name}={word!r}. {reason}") from None


def _checked(caller: str, name: str, word: Any) -> Any:
    if name == "scaling":
        if word not in get_args(Scaling):
            words = get_args(Scaling)
            raise ValueError(
                f"{caller} got scaling={word!r}; expected {' or '.join(map(repr, words))}."
                + (nearest(str(word), words) or " Write scaling='current'.")
            )
        return word
    if name == "history":
        if isinstance(word, bool) or not isinstance(word, int | np.integer) or word < 1:
            raise ValueError(f"{caller} got history={word!r}; expected a number of steps, 1 or more. Write history=16.")
        return int(word)
    if name == "least_size":
        if isinstance(word, bool) or not isinstance(word, int | float | np.number) or not word >= 0:
            raise ValueError(
                f"{caller} got least_size={word!r}; expected a number that is not negative. Write least_size=1024."
            )
        return float(word)
    if not isinstance(word, bool):
        raise TypeError(f"{caller} got {name}={word!r}; expected True or False. Write {name}=False.")
    return word
