"""Compute the float32 work between two matmuls again in the backward pass: a gelu, a softmax with dropout, a logsumexp.

JAX keeps for the backward pass what each nonlinear operation needs, in float32. The steps between two matmuls are
computed again instead, from their low operands, which the matmuls keep in any case or which are half as large. Random
draws, gathers, masks and reductions of many entries are inside too, but are kept. So are matmuls of two activations
that read something larger than their result: the map of attention is made again from its scores.
"""

from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

import numpy as np

from .._compat import Literal, Var, open_jaxpr
from .._formats import Format, float_dtype
from .._plan.classify import Mode
from .._plan.plan import Environment, Part, Plan, Reader, Runner, Step
from .._plan.residuals import keeping_little
from .._plan.sensitivity import FREE, Value
from .._traits import traits_of
from .._traits.matmul_cost import size_of
from .._traits.traits import NONE


def recompute(plan: Plan) -> Plan:
    """Put steps between matmuls into regions that are computed again, where that is worth it."""
    if not plan.touched or plan.setting.keep == "all":
        return plan
    values: dict[Var, Value] = dict(zip(open_jaxpr(plan.jaxpr).invars, plan.ins, strict=True))
    constants: set[Var] = set()
    for eqn, step in zip(plan.eqns, plan.steps, strict=True):
        values.update(zip(eqn.outvars, step.outs, strict=True))
        if step.mode is Mode.CONSTANT:
            constants.update(eqn.outvars)
    readers: dict[Var, list[Reader]] = {}
    regions = []
    waiting = list(_runs(plan, values))
    while waiting:
        for group in _connected(plan, waiting.pop(0), constants):
            size = _largest_in_float32(plan, group)
            if size <= 1:
                continue
            readers = readers or plan.readers()
            region = _region(plan, group, readers, constants)
            if _pays(region, size, values):
                regions.append(region)
            else:
                waiting += _pieces(plan, group)
    return plan.with_regions(regions)


class Recomputed(NamedTuple):
    """Steps that belong together, with the variables that go in and come out."""

    parts: tuple[Part, ...]
    steps: tuple[int, ...]
    ins: tuple[Any, ...]
    outs: tuple[Var, ...]
    formats: tuple[Format | None, ...]  # that the outs are read in; None: as they are held

    def with_parts(self, parts: tuple[Part, ...]) -> "Recomputed":
        return self._replace(parts=parts)

    def run(self, runner: Runner, plan: Plan, env: Environment) -> None:
        if runner.in_recomputation:
            return runner.run_parts(plan, self.parts, env)
        inner = runner.recomputing()

        def run(*operands: Any) -> list[Any]:
            inside = env.with_values(self.ins, operands)
            inner.run_parts(plan, self.parts, inside)
            return [inside.read(v, format_) for v, format_ in zip(self.outs, self.formats, strict=True)]

        again = run if runner.in_checkpoint else keeping_little(run)
        outs = again(*(env.read(v) for v in self.ins))
        values = {v: value for i in self.steps for v, value in plan.values_of(i)}
        for var, x, format_ in zip(self.outs, outs, self.formats, strict=True):
            env.write(var, x, values[var]._replace(format=format_ or values[var].format))
        for i in self.steps:
            if plan.steps[i].mode is Mode.CONSTANT:
                env.postpone(plan.eqns[i])


def _runs(plan: Plan, values: dict[Var, Value]) -> Iterator[list[int]]:
    """Neighbouring steps between matmuls and loops. A region of another pass ends a run."""
    run: list[int] = []
    eqns, steps = plan.eqns, plan.steps
    for part in plan.parts:
        if isinstance(part, int) and (
            _may_be_inside(eqns[part], steps[part])
            or _reads_map(eqns[part], steps[part], [eqns[i] for i in run], values)
        ):
            run.append(part)
        elif run:
            yield run
            run = []
    if run:
        yield run


def _connected(plan: Plan, run: list[int], constants: Collection[Var]) -> list[list[int]]:
    """The steps of a run in groups that share no value that is made in the run."""
    eqns, parent, maker = plan.eqns, {i: i for i in run}, dict[Var, int]()

    def root(i: int) -> int:
        while parent[i] != i:
            parent[i] = i = parent[parent[i]]
        return i

    for i in run:
        for v in eqns[i].invars:
            if not isinstance(v, Literal) and v in maker:
                parent[root(maker[v])] = root(i)
        maker.update((v, i) for v in eqns[i].outvars if v not in constants)
    groups: dict[int, list[int]] = {}
    for i in run:
        groups.setdefault(root(i), []).append(i)
    return list(groups.values())


def _pieces(plan: Plan, group: list[int]) -> list[list[int]]:
    """A group without the steps that keep their results; nothing if it has no such steps."""
    pieces: list[list[int]] = [[]]
    for i in group:
        if _is_cheap(plan.eqns[i], plan.steps[i]):
            pieces[-1].append(i)
        else:
            pieces.append([])
    return [piece for piece in pieces if piece] if len(pieces) > 1 else []


def _is_cheap(eqn: Any, step: Step) -> bool:
    """Whether all of a step is computed again: element-wise work, comparisons, reductions."""
    if step.mode is Mode.ENTER:
        return all(map(_is_cheap, step.bodies[0].eqns, step.bodies[0].steps))
    traits = traits_of(eqn.primitive)
    return traits.elementwise or traits.compares or traits.reduces


def _may_be_inside(eqn: Any, step: Step, reductions: bool = True) -> bool:
    """Whether a step is computed again at no great cost, or keeps its results and is not computed again."""
    traits = traits_of(eqn.primitive)
    unknown = traits is NONE and any(float_dtype(v.aval) is not None for v in (*eqn.invars, *eqn.outvars))
    if eqn.effects or step.mode is Mode.RULE or unknown or traits.matrix_unit or traits.magnifies:
        return False
    if step.mode is not Mode.ENTER:
        rearranges = traits.cheap and not (traits.elementwise or traits.reduces or traits.makes_positions)
        return not rearranges and (reductions or not traits.reduces)
    if not (traits.own_jvp or traits.plain_call):
        return False
    reductions &= not traits.own_jvp  # the derivative rule of a user's softmax knows better what it needs
    body = step.bodies[0]
    return all(_may_be_inside(e, s, reductions) for e, s in zip(body.eqns, body.steps, strict=True))


def _reads_map(eqn: Any, step: Step, run: list[Any], values: dict[Var, Value]) -> bool:
    """Whether a matmul reads something larger than its result that a run has made, such as the map of attention.

    That is computed again too, where both operands are made by the program. The result of the matmul is kept.
    """
    made = {v for e in run for v in e.outvars}
    floats = [v for v in eqn.invars if not isinstance(v, Literal) and float_dtype(v.aval) is not None]
    large = [v for v in floats if v in made and size_of(v.aval) > sum(size_of(out.aval) for out in eqn.outvars)]
    of_activations = all(v in values and values[v].sensitivity is not FREE for v in floats)
    return bool(large) and of_activations and not eqn.effects and _is_matmul(eqn, step)


def _is_matmul(eqn: Any, step: Step) -> bool:
    """Whether it is a low matmul, or a call of one with nothing else that is costly."""
    traits = traits_of(eqn.primitive)
    if step.mode is not Mode.ENTER:
        return traits.matmul and step.mode is Mode.LOW
    if not traits.plain_call:
        return False
    pairs = list(zip(step.bodies[0].eqns, step.bodies[0].steps, strict=True))
    return any(_is_matmul(*pair) for pair in pairs) and all(_is_matmul(*p) or _may_be_inside(*p) for p in pairs)


def _region(plan: Plan, steps: list[int], readers: dict[Var, list[Reader]], constants: Collection[Var]) -> Recomputed:
    all_eqns, inside = plan.eqns, set(steps)
    eqns = [all_eqns[i] for i in steps]
    made = {v: None for eqn in eqns for v in eqn.outvars if v not in constants}
    read = [v for eqn in eqns for v in eqn.invars if not isinstance(v, Literal)]
    outside = {v: {r.format for r in readers.get(v, ()) if r.place not in inside} for v in made}
    outs = {v: formats for v, formats in outside.items() if formats}
    return Recomputed(
        tuple(steps),
        tuple(steps),
        tuple(dict.fromkeys(v for v in read if v not in made and v not in constants)),
        tuple(outs),
        tuple(formats.pop() if len(formats) == 1 else None for formats in outs.values()),
    )


def _pays(region: Recomputed, size: int, values: dict[Var, Value]) -> bool:
    """Whether every operand as large as the nonlinear float32 work is low; `values` lacks closed-over arrays."""
    large = [v for v in region.ins if float_dtype(v.aval) is not None and size_of(v.aval) >= size]
    return bool(large) and all(v in values and values[v].is_low for v in large)


def _largest_in_float32(plan: Plan, steps: list[int]) -> int:
    eqns = plan.eqns
    return max(_size_in_float32(eqns[i], plan.steps[i]) for i in steps)


def _size_in_float32(eqn: Any, step: Step) -> int:
    """The number of entries that a nonlinear operation of an equation makes in float32; 0: it is linear, or low."""
    if step.mode is Mode.ENTER:
        body = step.bodies[0]
        return max(map(_size_in_float32, body.eqns, body.steps), default=0)
    traits = traits_of(eqn.primitive)
    of_two = traits.product and not any(isinstance(v, Literal) for v in eqn.invars)
    if not (of_two or traits.nonlinear) or step.outs[0].dtype != np.float32:
        return 0
    return size_of(eqn.outvars[0].aval)
