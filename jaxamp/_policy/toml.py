"""Policies as TOML tables. Presets are the tables in `policies/`; a user's table has the same form:

extends = "default"              # optional: start from a preset

[rules]                          # word = primitives
float32 = ["tanh", "logistic"]

[rules.float16]                  # only where the compute dtype is float16
float32 = ["mul"]

[scopes]
head = "float32"                 # scope = word
"*/attention/*" = "infer"
"eqx.nn.Linear" = { add = "float32" }   # scope = { primitive = word }

[quantized]                      # what the word "quantized" means: the arguments of `jaxamp.use_formats`
operands = "e4m3"
gradients = { name = "e5m2", rounding = "stochastic" }   # a name, or the arguments of `jaxamp.format`

[quantized.scopes]
"*/mlp" = { kept = "e4m3" }      # what is not said is as above

[communication]                  # between devices
gather = "compute"               # parameters that only matmuls read: compute or float32
reduce = "float32"               # gradients of parameters: float32, compute or wire

[communication.scopes]
head = { gather = "float32" }    # what is not said is as above
"""

import dataclasses
import functools
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

from .._compat import NOT_EVERYWHERE, Primitive, primitives
from .._errors import nearest
from .._traits import declared
from .communication import COMMUNICATION, FIELDS, Communication
from .lookup import PINS, Key, Policy
from .mapping import FrozenPolicy
from .quantization import FIELDS as QUANTIZED
from .quantization import Quantization, quantization
from .rules import WORDS, ByTarget, Rule, use_original_precision

_SECTIONS = ("rules", "scopes", "quantized", "communication", "extends")
_TARGETS = ("float16", "bfloat16")
_LONGEST_CHAIN = 50  # of tables that extend one another


def _folder() -> Path:
    package = Path(__file__).parent.parent
    inside = package / "policies"  # a wheel
    return inside if inside.is_dir() else package.parent / "policies"  # a checkout, an editable install


def presets() -> tuple[str, ...]:
    """Name the policies that come with jaxamp.

    Returns:
        Names, for `amp_policy=`.

    >>> presets()
    ('conservative', 'default', 'fast', 'fp8', 'fp8_delayed', 'torch')
    """
    return tuple(sorted(path.stem for path in _folder().glob("*.toml")))


class Header(NamedTuple):
    """What a table says of itself."""

    description: str
    extends: str | None


def header(policy: str) -> Header:
    """The header of a preset's table, or of the table at a path."""
    path = _folder() / f"{policy}.toml" if policy in presets() else Path(policy)
    data = _parse_toml(str(path), _read(path))
    return Header(str(data.get("description", "")), data.get("extends"))


class _Table(NamedTuple):
    """The text of a table, to tell the reader of an error where to look."""

    name: str
    text: str
    chain: tuple[Path, ...]  # the tables that extend one another, this one last
    words: Mapping[str, Rule] = MappingProxyType(WORDS)  # the rules by their names

    @property
    def folder(self) -> Path:
        """Where a relative `extends` starts."""
        return self.chain[-1].parent

    def fail(self, word: str, expected: str, instead: str) -> NoReturn:
        whole = re.compile(rf"(?<![\w-]){re.escape(word)}(?![\w-])")
        lines = enumerate(self.text.splitlines(), 1)
        line = next((f", line {number}" for number, text in lines if whole.search(text.split("#")[0])), "")
        raise ValueError(f"{self.name}{line}: got {word!r}; expected {expected}.{instead}")


def _section(table: _Table, data: Mapping[str, Any], name: str, form: str) -> dict[str, Any]:
    section = data.get(name, {})
    if not isinstance(section, dict):
        table.fail(name, "a section", f" Write [{form}] on a line of its own, and the entries below it.")
    return section


def _primitive(table: _Table, name: Any) -> Primitive | None:
    if not isinstance(name, str):
        table.fail(str(name), "the name of a JAX primitive", " Write for example 'dot_general'.")
    if name in primitives():
        return primitives()[name]
    if (ours := declared(name)) is not None:
        return ours
    if name in NOT_EVERYWHERE:
        return None
    table.fail(
        str(name),
        "the name of a JAX primitive, as a jaxpr prints it",
        nearest(str(name), primitives()) or " Write for example 'dot_general'.",
    )


def _rule(table: _Table, word: Any) -> Rule:
    if not isinstance(word, str) or word not in table.words:
        table.fail(str(word), "a rule's name: " + ", ".join(sorted(table.words)), nearest(str(word), table.words))
    return table.words[word]


def _assignments(table: _Table, section: Mapping[str, Any]) -> dict[Primitive, Rule]:
    rules: dict[Primitive, Rule] = {}
    words: dict[Primitive, str] = {}
    for word, names in section.items():
        rule = _rule(table, word)
        if not isinstance(names, list):
            table.fail(word, "a list of primitives after it", f" Write {word} = [{names!r}].")
        for name in names:
            primitive = _primitive(table, name)
            if primitive is None:
                continue
            if primitive in rules:
                table.fail(
                    name,
                    "each primitive under one rule",
                    f" It is under {words[primitive]!r} and under {word!r}: remove one.",
                )
            rules[primitive], words[primitive] = rule, word
    return rules


def _base(table: _Table, extends: Any) -> Policy:
    if not isinstance(extends, str):
        table.fail("extends", "a preset's name or the path of a table after it", ' Write extends = "default".')
    if extends in presets():
        return load_preset(extends)
    if (table.folder / extends).resolve() in table.chain:
        table.fail(extends, "a table that doesn't extend itself", ' Write extends = "default".')
    if len(table.chain) > _LONGEST_CHAIN:
        table.fail(extends, f"at most {_LONGEST_CHAIN} tables that extend one another", ' Write extends = "default".')
    if not extends.endswith(".toml") or not (table.folder / extends).is_file():
        known = f"the presets are {', '.join(presets())}"
        table.fail(extends, f"a preset's name or the path of a table; {known}", nearest(extends, presets()))
    return load_table(table.folder / extends, table.chain)


def _parse(table: _Table) -> dict[Key, Any]:
    data = _parse_toml(table.name, table.text)
    for section in data:
        if section not in ("description", *_SECTIONS):
            expected = "extends, description, [rules], [scopes], [quantized] or [communication]"
            table.fail(section, expected, nearest(section, _SECTIONS))
    policy: dict[Key, Any] = dict(_base(table, data["extends"])) if "extends" in data else dict(PINS)
    policy, quantized, scoped = _with_quantization(table, data, policy)
    table = table._replace(words={**WORDS, "quantized": quantized})
    rules = dict(_section(table, data, "rules", "rules"))
    by_target = {target: _section(table, rules, target, f"rules.{target}") for target in _TARGETS if target in rules}
    rules = {word: names for word, names in rules.items() if word not in _TARGETS}
    policy |= _assignments(table, rules)
    for target, entries in by_target.items():
        for primitive, rule in _assignments(table, entries).items():
            old = policy.get(primitive, use_original_precision)
            default, special = old if isinstance(old, ByTarget) else (old, {})
            policy[primitive] = ByTarget(default, {**special, target: rule})
    for scope, entry in _section(table, data, "scopes", "scopes").items():
        if not isinstance(entry, dict):
            policy[scope] = _rule(table, entry)
            continue
        for name, word in entry.items():
            inside, rule = _primitive(table, name), _rule(table, word)
            if inside is not None:
                policy[scope, inside] = rule
    return policy | scoped | _communication(table, data, policy.get(COMMUNICATION, Communication()))


def _with_quantization(
    table: _Table, data: Mapping[str, Any], policy: dict[Key, Any]
) -> tuple[dict[Key, Any], Quantization, dict[Key, Any]]:
    """The policy with its quantising rules changed as a table says, the rule `quantized`, and the rules of scopes."""
    section = dict(_section(table, data, "quantized", "quantized"))
    scopes = _section(table, section, "scopes", "quantized.scopes")
    section.pop("scopes", None)

    def changed(before: Quantization | None, words: dict[str, Any] = section) -> Quantization:
        for name in words:
            if name not in QUANTIZED:
                table.fail(name, "one of " + ", ".join(QUANTIZED), nearest(name, QUANTIZED))
        try:
            return quantization(words, "[quantized]", before)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{table.name}: {error}") from None

    old = {key: rule for key, rule in policy.items() if isinstance(rule, Quantization)}
    rule = changed(next(iter(old.values()), None))
    scoped = {}
    for scope, words in scopes.items():
        if not isinstance(words, dict):
            table.fail(scope, "formats after it", f' Write {scope} = {{ operands = "e4m3" }}.')
        if not isinstance(_section(table, data, "scopes", "scopes").get(scope, {}), dict):
            table.fail(scope, "one rule, but it is in [scopes] and in [quantized.scopes]", " Leave one of them out.")
        scoped[scope] = changed(rule, words)
    return policy | {key: changed(before) for key, before in old.items()}, rule, scoped


def _communication(table: _Table, data: Mapping[str, Any], before: Communication) -> dict[Key, Communication]:
    section = dict(_section(table, data, "communication", "communication"))
    scopes = _section(table, section, "scopes", "communication.scopes")
    section.pop("scopes", None)
    everywhere = _sent(table, section, before)
    found: dict[Key, Communication] = {COMMUNICATION: everywhere} if section else {}
    for scope, words in scopes.items():
        if not isinstance(words, dict):
            table.fail(scope, "gather or reduce after it", f' Write {scope} = {{ reduce = "compute" }}.')
        found[scope, COMMUNICATION] = _sent(table, words, everywhere)
    return found


def _sent(table: _Table, words: Mapping[str, Any], before: Communication) -> Communication:
    for name, word in words.items():
        if name not in FIELDS:
            table.fail(name, "gather, reduce or [communication.scopes]", nearest(name, FIELDS))
        if word not in FIELDS[name]:
            table.fail(str(word), f"{' or '.join(FIELDS[name])} after {name}", nearest(str(word), FIELDS[name]))
    return dataclasses.replace(before, **words)


def _read(path: Path) -> str:
    """The text of a table. A byte-order mark, which some editors write, is left out."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path}: byte {error.start} is not UTF-8 text; expected a policy table. Save it as UTF-8."
        ) from None


def _parse_toml(name: str, text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        problem = str(error)
    except RecursionError:
        problem = "it is nested too deeply"
    raise ValueError(
        f"{name}: not a TOML table: {problem}; expected sections [rules] and [scopes]. "
        "`python -m pydoc jaxamp._policy.toml` shows the form."
    )


@functools.cache
def load_preset(name: str) -> FrozenPolicy:
    """The policy of a preset."""
    path = _folder() / f"{name}.toml"
    return FrozenPolicy(_parse(_Table(f"policies/{name}.toml", path.read_text(encoding="utf-8"), (path,))), name)


def load_table(path: Path, chain: tuple[Path, ...] = ()) -> FrozenPolicy:
    """The policy of the table at a path, which the tables of `chain` extend."""
    if path.suffix != ".toml" or not path.is_file():
        raise FileNotFoundError(
            f"amp_policy is the path {str(path)!r}, where there is no file; expected a policy table. "
            "Write its path, or a preset's name: " + ", ".join(presets()) + "."
        )
    return FrozenPolicy(_parse(_Table(str(path), _read(path), (*chain, path.resolve()))), str(path))
