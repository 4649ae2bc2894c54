"""Reports made by hand, of any size, and the text of a compiled program."""

from jaxamp import AmpReport, BytesKept
from jaxamp._inspect.reasons import Explanation, Role
from jaxamp._inspect.rows import Dtypes, Row, Source
from jaxamp._plan.reasons import Reason, Why
from jaxamp._traits.matmul_cost import Dims

F32, BF16 = "float32", "bfloat16"


def because(why, detail=None, role=Role.ITSELF):
    return Explanation(role, "dot_general", Reason(why, detail))


BY_TABLE = because(Why.BY_PRIMITIVE)


def matmul(scope, flops, *, dtype=BF16, phase="forward", line=10, times=1, dims=(8, 8, 8), **more):
    row = Row(
        phase=phase,
        scope=scope,
        primitive="dot_general",
        kind="matmul",
        written=Dtypes((F32, F32), (F32,)),
        run=Dtypes((dtype, dtype), (dtype,)),
        rule="use_compute_precision" if dtype == BF16 else "use_original_precision",
        why=BY_TABLE if dtype == BF16 else because(Why.BY_SCOPE, "amp_stop"),
        source=Source("/home/someone/model.py", line, "forward"),
        times=times,
        flops=flops,
        bytes=flops // 10,
        dims=Dims(*dims),
    )
    return row._replace(**more)


def cast(scope, moved, *, phase="forward"):
    run = Dtypes((F32,), (BF16,))
    why = Explanation(Role.ADDED, "dot_general", Reason(Why.BY_PRIMITIVE))
    return Row(phase, scope, "convert_element_type", "cast", None, run, "", why, None, 1, 0, moved, None)


def other(scope, flops, *, primitive="exp", kind="other", why=None, line=12):
    kept = Dtypes((F32,), (F32,))
    source = Source("/home/someone/model.py", line, "forward")
    why = why or because(Why.READ_ONLY_BY, ("exp",))
    return Row("forward", scope, primitive, kind, kept, kept, "widest", why, source, 1, flops, 64, None)


def report_of(*rows, name="loss", unmatched=(), notes=()):
    return AmpReport(name, BF16, tuple(rows), BytesKept(4000, 1000), tuple(unmatched), tuple(notes))


def mixed_report():
    """A bit of everything."""
    rows = [
        matmul("block_0/mlp/up", 9_000_000),
        matmul("block_0/mlp/down", 10_000_000, line=11),
        matmul(
            "block_0/mlp/down",
            10_000_000,
            phase="backward",
            line=11,
            why=because(Why.BY_PRIMITIVE, role=Role.DERIVATIVE),
        ),
        matmul("block_1/mlp/up", 100_000_000, dims=(8, 8, 7)),
        matmul("block_1/router", 50_000_000, dtype=F32, line=20),
        matmul("head", 2_000_000_000, times=3, line=30),
        cast("block_0/mlp/up", 4096),
        cast("block_1/router", 8192, phase="backward"),
        other("head", 1_000),
        other("head", 0, primitive="pallas_call", kind="not entered", why=because(Why.NOT_ENTERED, "pallas_call")),
        other("", 512, primitive="reduce_sum", line=40),
    ]
    return report_of(*rows, unmatched=("decoder/*",), notes=("no backward pass: TypeError: integers",))


def large_report(count, *, distinct=False):
    """`count` rows of a network of 48 layers; with nothing said twice, if asked for."""
    rows = []
    for i in range(count):
        scope = f"block_{i % 48}/{('attention', 'mlp', 'norm')[i % 3]}"
        more = {"why": because(Why.READ_ONLY_BY, (f"the operation number {i}",))} if distinct else {}
        source = Source(
            f"/home/someone/models/part_{i if distinct else i % 7}.py", i + 1 if distinct else i % 40, "apply"
        )
        if distinct:
            scope = f"{scope}/operation_{i}"
        phase = "forward" if 2 * i < count else "backward"
        rows.append(matmul(scope, 10**9 + 1_000_003 * i, phase=phase, source=source, **more))
    return report_of(*rows)


HLO = """
ENTRY %main (a: bf16[8,8], b: f32[8,8]) -> f32[8,8] {
  %a = bf16[8,8]{1,0} parameter(0)
  %b = f32[8,8]{1,0} parameter(1)
  %c = bf16[8,8]{1,0} convert(%b), metadata={op_name="jit(step)/block/convert_element_type"}
  %dot.1 = bf16[8,8]{1,0} dot(%a, %c), lhs_contracting_dims={1}, metadata={op_name="jit(step)/jvp(block)/dot_general"}
  %d = f32[8,8]{1,0} convert(%a)
  %dot.2 = f32[8,8]{1,0} dot(%d, %b), metadata={op_name="jit(step)/transpose(jvp(vmap(head)))/mlp/dot_general"}
  %h = bf16[8,8] dot(%a, %c), metadata={op_name="jit(f)/jvp(jit(g))/eval_jaxpr/block/attention/dot"}
  %g = (f32[8], s8[4]) custom-call(%a, %c), custom_call_target="__cublas$gemm", metadata={op_name="while/body/block/d"}
  ROOT %other = f32[8,8]{1,0} custom-call(%b), custom_call_target="TopK"
}
"""
