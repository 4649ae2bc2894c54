"""The plan of a jaxpr: what is done with each of its equations, as data.

Passes (`jaxamp/_passes`) take a plan and give a plan. They change steps, or let a `Region` run several of them.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from jax import lax

from .._compat import Jaxpr, Literal, Var, open_jaxpr
from .._formats import Format, Formats
from .._policy.communication import Communication
from .._policy.lookup import Found
from .._traits import traits_of
from .bodies import Entry
from .classify import Mode, Path
from .reasons import Reason
from .residuals import Keep
from .sensitivity import Value

# (equation, operands, bind parameters) -> results. It runs once for all equations of a kind that share a step.
Operation = Callable[[Any, Sequence[Any], dict[str, Any]], Sequence[Any]]


class Step(NamedTuple):
    """What is done with one equation."""

    mode: Mode
    reads: tuple[Format | None, ...]  # the format each operand is read in; None: as it is
    outs: tuple[Value, ...]
    params: dict[str, Any] | None  # bind parameters, where they change
    reason: Reason
    found: Found  # the rule, and the key that it was found under
    touched: bool  # whether it differs from binding the equation as written
    entry: Entry | None = None
    bodies: tuple["Plan", ...] = ()
    operation: Operation | None = None  # what is done instead of binding the primitive
    order: tuple[int, ...] | None = None  # of the result's axes, if `operation` makes them in another order
    swapped: bool = False  # whether `params` are those of its operands in the other order
    replaced: bool = False  # whether `operation` is the body that a rule of the policy gives it
    format: str = ""  # the number format that `operation` multiplies in, if it is not that of its operands

    @property
    def is_plain(self) -> bool:
        """Whether the equation is bound, in whatever dtypes: no rule of the policy or of a pass takes its place."""
        return self.mode is not Mode.RULE and self.operation is None

    @property
    def is_pinned(self) -> bool:
        """Whether a key of the policy that names a scope decided on it."""
        return isinstance(self.found.key, str | tuple)


class Region(Protocol):
    """Parts of a plan that run as a whole. Passes define what that means in `run`."""

    @property
    def parts(self) -> "tuple[Part, ...]":
        """The parts that it replaces, in the order in which they would run."""

    def run(self, runner: "Runner", plan: "Plan", env: "Environment") -> None:
        """Run it: read operands from `env`, and write there all results that are read outside of the region."""

    def with_parts(self, parts: "tuple[Part, ...]") -> "Region":
        """The region with other parts, which compute the same."""


Part = int | Region  # the number of a step, or a region


class Setting(NamedTuple):
    """What all plans of a call have in common."""

    formats: Formats
    keep: Keep = "auto"  # what is kept for the backward pass
    communication: Callable[[Path], Communication] = lambda path: Communication()  # by the scopes of an operation
    may_replace: bool = True  # whether rules may give matmuls other bodies, which JAX might not transpose


class Plan(NamedTuple):
    """What is done with the equations of a jaxpr."""

    jaxpr: Jaxpr  # as the primitive holds it: open or closed
    path: Path
    ins: tuple[Value, ...]
    steps: tuple[Step, ...]  # one for each equation
    outs: tuple[Value, ...]
    touched: bool  # whether running it differs from running the jaxpr
    setting: Setting
    parts: tuple[Part, ...]  # what is run, in order
    returned: tuple[bool, ...] = ()  # which results are results of the user's function; empty: none
    magnified: tuple[bool, ...] = ()  # which results a decomposition or a solve reads; empty: none
    wanted: tuple[int, ...] = ()  # how its results are wanted: a `Want` each
    kinds: Sequence[int] = ()  # of its equations: a step that several equations of a kind have does the same for all

    @property
    def eqns(self) -> Sequence[Any]:
        return open_jaxpr(self.jaxpr).eqns

    def readers(self) -> "Readers":
        """All places where each variable is read."""
        body = open_jaxpr(self.jaxpr)
        reads = [(eqn.invars, step.reads) for eqn, step in zip(body.eqns, self.steps, strict=True)]
        readers: Readers = {}
        for place, (atoms, formats) in enumerate([*reads, (body.outvars, tuple(o.format for o in self.outs))]):
            for atom, format_ in zip(atoms, formats, strict=True):
                if not isinstance(atom, Literal):
                    readers.setdefault(atom, []).append(Reader(place, format_))
        return readers

    def values_of(self, i: int) -> list[tuple[Var, Value]]:
        """The results of an equation, each with what is planned for it."""
        return list(zip(self.eqns[i].outvars, self.steps[i].outs, strict=True))

    def with_steps(self, changed: dict[int, Step]) -> "Plan":
        """The plan with some steps changed, by their numbers."""
        if not changed:
            return self
        steps = tuple(changed.get(i, step) for i, step in enumerate(self.steps))
        return self._replace(steps=steps, touched=self.touched or any(step.touched for step in changed.values()))

    def with_regions(self, regions: Sequence[Region]) -> "Plan":
        """The plan with parts replaced by regions, each of which runs where the last of its parts ran.

        The parts of a region need not be neighbours, if nothing between them reads a result of the region.
        """
        if not regions:
            return self
        taken = {identity(part) for region in regions for part in region.parts}
        if missing := taken - {identity(part) for part in self.parts}:
            raise ValueError(
                f"with_regions got regions of the parts {sorted(map(str, missing))}, which this plan does not have; "
                "expected parts of `plan.parts`. Another region has taken them: use `map_steps` to change steps inside "
                "of regions."
            )
        ends = {identity(region.parts[-1]): region for region in regions}
        left = ((part, identity(part)) for part in self.parts)
        parts = tuple(ends.get(key, part) for part, key in left if key not in taken or key in ends)
        return self._replace(parts=parts, touched=True)


def identity(part: Part) -> Any:
    """Equal for the same part alone. Regions may hold what has no hash."""
    return part if isinstance(part, int) else ("region", id(part))


class Reader(NamedTuple):
    """A place where a variable is read: an equation, or, after the last one, the results; and in which format."""

    place: int
    format: Format | None


Readers = dict[Var, list[Reader]]


def map_steps(parts: tuple[Part, ...], replace: Callable[[int], Part]) -> tuple[Part, ...]:
    """Parts with each step replaced, those inside of regions too."""
    return tuple(
        replace(part) if isinstance(part, int) else part.with_parts(map_steps(part.parts, replace)) for part in parts
    )


def only_returned(jaxpr: Jaxpr, returned: Sequence[bool], stops: Callable[[Any], bool] = lambda eqn: False) -> set[Var]:
    """The variables of an open jaxpr that are results of the user's function, or parts of them, and nothing else.

    Results may be scaled by a number, as in a mean. `stops`: equations whose operands don't count.
    """
    found = {v for v, own in zip(jaxpr.outvars, returned, strict=True) if own and not isinstance(v, Literal)}
    read = {v for v, own in zip(jaxpr.outvars, returned, strict=True) if not own and not isinstance(v, Literal)}
    found -= read
    for eqn in reversed(jaxpr.eqns):
        delivers = traits_of(eqn.primitive).delivers or _scales(eqn)
        passes_on = delivers and all(v in found for v in eqn.outvars) and not stops(eqn)
        for atom in eqn.invars:
            if isinstance(atom, Literal):
                continue
            if passes_on and atom not in read:
                found.add(atom)
            elif not passes_on:
                found.discard(atom)
                read.add(atom)
    return found


def _scales(eqn: Any) -> bool:
    """Whether it multiplies an array by a number, or divides it by one."""
    if not traits_of(eqn.primitive).product:
        return False
    literals = [isinstance(v, Literal) for v in eqn.invars]
    return literals == [False, True] or (literals == [True, False] and eqn.primitive is lax.mul_p)


# -- what a region may ask for while it runs


class Environment(Protocol):
    """The values of variables."""

    def read(self, atom: Any, format: Format | None = None) -> Any:
        """The value of a variable or literal in a format; None: in the one it is held in."""

    def write(self, var: Var, x: Any, value: Value) -> None:
        """Give a variable its value."""

    def format_of(self, var: Var) -> Format | None:
        """The format that a value is held in; None for a constant that is not made yet."""

    def with_values(self, variables: Sequence[Var], xs: Sequence[Any]) -> "Environment":
        """An environment of these values, and of constants, alone."""

    def postpone(self, eqn: Any) -> None:
        """Broadcast a literal when it is read, in the format that it is read in."""


class Runner(Protocol):
    """The interpreter, as a region sees it."""

    def run_parts(self, plan: Plan, parts: Sequence[Part], env: Environment) -> None:
        """Run parts of a plan one after the other."""

    def at(self, plan: Plan, i: int) -> Any:
        """A context manager: the user's source line, name stack and equation context of a step."""

    def operate(self, plan: Plan, i: int, operands: Sequence[Any]) -> Sequence[Any]:
        """The results of a step on operands in the formats that it reads, inside of its context."""
