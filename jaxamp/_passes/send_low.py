"""Send values over the wire in the compute dtype, where everything that reads them rounds them to it.

A float32 parameter that is split over devices is gathered for a matmul: by `with_sharding_constraint`, `reshard`, or
`all_gather` in a `shard_map`. The matmul rounds it. Rounded first, and then gathered, it has the same value, and half
the bytes go over the wire. Gradients are summed over devices in float32 as before (`_primitives/sent_low.py`).

Where the gathering is left to XLA's partitioner, it rounds first on its own; `round_once.py` is about how often.
"""

from collections.abc import Sequence
from typing import Any

from .._compat import Jaxpr, Literal, Primitive, Var, open_jaxpr, scopes, with_equations
from .._jaxpr import Memo
from .._plan.bodies import Entry, with_replaced_bodies
from .._plan.classify import Path
from .._plan.higher_order import describe
from .._plan.plan import Setting
from .._policy.communication import Communication
from .._primitives.sent_low import reduced_low, sent_low, takes_wire
from .._traits import traits_of
from .rounded_reads import Flags, RoundedReads, rounds
from .send_quantized import send_quantized


def send_low(program: Jaxpr, setting: Setting, rounded: Sequence[bool] = (), path: Path = ()) -> Jaxpr:
    """The program with values sent in the compute dtype, where only rounded copies of them are read.

    `rounded`: which results are only read so. None, if it is empty.
    """
    if not setting.formats.narrows or not communicates(program):
        return program
    outs = tuple(rounded) or (False,) * len(open_jaxpr(program).outvars)
    return _Sender(setting).run(program, outs, path)[0]


def operands_rounded(program: Jaxpr, setting: Setting, path: Path) -> Flags:
    """Which operands of a program are only read rounded."""
    if not setting.formats.narrows:
        return (False,) * len(open_jaxpr(program).invars)
    return _Sender(setting).run(program, (False,) * len(open_jaxpr(program).outvars), path)[1]


def communicates(program: Jaxpr) -> bool:
    """Whether anything in a program sends values, or its derivative does."""
    return _communicates(program, Memo())


def _communicates(jaxpr: Jaxpr, known: Memo) -> bool:
    """Whether anything in a jaxpr sends values."""

    def sends(eqn: Any) -> bool:
        if (entry := describe(eqn)) is None:
            return traits_of(eqn.primitive).communicates or takes_wire(eqn.primitive)
        return any(_communicates(body.jaxpr, known) for body in entry.bodies)

    return known.get(jaxpr, None, lambda: any(map(sends, open_jaxpr(jaxpr).eqns)))


class _Sender:
    """Rewrites jaxprs, each once for what is done with its results."""

    def __init__(self, setting: Setting):
        self._low, self._formats = setting.formats.compute_dtype, setting.formats
        self._communication = setting.communication
        self._memo = Memo()

    def run(self, jaxpr: Jaxpr, outs: Flags, path: Path) -> tuple[Jaxpr, Flags]:
        """The jaxpr rewritten, if all that reads its results rounds those in `outs`, and the same of its operands."""
        return self._memo.get(jaxpr, (outs, path), lambda: self._run(jaxpr, outs, path))

    def _run(self, jaxpr: Jaxpr, outs: Flags, path: Path) -> tuple[Jaxpr, Flags]:
        body, eqns = open_jaxpr(jaxpr), list[Any]()
        reads = RoundedReads(body.outvars, outs)
        asked = lambda eqn: self._communication(path + scopes(eqn.source_info.name_stack))
        written = send_quantized(body.eqns, body.outvars, asked)
        for eqn in reversed(written):
            new, flags = self._equation(eqn, reads.of(eqn.outvars), path + scopes(eqn.source_info.name_stack))
            reads.read(eqn.invars, flags)
            eqns.append(new)
        eqns.reverse()
        same = len(eqns) == len(body.eqns) and all(new is old for new, old in zip(eqns, body.eqns, strict=True))
        return jaxpr if same else _sent_once(jaxpr, eqns), reads.of(body.invars)

    def _equation(self, eqn: Any, results: Flags, path: Path) -> tuple[Any, Flags]:
        """An equation whose results are read so, rewritten, and which of its operands it rounds."""
        traits, params = traits_of(eqn.primitive), eqn.params
        none = (False,) * len(eqn.invars)
        entry = describe(eqn)
        if entry is not None:
            return (eqn, none) if entry.lazy or traits.own_jvp else self._enter(eqn, entry, results, path)
        relayed = rounds(eqn, results, self._low)
        is_sent = (traits.communicates or takes_wire(eqn.primitive)) and not _changes_mode(eqn)
        if not is_sent or traits.fixed_dtype or not self._formats.may_lower(eqn.invars[0]):
            return eqn, relayed
        asked = self._communication(path)
        changed = {**params, "low": self._low, "reduce": asked.reduce}
        if not traits.communicates:  # its derivative does
            is_low = asked.reduce != "float32" and all(results)
            return eqn.replace(primitive=reduced_low(eqn.primitive), params=changed) if is_low else eqn, relayed
        if all(results):
            _check(eqn.primitive, asked)
            gathers_low = asked.gather == "compute"
            changed["low"] = self._low if gathers_low else eqn.invars[0].aval.dtype
            return eqn.replace(primitive=sent_low(eqn.primitive), params=changed), (gathers_low,)
        if asked.reduce != "float32" and takes_wire(eqn.primitive):
            return eqn.replace(primitive=reduced_low(eqn.primitive), params=changed), none
        return eqn, none

    def _enter(self, eqn: Any, entry: Entry, results: Flags, path: Path) -> tuple[Any, Flags]:
        carried = {operand for operand, _ in entry.carries}
        carried_out = {result for _, result in entry.carries}
        flags, new = [True] * len(eqn.invars), []
        for body in entry.bodies:
            count = len(open_jaxpr(body.jaxpr).outvars)
            outs = tuple(results[r] and r not in carried_out for r in body.results) or (False,) * count
            jaxpr, ins = self.run(body.jaxpr, outs, path)
            new.append(jaxpr)
            for operand, flag in zip(body.operands, ins, strict=True):
                flags[operand] = flags[operand] and flag and operand not in carried
        if any(jaxpr is not body.jaxpr for jaxpr, body in zip(new, entry.bodies, strict=True)):
            eqn = eqn.replace(params=with_replaced_bodies(eqn, entry, new))
        return eqn, tuple(flags)


def _changes_mode(eqn: Any) -> bool:
    """Whether it takes an array from axes of explicit sharding to automatic ones or back, as `auto_axes` does.

    Its context is that of one side, and nothing on the other can be cast there.
    """
    meshes = [getattr(getattr(v.aval, "sharding", None), "mesh", None) for v in (eqn.invars[0], eqn.outvars[0])]
    before, after = (getattr(mesh, "axis_types", None) for mesh in meshes)
    return before != after


def _check(primitive: Primitive, asked: Communication) -> None:
    if asked.reduce == "wire" and not takes_wire(primitive):
        raise ValueError(
            f"The policy has reduce='wire' for {primitive.name}, where XLA sums gradients on its own; expected a "
            "shard_map, where the program sums them. Write reduce='compute', or reduce='float32'."
        )


def _sent_once(jaxpr: Jaxpr, eqns: Sequence[Any]) -> Jaxpr:
    """A jaxpr of these equations, in which a value that is sent low to the same place again is not sent again.

    XLA would see that two float32 copies are the same; behind a barrier it does not.
    """
    sent: list[Any] = []
    instead: dict[Var, Var] = {}
    new: list[Any] = []
    for eqn in eqns:
        eqn = eqn.replace(invars=_renamed(eqn.invars, instead)) if instead else eqn
        if traits_of(eqn.primitive).communicates and "low" in eqn.params:
            known = (old for old in sent if old.primitive is eqn.primitive and old.invars[0] is eqn.invars[0])
            same = next((old for old in known if old.params == eqn.params and old.ctx == eqn.ctx), None)
            if same is not None:
                instead[eqn.outvars[0]] = same.outvars[0]
                continue
            sent.append(eqn)
        new.append(eqn)
    return with_equations(jaxpr, new, _renamed(open_jaxpr(jaxpr).outvars, instead))


def _renamed(atoms: Sequence[Any], instead: dict[Var, Var]) -> list[Any]:
    return [atom if isinstance(atom, Literal) else instead.get(atom, atom) for atom in atoms]
