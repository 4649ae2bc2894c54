"""What a compiled program sends from device to device, as read from its text."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import raises
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jaxamp import amp_report, assert_collectives, compiled_collectives

MESH = AbstractMesh((2, 4), ("a", "b"))
LINE = '%x.1 = {result} {op}(%y), channel_id=1, {groups}metadata={{op_name="jit(f)/block/dot_general"{source}}}'


def program(op="all-gather", result="bf16[64,8]{1,0}", groups="", source="", head=""):
    line = LINE.format(op=op, result=result, groups=groups and f"{groups}, ", source=source)
    entry = f"ENTRY %main (y: f32[8,8]) -> f32[8,8] {{\n  %y = bf16[8,8]{{1,0}} parameter(0)\n  {line}\n}}\n"
    return f"HloModule jit_f\n{head}\n{entry}"


def only(text, mesh=None):
    (row,) = compiled_collectives(text, mesh)
    return row


@pytest.mark.parametrize(
    ("op", "result", "expected"),
    [
        ("all-gather", "bf16[64,8]{1,0}", ("all-gather", "bfloat16", 1024)),
        ("all-gather-start", "(bf16[8,8]{1,0}, bf16[64,8]{1,0})", ("all-gather", "bfloat16", 1024)),
        ("all-gather-start", "((bf16[8,8]{1,0}), bf16[64,8]{1,0})", ("all-gather", "bfloat16", 1024)),
        ("all-reduce", "f32[8,8]{1,0}", ("all-reduce", "float32", 256)),
        ("all-reduce-start", "f32[8,8]{1,0}", ("all-reduce", "float32", 256)),
        ("all-reduce-start", "((f32[8,8]{1,0}), f32[8,8]{1,0})", ("all-reduce", "float32", 256)),
        ("reduce-scatter", "f32[8,8]{1,0}", ("reduce-scatter", "float32", 1024)),  # by groups of 4
        ("collective-permute", "f8e4m3fn[8,8]{1,0}", ("collective-permute", "float8_e4m3fn", 64)),
        ("all-to-all", "(s8[8,8]{1,0}, s8[8,8]{1,0})", ("all-to-all", "s8", 128)),
        ("all-reduce", "pred[]", ("all-reduce", "pred", 1)),
    ],
)
def test_kinds_dtypes_and_bytes(op, result, expected):
    assert only(program(op, result, "replica_groups={{0,1,2,3},{4,5,6,7}}"), MESH)[:3] == expected


def test_the_end_of_an_asynchronous_one_is_not_another():
    assert compiled_collectives(program("all-gather-done")) == []


def test_arrays_of_several_dtypes_are_a_row_each():
    rows = compiled_collectives(program("all-reduce", "(f32[8]{0}, bf16[8]{0}, f32[4]{0})"))
    assert [(row.dtype, row.bytes) for row in rows] == [("float32", 48), ("bfloat16", 16)]


@pytest.mark.parametrize(
    ("groups", "axes"),
    [
        ("replica_groups={{0,1,2,3},{4,5,6,7}}", ("b",)),
        ("replica_groups={{0,4},{1,5},{2,6},{3,7}}", ("a",)),
        ("replica_groups={{0,1,2,3,4,5,6,7}}", ("a", "b")),
        ("replica_groups={}", ("a", "b")),
        ("replica_groups=[2,4]<=[8]", ("b",)),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", ("a",)),
        ("replica_groups=[1,8]<=[8]", ("a", "b")),
        ("replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_1'}", ("b",)),
        ("replica_groups=mesh['x'=8] {'x':(1)2}", ("a",)),
        ("replica_groups=mesh['x'=8] {'x':(2)4}", ("b",)),
        ("replica_groups={{0,1},{2,3},{4,5},{6,7}}", ()),  # along no axis
        ("source_target_pairs={{0,1},{1,2},{2,3},{3,0}}", ("b",)),
        ("source_target_pairs={{0,4},{4,0}}", ("a",)),
    ],
)
def test_axes_of_the_mesh(groups, axes):
    op = "collective-permute" if "pairs" in groups else "all-gather"
    assert only(program(op, groups=groups), MESH).axes == axes
    assert only(program(op, groups=groups)).axes == ()


def test_scope_and_source():
    row = only(program(source=' source_file="net.py" source_line=7'))
    assert (row.scope, row.source) == ("block", "net.py:7")
    tables = """
FileNames
1 "a.py"
2 "net.py"

FunctionNames
1 "f"

FileLocations
1 {file_name_id=1 function_name_id=1 line=3 end_line=3 column=1 end_column=2}
2 {file_name_id=2 function_name_id=1 line=12 end_line=12 column=1 end_column=2}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
4 {file_location_id=2 parent_frame_id=1}

"""
    assert only(program(source=" stack_frame_id=4", head=tables)).source == "net.py:12"
    assert only(program(source=" stack_frame_id=9", head=tables)).source == ""


LOOP = """HloModule jit_f

%inner (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  ROOT %a = f32[8]{0} all-reduce(%p), replica_groups={}, to_apply=%add
}

%outer (p: f32[8]) -> f32[8] {
  %q = f32[8]{0} parameter(0)
  ROOT %w = f32[8]{0} while(%q), condition=%c, body=%inner, backend_config={"known_trip_count":{"n":"3"}}
}

ENTRY %main (p: f32[8]) -> f32[8] {
  %r = f32[8]{0} parameter(0)
  ROOT %v = f32[8]{0} while(%r), condition=%c, body=%outer, backend_config={"known_trip_count":{"n":"5"}}
}
"""


def test_how_often():
    row = only(LOOP)
    assert (row.times, row.total, row.in_loop) == (15, 15 * 32, True)
    assert not only(program()).in_loop
    row = only(LOOP.replace('"n":"3"', '"m":"3"'))
    assert (row.times, row.total, row.in_loop) == (None, 32, True)


SHARED = """HloModule jit_f

%sum (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  ROOT %a = f32[8]{0} all-reduce(%p), replica_groups={}, to_apply=%add
}

%twice (p: f32[8]) -> f32[8] {
  %q = f32[8]{0} parameter(0)
  %once = f32[8]{0} call(%q), to_apply=%sum
  ROOT %again = f32[8]{0} call(%once), to_apply=%sum
}

ENTRY %main (p: f32[8]) -> f32[8] {
  %r = f32[8]{0} parameter(0)
  %c = f32[8]{0} call(%r), to_apply=%sum
  %v = f32[8]{0} while(%c), condition=%cond, body=%twice, backend_config={"known_trip_count":{"n":"5"}}
  ROOT %last = f32[8]{0} OP
}
"""


@pytest.mark.parametrize(
    ("op", "times"),
    [
        ("copy(%v)", 11),  # once, and twice in each of five rounds
        ("while(%v), condition=%cond, body=%sum", None),
        ('while(%v), condition=%cond, body=%sum, backend_config={"known_trip_count":{"n":"7"}}', 18),
        ("conditional(%i, %v, %v), branch_computations={%sum, %twice}", 13),  # of two branches, the one that sends more
        ("conditional(%i, %v, %v), true_computation=%sum, false_computation=%sum", 12),
        ("async-start(%v), calls=%sum", 12),
        ("async-done(%v), calls=%sum", 11),  # what it ends is counted where it begins
    ],
)
def test_a_computation_that_several_call_runs_for_each_of_them(op, times):
    row = only(SHARED.replace("OP", op))
    assert (row.times, row.total) == (times, 32 * (times or 1))


@functools.cache
def summed_over_devices():
    mesh = Mesh(np.asarray(jax.devices()).reshape(4, 2), ("d", "t"))
    x = jax.ShapeDtypeStruct((8, 16), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec("d")))

    def total(x):
        with jax.named_scope("total"):
            return lax.scan(lambda c, _: (c + jnp.sum(x * c[0], 0), None), jnp.ones(16), None, length=3)[0]

    return jax.jit(total).lower(x).compile()


def test_a_compiled_program_knows_its_mesh():
    (row,) = compiled_collectives(summed_over_devices())
    assert row[:5] == ("all-reduce", "float32", 64, 3, ("d",))
    assert row.scope == "total"
    assert "test_collectives.py:" in row.source


def test_a_report_tells_what_is_sent():
    fn = lambda w: jnp.sum(w @ w)
    plain = amp_report(fn)(jnp.ones((4, 4)))
    report = amp_report(fn, compiled=summed_over_devices())(jnp.ones((4, 4)))
    assert plain.sent == {}
    assert "sent between devices" not in plain.text()
    assert report.sent == {("d", "float32"): 192}
    assert "sent between devices        192 B float32 over d" in report.text()
    assert report.to_dict()["totals"]["sent"] == [{"axes": "d", "dtype": "float32", "bytes": 192}]
    assert report.to_dict()["collectives"][0]["kind"] == "all-reduce"


# -- the check


def test_the_check_names_what_is_wrong():
    compiled = summed_over_devices()
    assert_collectives(compiled)
    assert_collectives(compiled, gather="bfloat16", reduce="float32")
    with pytest.raises(
        AssertionError, match=r"all-reduce of 64 bytes 3 times in float32, not in bfloat16 \(over d, in tot"
    ):
        assert_collectives(compiled, reduce=jnp.bfloat16)
    assert_collectives(compiled, reduce="bfloat16", min_bytes=65)


def test_the_check_looks_at_arrays_of_floats():
    for result in ("f32[]", "f32[1]{0}", "s32[64]{0}", "pred[64]{0}"):
        assert_collectives(program("all-reduce", result), reduce="bfloat16")
    with pytest.raises(AssertionError, match="not in bfloat16"):
        assert_collectives(program("all-reduce", "f32[2]{0}"), reduce="bfloat16")


def test_what_is_sent_on_is_checked_as_what_is_gathered():
    for op in ("all-gather", "all-to-all", "collective-permute"):
        with pytest.raises(AssertionError, match=f"{op} of 1024 bytes in bfloat16, not in float32"):
            assert_collectives(program(op), gather="float32")
        assert_collectives(program(op), reduce="float32")


# -- bad input


def test_bad_input():
    lowered = jax.jit(jnp.sin).lower(1.0)
    with raises(TypeError, "compiled_collectives got Lowered that is not a compiled program; expected", "Write"):
        compiled_collectives(lowered)
    with raises(TypeError, "compiled_collectives got a mesh of type str; expected a jax.sharding.Mesh", "Leave it out"):
        compiled_collectives(program(), mesh="d")
    for given in ("int8", "bfloat17", 3):
        with raises(TypeError, f"assert_collectives got gather={given!r}; expected a float dtype", "Write gather='bf"):
            assert_collectives(program(), gather=given)
