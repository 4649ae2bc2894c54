"""The dtypes that a compiled program multiplies in, read from XLA's text."""

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

_LOWERED = re.compile(r"^module @|\b(?:stablehlo|func)\.", re.MULTILINE)
DTYPE_NAMES = {"f64": "float64", "f32": "float32", "f16": "float16", "bf16": "bfloat16"}
DTYPE_NAMES |= {"f8e4m3fn": "float8_e4m3fn", "f8e5m2": "float8_e5m2"}
# A line: `%dot.3 = f32[8,4]{1,0} dot(%a, %b), lhs_contracting_dims={1}, metadata={op_name="jit(f)/dot_general"}`
LINE = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)$")
_DTYPE = re.compile(r"\b([a-z]+[0-9]+\w*)\[")
_OPERAND = re.compile(r"%([\w.\-]+)")
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_NAME = re.compile(r'op_name="([^"]*)"')
# Parts of the names of calls into cuBLAS, cuDNN and oneDNN.
_LIBRARY_WORDS = ("gemm", "matmul", "conv", "fmha")


class CompiledMatmul(NamedTuple):
    """A matmul, a convolution or fused attention in a compiled program."""

    op: str  # dot, convolution, or the target of a library call
    operands: tuple[str, ...]  # dtypes of the first two
    scope: str  # named scopes, outermost first


def compiled_matmuls(compiled: Any) -> list[CompiledMatmul]:
    """List the matmuls of a compiled program, with the dtypes they really run in.

    Args:
        compiled: The result of `jax.jit(fn).lower(...).compile()`, or its text.

    Returns:
        A list of rows, each with `op` (`dot`, `convolution` or the target of a library call), `operands` (the dtypes of
        the first two) and `scope`.

    On a CPU, XLA multiplies in float32 for most kinds of low-precision matmuls.

    >>> import jax, jax.numpy as jnp
    >>> compiled = jax.jit(lambda x: x @ x).lower(jnp.ones((4, 4))).compile()
    >>> [row.operands for row in compiled_matmuls(compiled)]
    [('float32', 'float32')]
    """
    return list(_matmuls(text_of("compiled_matmuls", compiled)))


def text_of(name: str, compiled: Any) -> str:
    """The text of a compiled program; `name` is the function that was given it."""
    text = compiled if isinstance(compiled, str) else getattr(compiled, "as_text", lambda: None)()
    if not isinstance(text, str) or _LOWERED.search(text) or not any(map(LINE.match, text.splitlines())):
        given = "text" if isinstance(compiled, str) else f"{type(compiled).__name__}"
        raise TypeError(
            f"{name} got {given} that is not a compiled program; expected what XLA made of one. Write "
            f"{name}(jax.jit(fn).lower(...).compile())."
        )
    return text


def _matmuls(text: str) -> Iterator[CompiledMatmul]:
    dtypes: dict[str, str] = {}  # names are unique in a computation, and an operand is defined before it is used
    for line in text.splitlines():
        found = LINE.match(line)
        if found is None:
            continue
        name, kind, op, rest = found.groups()
        first = _DTYPE.search(kind)
        if first is not None:
            dtypes[name] = DTYPE_NAMES.get(first[1], first[1])
        op = _library_call(rest) if op == "custom-call" else op if op in ("dot", "convolution") else ""
        if op:
            operands = [dtypes[operand] for operand in _OPERAND.findall(rest.split("), ")[0]) if operand in dtypes]
            yield CompiledMatmul(op, tuple(operands[:2]), scope_of(rest))


def _library_call(rest: str) -> str:
    """The target of a library call that multiplies; empty for other calls."""
    found = _TARGET.search(rest)
    return found[1] if found is not None and any(word in found[1] for word in _LIBRARY_WORDS) else ""


def scope_of(rest: str) -> str:
    """`jit(step)/transpose(jvp(block))/while/body/attention/dot_general` as `block/attention`.

    What JAX adds for loops and branches comes in pairs, which a scope of the user's with the same name does not. The
    names it adds for a checkpoint are single; they are dropped, as in a report.
    """
    found = _NAME.search(rest)
    name = _LOOP.sub("", _BRANCH.sub("", found[1])) if found else ""
    parts = _split(name)[:-1]
    scopes = [
        scope
        for scope in map(_without_transforms, parts)
        if scope and scope not in _ADDED_BY_JAX and not _JIT.fullmatch(scope)
    ]
    transposed = next((i for i, part in enumerate(parts) if part.startswith("transpose(")), len(parts))
    if any(part.startswith("jvp(") for part in parts[transposed:]):  # a recomputation repeats its path
        half = len(scopes) // 2
        repeated = next((n for n in range(half, 0, -1) if scopes[:n] == scopes[n : 2 * n]), 0)
        scopes = scopes[repeated:]
    return "/".join(scopes)


_LOOP = re.compile(r"(?:^|(?<=/))while/(?:body_pred|body|cond)/")
_BRANCH = re.compile(r"(?:^|(?<=/))cond/branch_\d+_fun/")
_JIT = re.compile(r"p?jit\(.*\)")
_TRANSFORM = re.compile(r"(?:jvp|transpose|vmap)\((.*)\)")
_ADDED_BY_JAX = frozenset({"closed_call", "eval_jaxpr", "checkpoint", "rematted_computation", "shard_map"})


def _split(path: str) -> list[str]:
    """The parts of a path, split at the slashes outside of parentheses."""
    parts = [""]
    for piece in path.split("/"):
        parts[-1] += piece
        if parts[-1].count("(") <= parts[-1].count(")"):
            parts.append("")
        else:
            parts[-1] += "/"
    return path.split("/") if parts[-1] else parts[:-1]  # a scope may have an unpaired parenthesis


def _without_transforms(part: str) -> str:
    """`transpose(jvp(block))` as `block`."""
    while (found := _TRANSFORM.fullmatch(part)) is not None:
        part = found[1]
    return part
