"""What commands found, as text within 100 columns."""

import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from .._policy.communication import COMMUNICATION
from .._policy.toml import Header
from .._table import WIDTH, Column, table
from .doctor import Device, Diagnosis
from .policies import RULE_ORDER, Difference, PolicyEntry

# -- policies


def render_presets(presets: Mapping[str, Header]) -> str:
    return "\n".join(table((name, header.description) for name, header in presets.items()))


def render_policy(name: str, header: Header, entries: Sequence[PolicyEntry], dtype: np.dtype | None) -> str:
    """The primitives under each rule, those with another rule for some compute dtype, then the scopes."""
    title = name if dtype is None else f"{name}, compute dtype {dtype.name}"
    parts = [title, *filter(None, [header.description]), *([f"extends {header.extends}"] if header.extends else [])]
    primitives = [entry for entry in entries if entry.scope is None]
    parts += ["", *_by_rule((entry.rule.name, entry.primitive or "") for entry in primitives)]
    for special in sorted({dtype for entry in primitives for dtype in entry.rule.by_dtype}):
        parts += ["", f"where the compute dtype is {special}"]
        parts += _by_rule(
            (entry.rule.by_dtype[special], entry.primitive or "")
            for entry in primitives
            if special in entry.rule.by_dtype
        )
    parts += [f"\nbetween devices: {entry.rule}" for entry in primitives if entry.primitive == COMMUNICATION.name]
    scoped = [entry for entry in entries if entry.scope is not None]
    return "\n".join([*parts, "", "scopes", *table((_key(entry), str(entry.rule)) for entry in scoped)])


def render_differences(a: str, b: str, found: Sequence[Difference]) -> str:
    if not found:
        return f"{a} and {b} are the same."
    rows = [(_key(row), str(row.a or "-"), str(row.b or "-")) for row in found]
    note = ["- is not named there."] if any(row.a is None or row.b is None for row in found) else []
    return "\n".join([*table([("", a, b), *rows]), *note])


def _key(row: PolicyEntry | Difference) -> str:
    return ": ".join(filter(None, (row.scope, row.primitive)))


_WRAP: dict[str, Any] = {"break_on_hyphens": False, "break_long_words": False}


def _by_rule(pairs: Iterable[tuple[str, str]]) -> Iterator[str]:
    """A paragraph for each rule, with its primitives, from pairs of both."""
    pairs = list(pairs)
    for rule in RULE_ORDER:
        primitives = ", ".join(primitive for other, primitive in pairs if other == rule)
        if primitives:
            yield textwrap.fill(primitives, WIDTH, initial_indent=f"{rule:<10}", subsequent_indent=" " * 10, **_WRAP)


# -- the doctor

_ANSWERS = {True: "yes", False: "no", None: "unknown"}
_FAST_PATHS = (Column(), Column(max(map(len, _ANSWERS.values()))), Column())


def render_diagnosis(found: Diagnosis) -> str:
    devices = [(f"{device.platform} {device.id}", _about(device)) for device in found.devices]
    paths = [(path.name, _ANSWERS[path.here], path.reason) for path in found.fast_paths]
    sections = {
        "versions": table(found.versions.items(), indent="  "),
        "settings": table(found.settings.items(), indent="  "),
        f"devices ({found.system})": table(devices, indent="  "),
        "fast paths": table(paths, _FAST_PATHS, indent="  "),
        "problems": table((("-", problem) for problem in found.problems), indent="  "),
    }
    return "\n\n".join("\n".join([title, *lines]) for title, lines in sections.items() if lines)


def _about(device: Device) -> str:
    memory = None if device.memory is None else f"{device.memory / 2**30:.1f} GiB for JAX"
    capability = device.compute_capability and f"compute capability {device.compute_capability}"
    return ", ".join(filter(None, (device.kind, capability, memory)))
