"""The rule that runs matmuls in number formats of few bits: fp8, and formats to experiment with.

    rule = use_formats("e4m3", gradients="e5m2")
    policy = load_policy("default") | {jax.lax.dot_general_p: rule}

A table says the same with the word `quantized` and a section of that name; `policies/fp8.toml` is one.
"""

import dataclasses
import inspect
import itertools
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

import numpy as np

from .._compat import Primitive
from .._errors import nearest
from .._number_formats.names import format as number_format
from .._number_formats.number_format import NumberFormat
from .._primitives.in_format import Rounding, kept_in, rounded, with_rounded_cotangent
from .._primitives.quantized_matmul import Quantizing, Recipe, quantized_matmul
from .._traits import traits_of
from .rules import Replacement, ReplacingRule, Rule, Site, use_compute_precision

Scaling = Literal["current", "delayed", "none"]


@dataclasses.dataclass(frozen=True)
class Quantization(ReplacingRule):
    """A rule that runs matmuls in number formats. See `use_formats`."""

    operands: NumberFormat | None
    gradients: NumberFormat | None
    weight_gradients: NumberFormat | None
    results: NumberFormat | None = None
    gradient_results: NumberFormat | None = None
    kept: NumberFormat | None = None
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
        is_kept_anyway = self.operands is not None and self.operands.block == "tensor" and self.kept == self.operands
        kept = None if is_kept_anyway else self.kept
        return Recipe(*formats, self.scaling != "none", self.powers_of_two, history, kept)

    @property
    def formats(self) -> tuple[NumberFormat, ...]:
        """The formats that it has, each once."""
        return tuple(dict.fromkeys(f for f in map(self.__getattribute__, _FORMATS) if f is not None))

    def applies_to(self, primitive: Primitive) -> bool:
        """Under a scope's key, it is about matmuls; anything else has the rule that it would have without."""
        return traits_of(primitive).matmul

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
            both = [self._round(with_rounded_cotangent, x, self.gradient_results) for x in operands[:2]]
            out = quantized_matmul(primitive, [*both, *operands[2:]], params, quantizing)
            out = self._round(rounded, out, self.results)
            return self._round(kept_in, out, self.kept)

        return Replacement(body, self.name, str(self.operands or ""), self._remark)

    def _round(self, how: Callable[[Any, Rounding, int], Any], x: Any, format: NumberFormat | None) -> Any:
        if format is None:
            return x
        return how(x, Rounding(format, self.scaling != "none", self.powers_of_two), max(0, x.ndim - 1))

    @property
    def _remark(self) -> str:
        """What a report says beside the formats of the operands."""
        named = {"results": self.results, "gradient results": self.gradient_results, "kept": self.kept}
        return ", ".join(f"{name} in {format_}" for name, format_ in named.items() if format_ is not None)

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
    results: Any = None,
    gradient_results: Any = None,
    kept: Any = None,
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
            again: what `jaxamp.format` takes, a format, or `"compute"` for the compute dtype.
        gradients: The format of cotangents where gradients of activations are made of them; `"compute"` for the compute
            dtype.
        weight_gradients: The same for gradients of parameters; as `gradients` if None.
        results: The format that the result is rounded to. It stays an array of the compute dtype, and its cotangent is
            not rounded.
        gradient_results: The same for the gradients that leave the matmul, those of parameters too.
        kept: The format of activations that are kept for the backward pass; the forward pass goes on with what they
            were. That is the activation that a matmul's derivative reads, and the result of the matmul where it is kept
            to compute element-wise work again. Formats whose numbers fit into eight bits are kept in a byte each. What
            the backward pass reads is rounded, what it computes again from arguments is not.
        scaling: `"current"`: one scale for each tensor, so that its largest number is the format's. `"delayed"`: so
            that the largest number of earlier steps is, which `jaxamp.init_scales` and
            `jaxamp.delayed_scale_value_and_grad` pass on from step to step; without them as `"current"`, and so for
            `results`, `gradient_results` and `kept`. `"none"`: numbers are rounded as they are. Formats with scales of
            their own, such as `mxfp8`, use those.
        powers_of_two: Whether scales are rounded up to powers of two.
        history: With delayed scaling, how many earlier steps count.
        least_size: Matmuls whose 1/(1/m + 1/n + 1/k) is below this stay in the compute dtype: rounding would take
            longer than it saves.
        first_layer: Whether a matmul is quantised that reads the function's arguments and nothing computed from them.
        last_layer: Whether one is that no other matmul depends on.
        attention: Whether one of two activations, with a batch axis, is.

    Returns:
        A rule. Under a key that names a scope, the last four arguments are not asked: `{"blocks": use_formats()}` means
        each matmul there. Other operations of the scope run as without it.

    >>> import jax, jax.numpy as jnp, jaxamp
    >>> rule = use_formats("e2m1", gradients="e5m2", scaling="none")
    >>> policy = jaxamp.default_amp_policy | {jax.lax.dot_general_p: rule}
    >>> f = jaxamp.amp(lambda x, w: x @ w, amp_policy=policy)
    >>> f(jnp.array([[1.0, 0.3]]), jnp.array([[3.0], [6.0]])).tolist()
    [[6.0]]
    """
    formats = {"operands": operands, "gradients": gradients, "weight_gradients": weight_gradients}
    formats |= {"results": results, "gradient_results": gradient_results, "kept": kept}
    scales = {"scaling": scaling, "powers_of_two": powers_of_two, "history": history}
    where = {"least_size": least_size, "first_layer": first_layer, "last_layer": last_layer, "attention": attention}
    return quantization(formats | scales | where, "use_formats")


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


def formats_of(policy: Mapping[Any, Any]) -> tuple[NumberFormat, ...]:
    """The number formats that a policy's rules have, each once."""
    found = [rule.formats for rule in policy.values() if isinstance(rule, Quantization)]
    return tuple(dict.fromkeys(itertools.chain(*found)))


_FORMATS = ("operands", "gradients", "weight_gradients", "results", "gradient_results", "kept")
FIELDS = tuple(field.name for field in dataclasses.fields(Quantization))


def _format(caller: str, name: str, word: Any) -> NumberFormat | None:
    if word == "compute" or (word is None and name != "operands"):
        return None
    if isinstance(word, NumberFormat):
        return word
    try:
        return _from_table(word) if isinstance(word, dict) else number_format(word)
    except (ValueError, TypeError) as error:
        reason = str(error).removeprefix("jaxamp.format: ")
        raise type(error)(f"{caller} got {name}={word!r}. {reason}") from None


def _from_table(words: dict[str, Any]) -> NumberFormat:
    """A format from the arguments of `jaxamp.format`, as in `{ name = "e5m2", rounding = "stochastic" }`."""
    known = list(inspect.signature(number_format).parameters)
    for name in words:
        if name not in known:
            instead = nearest(name, known) or " Write for example { name = 'e5m2', rounding = 'stochastic' }."
            raise ValueError(f"{name!r} is not an argument of jaxamp.format; expected {', '.join(known)}.{instead}")
    return number_format(words.get("name"), **{name: word for name, word in words.items() if name != "name"})


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
