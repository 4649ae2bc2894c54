"""The logic of the benchmarks: searches, ratios, verdicts and tables. That they run is seen in test_documents.py."""

import json
import math
import subprocess
import sys

import jax.numpy as jnp
import pytest
from helpers import ROOT

import jaxamp
from benchmarks import _torch, _trees, communication, kernels, memory, optimizer, passes, train_step, write_results, zoo
from benchmarks._contest import conclude
from benchmarks._sides import SIDES, choose, upstream_module
from benchmarks._tables import Column, markdown, number, text
from benchmarks._timing import Failure, Row, Times, Unavailable, few_words, figures, race
from benchmarks._zoo import NETWORKS
from jaxamp._inspect.collectives import CompiledCollective

FEW = {"unet": "slow", "laplacian": "slow"}  # networks of the zoo that are not left to long runs

# -- the largest batch


def counted(needed):
    asked = []

    def ask(batch):
        asked.append(batch)
        return needed(batch)

    return ask, asked


@pytest.mark.parametrize("limit", [1_000, 9_999, 10_000, 12_345, 123_456])
@pytest.mark.parametrize("fixed", [0, 500])
def test_the_largest_batch_is_found_in_few_compiles(limit, fixed):
    bytes_ = lambda batch: fixed + 17 * batch + batch // 7
    needed, asked = counted(bytes_)
    found = memory.largest(needed, limit, first=64, unit=4, probes=20)
    assert found % 4 == 0
    assert bytes_(found) <= limit < bytes_(found + 4)
    assert len(asked) == len(set(asked)) <= 6


def test_the_largest_batch_is_one_that_was_seen_to_fit_where_memory_jumps():
    needed, asked = counted(lambda batch: 100 * batch + (5_000 if batch > 40 else 0))
    assert memory.largest(needed, 9_000, first=16, unit=1, probes=20) == 40
    assert 40 in asked
    assert 41 in asked


def test_probes_run_out_on_a_batch_that_fits():
    needed, asked = counted(lambda batch: batch**2)
    found = memory.largest(needed, 10**6, first=4, unit=1, probes=3)
    assert found in asked
    assert found**2 <= 10**6


def test_a_batch_that_does_not_compile_does_not_fit():
    assert memory.largest(lambda b: None if b >= 48 else 10 * b, 10_000, first=64, unit=4, probes=20) == 44


def test_no_batch_fits_where_the_parameters_alone_are_too_large():
    assert memory.largest(lambda batch: 5_000 + batch, 1_000, first=64, unit=4, probes=20) == 0


# -- times


def test_a_side_that_raises_drops_out_of_a_race_and_says_why():
    def broken():
        raise ValueError("first line\nsecond line")

    seconds = iter([9.0, 1.0, 2.0, 3.0])
    raced = race({"good": lambda: next(seconds), "bad": broken}, repeats=3)
    assert raced == {"good": Times([1.0, 2.0, 3.0]), "bad": Failure("ValueError: first line")}


def test_figures_are_ratios_of_neighbours():
    raced = {"float32": Times([2.0, 4.0, 8.0]), "ours": Times([1.0, 2.0, 4.0]), "bad": Failure("why")}
    rows = figures(raced, {"vs_float32": "float32", "vs_mpx": "mpx"})
    assert rows["ours"]["vs_float32"] == 2.0
    assert rows["ours"]["vs_mpx"] is None
    assert rows["bad"] == {"note": "why"}


def test_a_comparison_has_a_verdict_where_it_has_a_target():
    plain, ours = Times([1.0, 1.0]), Times([2.0, 2.0])
    assert Row("", plain, ours, 2.0).as_dict()["verdict"] == "met"
    assert Row("", plain, ours, 1.9).as_dict()["verdict"] == "missed"
    assert "verdict" not in Row("", plain, ours, None).as_dict()


def test_one_repeat_has_no_spread():
    assert Times([1.0]).spread is None


def test_errors_are_put_in_a_few_words():
    assert few_words(Unavailable("needs a GPU")) == "needs a GPU"
    assert few_words(RuntimeError("RESOURCE_EXHAUSTED: Out of memory while ...")) == "out of memory"
    assert len(few_words(TypeError(300 * "x"))) == 100


# -- what goes over the wire


def collective(kind, axes, size=6400):
    return CompiledCollective(kind, "bfloat16", size, 1, axes, "", "")


@pytest.mark.parametrize(
    ("kind", "axes", "by_nvlink", "between"),
    [
        ("all-gather", ("gpu",), 6400 * 7 / 8, 0),
        ("all-gather", ("node",), 0, 6400 * 7 / 8),
        ("all-gather", ("node", "gpu"), 6400 * 7 / 8, 6400 * 7 / 64),
        ("reduce-scatter", (), 6400 * 7 / 8, 6400 * 7 / 64),
        ("all-reduce", ("gpu",), 2 * 6400 * 7 / 8, 0),
        ("all-to-all", ("node", "gpu"), 6400 * 7 / 64, 6400 * 7 / 8),
        ("collective-permute", ("gpu",), 6400, 0),
        ("collective-permute", ("node",), 0, 6400),
    ],
)
def test_bytes_that_a_device_of_eight_nodes_receives(kind, axes, by_nvlink, between):
    found = communication.received(collective(kind, axes), communication.Layout(8, 8))
    assert found == {"NVLink": by_nvlink, "400 Gb/s": between}


def test_eight_devices_are_in_one_node_or_each_in_its_own():
    found = communication.times_of([collective("all-gather", ("gpu",), 800)], communication.Layout(1, 8))
    assert found == {"NVLink": 700 / 450e9, "400 Gb/s": 700 / 50e9}


def test_layouts_of_more_than_a_node():
    assert [layout.name for layout in communication.layouts_of(8)] == ["FSDP"]
    assert communication.layouts_of(64) == [communication.Layout(8, 8), communication.Layout(8, 8, True)]


def test_what_tensor_parallelism_sends_where():
    """Parameters and their gradients between nodes, and activations inside of them."""
    layout = communication.Layout(4, 2, is_tensor_parallel=True)
    found = communication.sent(communication.SMALL["small"], layout, communication.devices(8, 4), lambda fn: fn)
    kinds = {(row.kind, row.axes) for row in found if row.bytes > 1000}
    assert {axes for kind, axes in kinds if kind == "all-gather"} >= {("node",)}
    assert ("all-reduce", ("gpu",)) in kinds
    assert not any(set(axes) == {"node", "gpu"} for kind, axes in kinds if kind == "all-gather")


# -- losses


def raced_rows(**losses):
    return {name: {"seconds": [1.0, 1.0], "losses": list(values)} for name, values in losses.items()}


def test_a_side_that_is_fast_and_wrong_is_flagged():
    rows = raced_rows(float32=[7.0, 6.5, 6.0], good=[7.0, 6.5, 6.05], lazy=[7.0, 7.0, 7.0], lost=[7.0, 6.0, math.nan])
    conclude(rows)
    assert [name for name, row in rows.items() if row["note"]] == ["lazy", "lost"]
    assert rows["lazy"]["note"] == "WRONG: loss off by 100% of the fall of float32"


def test_losses_are_compared_after_the_same_number_of_steps():
    rows = raced_rows(float32=[7.0, 6.5, 6.0], longer=[7.0, 6.5, 6.0, 3.0])
    conclude(rows)
    assert (rows["longer"]["loss"], rows["longer"]["note"]) == (6.0, None)


def test_a_failed_side_keeps_its_note():
    rows = raced_rows(float32=[7.0, 6.0]) | {"bad": {"note": "out of memory"}}
    conclude(rows)
    assert rows["bad"] == {"note": "out of memory"}


# -- optimizers


def test_the_trees_are_those_that_are_named():
    assert len(_trees.TREES["GPT-2 small"]) == 148
    assert _trees.number(_trees.TREES["GPT-2 small"]) == 124_439_808
    assert 1.05e9 < _trees.number(_trees.TREES["1.1 billion"]) < 1.15e9


def test_a_step_moves_parameters_and_state_twice():
    assert _trees.floor_bytes(params=2, state=3, grads=4) == 14


def test_kernels_are_counted_in_the_entry_of_a_program():
    called, entry = "%a = f32[] copy(%b)", "%x = f32[2]{0} fusion(%y), kind=kLoop\n  %z = f32[] copy(%x)"
    text = f"%f {{\n  {called}\n}}\nENTRY %main {{\n  {entry}\n}}"
    assert optimizer.kernels(text) == 2


# -- sides


def test_the_usual_sides_are_known():
    assert {name for names in train_step.USUAL.values() for name in names} <= set(SIDES)
    assert {*train_step.SMALL_SIDES, *memory.USUAL} <= set(SIDES)
    assert [name for name, side in SIDES.items() if side.make is None] == list(_torch.SIDES)


def test_upstream_is_run_from_the_folder_that_is_named(monkeypatch, tmp_path):
    (tmp_path / "jaxamp").mkdir()
    (tmp_path / "jaxamp" / "_amp.py").write_text("here = True\n")
    monkeypatch.setenv("JAXAMP_UPSTREAM", "nowhere")
    monkeypatch.setattr(sys, "argv", ["train_step", "--upstream", str(tmp_path)])
    load = upstream_module.__wrapped__  # it remembers what it has loaded
    with pytest.raises(Unavailable, match="not installed"):
        load(fix=False)
    train_step.arguments()
    assert load(fix=False).here


def test_a_misspelt_side_is_named():
    assert choose("float32,ours") == ["float32", "ours"]
    with pytest.raises(SystemExit, match=r"There is no side our\. Choose from float32, ours, "):
        choose("float32,our")


@pytest.mark.slow
@pytest.mark.parametrize(("network", "layers"), [("vit", "scan"), ("gpt", "unrolled")])
def test_every_side_runs_and_its_loss_agrees_or_it_says_why_not(network, layers, tmp_path):
    out = tmp_path / "out.json"
    options = ["--small", "--network", network, "--layers", layers, "--sides", "all", "--json", str(out)]
    subprocess.run([sys.executable, "-m", "benchmarks.train_step", *options], check=True, capture_output=True, cwd=ROOT)
    rows = {row["side"]: row for row in json.loads(out.read_text(encoding="utf-8"))["rows"]}
    assert {name for name, row in rows.items() if row.get("ms")} >= {
        *("float32", "ours", "ours-conservative", "ours-fast", "ours-torch", "ours-float16"),
        *("ours-keep", "ours-attention", "ours-attention-keep", "mpx", "jmp", "hand"),
    }
    assert not [row for row in rows.values() if (row["note"] or "").startswith("WRONG")]


# -- passes


def test_each_pass_is_disabled_in_turn():
    assert list(passes.SIDES) == [passes.ALL, *passes.PASSES, passes.NONE]
    assert set(passes.SMALL_SIDES) <= set(passes.SIDES)
    disabled = [side.make.keywords["disable_passes"] for side in passes.SIDES.values()]
    assert disabled == [(), *((name,) for name in passes.PASSES), passes.PASSES]
    for names in disabled:
        jaxamp.amp(lambda x: x, disable_passes=names)  # raises for a name that is not a pass


def test_a_pass_that_changes_nothing_is_not_timed(monkeypatch):
    class Lowered:
        def __init__(self, side):
            self.side = side

        def as_text(self):
            return str("recompute" in self.side.make.keywords["disable_passes"])

    monkeypatch.setattr(passes, "lower_step", lambda side, case: (None, Lowered(side)))
    case = train_step.Case("vit", train_step.SMALL, False)
    assert list(passes.with_own_programs(passes.SIDES, case)) == [passes.ALL, "recompute"]


def test_a_pass_is_worth_the_time_and_memory_of_a_step_without_it():
    step = lambda seconds, gib, loss: {"seconds": [seconds, seconds], "gib": gib, "losses": [7.0, loss]}
    rows = {passes.ALL: step(2.0, 4.0, 6.0), "good": step(3.0, 6.0, 6.01), "wrong": step(2.0, 4.0, 6.5)}
    passes.compare(rows | {"bad": (bad := {"note": "out of memory"})})
    assert [(row["time_ratio"], row["memory_ratio"]) for row in rows.values()] == [(1, 1), (1.5, 1.5), (1, 1)]
    assert [row["note"] for row in rows.values()] == [None, None, "WRONG: loss off by 50% of the fall of all passes"]
    assert bad == {"note": "out of memory"}


# -- kernels


def test_kernels_are_grouped_by_what_they_are_for():
    found = kernels.tally(
        [("nvjet_tst_128x256", 3.0), ("gemm_fusion_dot_7", 1.0), ("loop_broadcast_fusion_2", 2.0), ("memcpy128", 1.0)]
        + [("input_transpose_fusion", 0.5), ("input_reduce_fusion_1", 0.25), ("fusion_12", 0.25), ("??", 0.0)],
        steps=2,
    )
    assert [(row["group"], row["ms"], row["launches"]) for row in found[:4]] == [
        *[("all", 4.0, 4.0), ("matmuls", 2.0, 1.0), ("zeros", 1.0, 0.5), ("copies", 0.5, 0.5)],
    ]
    assert {row["group"] for row in found[4:]} == {
        *("transposes", "sums and maxima", "softmaxes and norms in one kernel", "other")
    }
    assert sum(row["share"] for row in found[1:]) == 1.0


@pytest.mark.parametrize(
    ("kernel", "group"),
    [
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128", "attention"),
        ("fmha_cutlassB_bf16_aligned_64x64", "attention"),
        ("sm90_xmma_fprop_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc", "convolutions"),
        ("void cutlass__5x_cudnn::Kernel<cutlass_tensorop_bf16_s16816wgrad_optimized>", "convolutions"),
        ("void cudnn::engines_precompiled::nchwToNhwcKernel", "convolutions"),
        ("loop_convert_fusion_3", "element by element"),
        ("triton_poi_fused__scaled_dot_product_cudnn_attention_transpose_3", "element by element"),
        ("triton_per_fused_add_native_layer_norm_12", "softmaxes and norms in one kernel"),
        ("triton_red_fused_sum_4", "sums and maxima"),
        ("void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>", "element by element"),
        ("Memcpy DtoD (Device -> Device)", "copies"),
    ],
)
def test_convolutions_are_not_attention(kernel, group):
    assert kernels.group_of(kernel) == group


# -- tables


def test_a_table_has_a_dash_where_a_row_has_nothing():
    columns = Column("side", "side"), Column("ms", "ms", number(1))
    rows = [{"side": "a|b", "ms": 1.25}, {"side": "c", "ms": None}]
    assert text(columns, rows) == "side  ms\na|b   1.2\nc     -"
    assert markdown(columns, rows) == "| side | ms |\n| --- | --- |\n| a\\|b | 1.2 |\n| c | - |"


def write(folder, name, question, rows, device="H200"):
    record = {"question": question, "device": device, "versions": {"jax": "1"}, "notes": ["A note."], "rows": rows}
    (folder / f"{name}.json").write_text(json.dumps(record), encoding="utf-8")


def step(side, ms, note=None, network="vit"):
    return {"network": network, "layers": "scan", "side": side, "title": side, "ms": ms, "gib": ms, "note": note}


def test_results_have_the_fastest_first_ours_in_bold_and_failures_last(tmp_path):
    rows = [step("mpx", None, "out of memory"), step("float32", 9.0), step("ours", 4.0)]
    write(tmp_path, "one", "train_step", rows)
    write(tmp_path, "two", "train_step", [step("ours", 3.0, network="gpt")])
    (section,) = write_results.read(tmp_path)
    page = write_results.document([section], tmp_path)
    lines = [line for line in page.splitlines() if line.startswith("|")]
    assert [line.split("|")[1].strip() for line in lines[:5]] == ["side", "---", "**ours**", "float32", "mpx"]
    assert lines[4].endswith("| out of memory |")
    assert page.count("Measured on H200; jax 1.") == 1
    assert page.count("- A note.") == 1
    assert "**gpt, layers scan**" in page


def test_results_of_another_device_are_a_section_that_says_so(tmp_path):
    write(tmp_path, "one", "train_step", [step("ours", 4.0)])
    write(tmp_path, "two", "train_step", [step("ours", 5.0)], device="cpu")
    page = write_results.document(write_results.read(tmp_path), tmp_path)
    assert "Measured on H200; jax 1." in page or "Measured on cpu; jax 1." in page
    assert "On cpu; jax 1." in page or "On H200; jax 1." in page


def test_pictures_are_saved_where_matplotlib_is(tmp_path):
    pytest.importorskip("matplotlib", reason="the benchmarks extra is not installed")
    write(tmp_path, "one", "train_step", [step("ours", 4.0), step("float32", 8.0)])
    point = {"growing": "depth", "depth": 6, "tokens": 196, "batch": 64, "side": "ours", "title": "ours"}
    write(tmp_path, "two", "growth", [{**point, "ms": 1.0, "gib": 1.0}, {**point, "depth": 12, "ms": 2.0, "gib": 2.0}])
    page = write_results.document(write_results.read(tmp_path), tmp_path)
    for name in ("step_vit_scan.png", "growth.png"):
        assert f"]({name})" in page
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


# -- zoo


def test_every_network_of_the_zoo_has_small_sizes_by_name():
    for name, entry in NETWORKS.items():
        assert set(entry.small) <= set(entry.sizes(small=False)), name
        assert entry.sizes(small=True) == entry.sizes(small=False) | entry.small
    assert {*zoo.USUAL, *zoo.SMALL, *zoo.IN_TORCH} <= set(NETWORKS)
    assert [name for name, side in zoo.SIDES.items() if side.make is None] == ["torch-compile", "torch-compile-sdpa"]


def test_a_misspelt_network_is_named(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["zoo", "--nets", "unet,resnt"])
    with pytest.raises(SystemExit, match=r"There is no network resnt\. Choose from resnet, convnext, "):
        zoo.arguments()


def test_the_error_of_a_gradient_is_relative_and_flagged_where_zeros_would_do():
    expected = {"a": jnp.array([3.0]), "b": jnp.array([0.0, 4.0])}
    assert zoo.relative_error({"a": jnp.array([3.0]), "b": jnp.array([0.0, 4.5])}, expected) == pytest.approx(0.1)
    assert zoo.judged(0.1) == {"error": 0.1, "note": None}
    assert zoo.judged(1.0)["note"] == "WRONG: as far from float32 as zeros"
    assert zoo.judged(float("nan")) == {"note": "WRONG: the gradient is not finite"}


def zoo_row(network, side, ratio):
    return {"network": network, "side": side, "title": side, "ms": 1.0, "vs_cast": ratio, "note": None}


def test_the_zoo_ends_with_geometric_means_over_the_networks_that_ran(tmp_path):
    pytest.importorskip("matplotlib", reason="the benchmarks extra is not installed")
    rows = [zoo_row("unet", "cast", 1.0), zoo_row("unet", "ours", 2.0), zoo_row("bert", "ours", 0.5)]
    write(tmp_path, "one", "zoo", [*rows, zoo_row("lstm", "ours", 8.0)])
    write(tmp_path, "two", "zoo", [zoo_row("bert", "mpx", 0.5), zoo_row("lstm", "mpx", None)])
    page = write_results.document(write_results.read(tmp_path), tmp_path)
    assert "over how many networks: ours 2.00x (of 3), mpx 0.50x (of 1)." in page
    assert "](zoo.png)" in page
    assert (tmp_path / "zoo.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", [pytest.param(n, marks=getattr(pytest.mark, FEW.get(n, "soak"))) for n in NETWORKS])
def test_every_network_of_the_zoo_runs_on_every_side(name, tmp_path):
    pytest.importorskip("haiku", reason="the benchmarks extra is not installed")
    out = tmp_path / "out.json"
    sides = "float32", "cast", "mpx", "ours", "ours-fast"
    options = ["--small", "--nets", name, "--sides", ",".join(sides), "--json", str(out)]
    subprocess.run([sys.executable, "-m", "benchmarks.zoo", *options], check=True, capture_output=True, cwd=ROOT)
    rows = {row["side"]: row for row in json.loads(out.read_text(encoding="utf-8"))["rows"]}
    assert set(rows) == set(sides)
    assert all(row["ms"] > 0 and row["note"] is None for row in rows.values())
    assert rows["float32"]["error"] < 1e-5
    assert all(1e-5 < rows[side]["error"] < 0.5 for side in sides[1:])


def test_memory_is_not_asked_of_another_device_in_place_of_a_gpu_that_cannot_be_compiled_for(monkeypatch):
    monkeypatch.setattr("sys.argv", ["memory", "--small", "--ahead"])
    monkeypatch.setattr(memory, "plugin_is_here", lambda: False)
    with pytest.raises(SystemExit, match=r"--ahead needs JAX's CUDA plugin.*pip install"):
        memory.main()
