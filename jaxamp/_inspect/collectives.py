"""What a compiled program sends from device to device, read from XLA's text."""

import itertools
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .compiled import DTYPE_NAMES, LINE, scope_of, text_of

_REDUCES = ("all-reduce", "reduce-scatter")
_MOVES = ("all-gather", "all-to-all", "collective-broadcast", "collective-permute", "ragged-all-to-all")

_ARRAY = re.compile(r"\b([a-z]+[0-9]+\w*|pred)\[([\d,]*)\]")
_OPERAND = re.compile(r"%[\w.\-]+")
_CALLED = re.compile(r"\b(?:body|condition|calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"\b(?:branch_computations|called_computations)=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) (?:\(.*\) -> .*)?\{\s*$")
_GROUPS = re.compile(r"replica_groups=(\{\{.*?\}\}|\{\}|\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?|mesh\[.*?\] \{.*?\})")
_IOTA = re.compile(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(r"mesh\[(.*?)\] \{(.*?)\}")
_PAIRS = re.compile(r"source_target_pairs=\{(.*?)\}\}")
_FRAME = re.compile(r"stack_frame_id=(\d+)")
_SOURCE = re.compile(r'source_file="([^"]*)"(?: source_line=(\d+))?')


class CompiledCollective(NamedTuple):
    """A collective in a compiled program. One that sends arrays of several dtypes has a row for each dtype."""

    kind: str  # all-gather, all-reduce, reduce-scatter, all-to-all, collective-permute, ...
    dtype: str
    bytes: int  # of the whole arrays, gathered or not yet scattered, on one device, each time that it runs
    times: int | None  # how often it runs: rounds of the loops around it; None where they are not known
    axes: tuple[str, ...]  # of the mesh; empty where the mesh is not known
    scope: str  # named scopes, outermost first
    source: str  # file and line; empty where they are not known

    @property
    def in_loop(self) -> bool:
        """Whether it is in a loop."""
        return self.times != 1

    @property
    def total(self) -> int:
        """The bytes of all its runs; of one where their number is not known."""
        return self.bytes * (self.times or 1)


def compiled_collectives(compiled: Any, mesh: Any = None) -> list[CompiledCollective]:
    """List the collectives of a compiled program, with the dtypes that really go over the wire.

    Args:
        compiled: The result of `jax.jit(fn).lower(...).compile()`, or its text.
        mesh: The mesh, for the names of its axes. By default that of the program's arguments.

    Returns:
        A list of rows, each with `kind`, `dtype`, `bytes`, `times` (rounds of the loops around it), `total` (the bytes
        of all rounds), `axes` of the mesh, `scope` and `source`.

    Compile for the devices that you train on: XLA's CPU backend sends everything in float32.

    >>> import jax, jax.numpy as jnp
    >>> compiled_collectives(jax.jit(lambda x: x @ x).lower(jnp.ones((4, 4))).compile())
    []
    """
    text = text_of("compiled_collectives", compiled)
    if mesh is None:
        mesh = _mesh_of(compiled)
    elif not isinstance(mesh, jax.sharding.Mesh | jax.sharding.AbstractMesh):
        raise TypeError(
            f"compiled_collectives got a mesh of type {type(mesh).__name__}; expected a jax.sharding.Mesh. Leave it "
            "out to take that of the program's arguments."
        )
    return list(_collectives(text, {} if mesh is None else dict(mesh.shape)))


def _mesh_of(compiled: Any) -> Any:
    """The mesh of a program's arguments, or of its results; None if they have none, or several."""
    shardings = [getattr(compiled, name, ()) for name in ("input_shardings", "output_shardings")]
    meshes = {s.mesh for s in jax.tree.leaves(shardings) if isinstance(s, jax.sharding.NamedSharding)}
    shapes = {tuple(mesh.shape.items()) for mesh in meshes}
    return meshes.pop() if len(shapes) == 1 else None


def _collectives(text: str, mesh: Mapping[str, int]) -> Iterator[CompiledCollective]:
    times, sources = _Times(text), _Sources(text)
    inside = ""
    for line in text.splitlines():
        if (header := _COMPUTATION.match(line)) is not None:
            inside = header[2]
        found = LINE.match(line)
        if found is None:
            continue
        _, result, op, rest = found.groups()
        kind = op.removesuffix("-start")
        if kind not in _REDUCES + _MOVES:
            continue
        sizes: dict[str, int] = {}
        for dtype, size in _arrays(op, result, rest, mesh):
            sizes[dtype] = sizes.get(dtype, 0) + size
        axes = _axes(rest, mesh)
        for dtype, size in sizes.items():
            yield CompiledCollective(kind, dtype, size, times(inside), axes, scope_of(rest), sources(rest))


def _arrays(op: str, result: str, rest: str, mesh: Mapping[str, int]) -> Iterator[tuple[str, int]]:
    """Dtype and bytes of each whole array that is sent."""
    arrays = _ARRAY.findall(result)
    if op.endswith("-start"):  # its result is what it sends, and most have their operands before it
        operands = len(_OPERAND.findall(rest.split("), ")[0]))
        arrays = arrays[operands : 2 * operands] or arrays
    parts = _group_size(rest, mesh) if op.startswith("reduce-scatter") else 1
    for dtype, shape in arrays:
        size = math.prod(int(n) for n in shape.split(",") if n)
        yield DTYPE_NAMES.get(dtype, dtype), size * _bits(dtype) // 8 * parts


def _bits(dtype: str) -> int:
    found = re.match(r"[a-z]+(\d+)", dtype)
    return int(found[1]) if found else 8


# -- how often


class _Call(NamedTuple):
    """An instruction that runs other computations."""

    called: tuple[str, ...]
    rounds: int | None  # of a loop; None where they are not known
    is_choice: bool  # one of them runs


class _Times:
    """How often each computation runs, from all places that call it. Of branches, the one that runs it most counts."""

    def __init__(self, text: str):
        self._calls: dict[str, list[_Call]] = {}
        self._entry = inside = ""
        for line in text.splitlines():
            if (header := _COMPUTATION.match(line)) is not None:
                inside = header[2]
                self._entry = inside if header[1] else self._entry
            elif (call := _call(line)) is not None:
                self._calls.setdefault(inside, []).append(call)

    def __call__(self, name: str) -> int | None:
        """The runs of a computation; None where they are not known, and 1 if we don't see who calls it."""
        found = self._within(self._entry, name, {})
        return 1 if found == 0 else found

    def _within(self, outer: str, name: str, known: dict[str, int | None]) -> int | None:
        """How often a computation runs while another one runs once."""
        if outer == name:
            return 1
        if outer not in known:
            known[outer] = _sum([self._by(call, name, known) for call in self._calls.get(outer, ())])
        return known[outer]

    def _by(self, call: _Call, name: str, known: dict[str, int | None]) -> int | None:
        times = [self._within(called, name, known) for called in call.called]
        once = _largest(times) if call.is_choice else _sum(times)
        if once is None or once == 0:
            return once
        return None if call.rounds is None else once * call.rounds


def _call(line: str) -> _Call | None:
    """What a line of a program calls; None if nothing. The end of an asynchronous call names again what it began."""
    found = LINE.match(line)
    if found is None or found[3].endswith(("-done", "-update")):
        return None
    called = _CALLED.findall(line)
    for names in _BRANCHES.findall(line):
        called += [name.strip().lstrip("%") for name in names.split(",")]
    trips = _TRIPS.search(line)
    rounds = (int(trips[1]) if trips else None) if found[3] == "while" else 1
    return _Call(tuple(dict.fromkeys(called)), rounds, found[3] == "conditional") if called else None


def _sum(times: list[int | None]) -> int | None:
    return None if None in times else sum(n for n in times if n is not None)


def _largest(times: list[int | None]) -> int | None:
    return None if None in times else max(n for n in times if n is not None)


# -- along which axes


def _axes(rest: str, mesh: Mapping[str, int]) -> tuple[str, ...]:
    """The axes of the mesh along which a collective sends; empty if they are not known."""
    names = [name for name, size in mesh.items() if size > 1]
    if not names:
        return ()
    ids = np.arange(math.prod(mesh.values())).reshape(tuple(mesh.values()))
    if (pairs := _PAIRS.search(rest)) is not None:
        numbers = [tuple(map(int, pair)) for pair in re.findall(r"(\d+),(\d+)", pairs[1])]
        places = {int(i): np.unravel_index(int(i), ids.shape) for pair in numbers for i in pair}
        differ = [any(places[a][k] != places[b][k] for a, b in numbers) for k in range(ids.ndim)]
        return tuple(name for name, d in zip(mesh, differ, strict=True) if d)
    groups = _groups(rest, ids.size)
    for count in range(1, len(names) + 1):
        for chosen in itertools.combinations(names, count):
            along = [k for k, name in enumerate(mesh) if name in chosen]
            others = [k for k in range(ids.ndim) if k not in along]
            size = math.prod(ids.shape[k] for k in along)
            expected = {frozenset(row) for row in ids.transpose(*others, *along).reshape(-1, size).tolist()}
            if expected == groups:
                return chosen
    return ()


def _groups(rest: str, devices: int) -> set[frozenset[int]]:
    """The groups of devices that talk to each other."""
    found = _GROUPS.search(rest)
    if found is None or found[1] == "{}":
        return {frozenset(range(devices))}
    if (iota := _IOTA.fullmatch(found[1])) is not None:
        shape, reshaped, order = ([int(n) for n in part.split(",")] if part else [] for part in iota.groups())
        ids = np.arange(math.prod(reshaped)).reshape(reshaped)
        rows = ids.transpose(order or range(ids.ndim)).reshape(shape)
        return {frozenset(row) for row in rows.reshape(shape[0], -1).tolist()}
    if (named := _MESH.fullmatch(found[1])) is not None:
        return _groups_of_mesh(named[1], named[2])
    return {frozenset(int(n) for n in row.split(",")) for row in re.findall(r"\{([\d,]+)\}", found[1])}


def _groups_of_mesh(mesh: str, along: str) -> set[frozenset[int]]:
    """The groups of `mesh['a'=2,'b'=4] {'b'}`: axes, perhaps parts of them, as `'b':(1)2`."""
    shape = {name: int(size) for name, size in re.findall(r"'([^']*)'=(\d+)", mesh)}
    ids = np.arange(math.prod(shape.values())).reshape(tuple(shape.values()))
    chosen = re.findall(r"'([^']*)'(?::\((\d+)\)(\d+))?", along)
    axes: list[int] = []
    names = list(shape)
    for name, before, size in chosen:
        k = names.index(name)
        if before:  # the middle of three parts of an axis
            first, part = int(before), int(size)
            whole = ids.shape[k]
            ids = ids.reshape(*ids.shape[:k], first, part, whole // first // part, *ids.shape[k + 1 :])
            names[k : k + 1] = [f"{name}:before", name, f"{name}:after"]
            axes = [a + 2 if a > k else a for a in axes]
            k += 1
        axes.append(k)
    others = [k for k in range(ids.ndim) if k not in axes]
    size = math.prod(ids.shape[k] for k in axes)
    return {frozenset(row) for row in ids.transpose(*others, *axes).reshape(-1, size).tolist()}


def _group_size(rest: str, mesh: Mapping[str, int]) -> int:
    return len(next(iter(_groups(rest, math.prod(mesh.values()) if mesh else 1))))


# -- where it was written


class _Sources:
    """Files and lines, which newer programs have in tables before the first computation."""

    def __init__(self, text: str):
        head = text.split("\n\n%", 1)[0]
        self._files = dict(re.findall(r'^(\d+) "(.*)"$', _table(head, "FileNames"), re.MULTILINE))
        location = r"^(\d+) \{file_name_id=(\d+) .*?line=(\d+)"
        found = re.findall(location, _table(head, "FileLocations"), re.MULTILINE)
        self._locations = {number: (file, line) for number, file, line in found}
        frames = r"^(\d+) \{file_location_id=(\d+)"
        self._frames = dict(re.findall(frames, _table(head, "StackFrames"), re.MULTILINE))

    def __call__(self, rest: str) -> str:
        if (found := _SOURCE.search(rest)) is not None:
            return f"{found[1]}:{found[2]}" if found[2] else found[1]
        frame = _FRAME.search(rest)
        file, line = self._locations.get(self._frames.get(frame[1], ""), ("", "")) if frame else ("", "")
        return f"{self._files[file]}:{line}" if file in self._files else ""


def _table(head: str, name: str) -> str:
    return head.partition(f"\n{name}\n")[2].partition("\n\n")[0]


# -- a check for users' tests


def assert_collectives(
    compiled: Any, *, gather: Any = None, reduce: Any = None, min_bytes: int = 0, mesh: Any = None
) -> None:
    """Check the dtypes in which a compiled program sends floats from device to device.

    Args:
        compiled: The result of `jax.jit(fn).lower(...).compile()`, or its text.
        gather: The dtype of what is gathered or sent on: all-gathers, all-to-alls, permutes. None: any.
        reduce: The dtype of what is summed over devices: all-reduces and reduce-scatters. None: any.
        min_bytes: Smaller ones are not checked, nor are single numbers, such as a loss.
        mesh: As in `compiled_collectives`.

    Raises:
        AssertionError: if there is one in another dtype. It names each, the largest first.

    >>> import jax, jax.numpy as jnp
    >>> compiled = jax.jit(lambda x: x @ x).lower(jnp.ones((4, 4))).compile()
    >>> assert_collectives(compiled, gather="bfloat16", reduce="float32")
    """
    wanted = {"gather": _dtype("gather", gather), "reduce": _dtype("reduce", reduce)}
    wrong = []
    for row in compiled_collectives(compiled, mesh):
        expected = wanted["gather" if row.kind in _MOVES else "reduce"]
        is_float = row.dtype.startswith(("float", "bfloat"))
        if expected is None or not is_float or row.dtype == expected:
            continue
        if row.bytes >= max(min_bytes, 1 + jnp.dtype(row.dtype).itemsize):
            wrong.append((row, expected))
    if wrong:
        wrong.sort(key=lambda each: -each[0].total)
        raise AssertionError("\n".join(_problem(row, expected) for row, expected in wrong))


def _dtype(name: str, dtype: Any) -> str | None:
    try:
        found = None if dtype is None else jnp.dtype(dtype)
    except TypeError:
        found = jnp.dtype(np.bool_)
    if found is not None and not jnp.issubdtype(found, jnp.floating):
        raise TypeError(
            f"assert_collectives got {name}={dtype!r}; expected a float dtype. Write {name}='bfloat16', or leave it "
            "out."
        )
    return None if found is None else found.name


def _problem(row: CompiledCollective, expected: str) -> str:
    where = [f"over {', '.join(row.axes)}" if row.axes else "", f"in {row.scope}" if row.scope else "", row.source]
    times = "" if row.times == 1 else f" {row.times or 'many'} times"
    place = ", ".join(each for each in where if each)
    return f"{row.kind} of {row.bytes} bytes{times} in {row.dtype}, not in {expected}" + (
        f" ({place})" if place else ""
    )
