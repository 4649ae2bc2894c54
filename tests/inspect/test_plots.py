"""Pictures say all that a report or a comparison has, with units, and can be saved for a paper."""

from collections import Counter

import pytest
from reports import BF16, F32, large_report, matmul, mixed_report, report_of

import jaxamp
from jaxamp._inspect.comparison import Comparison
from jaxamp._inspect.ranges import Range

matplotlib = pytest.importorskip("matplotlib")
matplotlib.use("agg")


@pytest.fixture(autouse=True)
def _closed():
    yield
    matplotlib.pyplot.close("all")


def comparison_of(**ranges):
    return Comparison("loss", BF16, F32, (), (), (), ranges, ())


def labels(axes):
    return [text.get_text() for text in axes.get_yticklabels()]


def lengths(axes):
    """The length of each line of stacked bars."""
    found = Counter()
    for bar in axes.patches:
        found[round(bar.get_y(), 3)] += bar.get_width()
    return list(found.values())


def test_flops_have_a_unit_and_no_offset():
    (axes,) = (figure := mixed_report().plot()).axes
    assert axes.get_xlabel() == "matmuls, forward and backward [GFLOP]"
    assert labels(axes)[:2] == ["head", "block_1/mlp/up"]
    assert lengths(axes) == pytest.approx([2, 0.1, 0.05, 0.02, 0.009])
    figure.canvas.draw()
    assert axes.xaxis.get_offset_text().get_text() == ""
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["bfloat16 (97.7 %)", "float32 (2.3 %)"]


def test_scopes_that_do_not_fit_are_counted_and_summed():
    rows = [matmul(f"part_{i}_of_many", (1 + i) * 10**6, dtype=F32 if i % 2 else BF16) for i in range(100)]
    (axes,) = report_of(*rows).plot().axes
    assert len(labels(axes)) == 24
    assert labels(axes)[-1] == "and 77 more"
    assert sum(lengths(axes)) == pytest.approx(
        sum(row.flops for row in rows) / 1e9 * (1000 if "MFLOP" in axes.get_xlabel() else 1)
    )


def test_layers_are_merged_where_there_are_many():
    (axes,) = large_report(300).plot().axes
    assert sorted(labels(axes)) == ["block_*/attention", "block_*/mlp", "block_*/norm"]


def test_long_names_that_end_alike_keep_their_own_bars():
    rows = [matmul(f"{letter}{'x' * 60}", 10**6) for letter in "abc"]
    (axes,) = report_of(*rows).plot().axes
    assert lengths(axes) == pytest.approx([1, 1, 1])


def test_a_report_without_matmuls_has_a_picture():
    (axes,) = report_of().plot().axes
    assert [text.get_text() for text in axes.texts] == ["There are no matmuls."]


def test_ranges_stand_below_those_of_formats():
    values = Range(Counter({-20: 1, 0: 97, 3: 1}), 1)
    above, below, *_ = comparison_of(head=values).plot(formats=["e2m1", jaxamp.format("nvfp4")]).axes
    assert labels(above) == ["float16", "bfloat16", "float8 e4m3", "float8 e5m2", "e2m1", "nvfp4"]
    bars = zip(labels(above), above.patches[::2], strict=True)
    normal = {label: (bar.get_x(), bar.get_x() + bar.get_width()) for label, bar in bars}
    assert normal["float16"] == pytest.approx((-14, 16), abs=1e-3)
    assert normal["bfloat16"] == pytest.approx((-126, 128), abs=1e-2)
    assert normal["float8 e4m3"] == pytest.approx((-6, 8.807), abs=1e-3)  # up to 448
    assert normal["float8 e5m2"] == pytest.approx((-14, 15.807), abs=1e-3)  # up to 57344
    assert normal["e2m1"] == normal["nvfp4"] == pytest.approx((0, 2.585), abs=1e-3)
    assert labels(below) == ["head (1.0 % zero)"]
    assert below.get_xlim() == (-25, 17)  # bfloat16 does not stretch it
    shares = below.collections[0].get_array().ravel()
    assert shares[0 - -25] == pytest.approx(0.97)


@pytest.mark.parametrize("given", ["e3m2", jaxamp.format("e3m2")])
def test_one_format_need_not_be_in_a_list(given):
    assert labels(comparison_of(a=Range(Counter({0: 1}), 0)).plot(formats=given).axes[0])[-1] == "e3m2"


def test_a_few_tiny_values_do_not_stretch_the_axis_and_are_counted():
    values = Range(Counter({-140: 1, 0: 9_999, 30: 1}), 0)
    _, below, *_ = comparison_of(head=values).plot().axes
    assert below.get_xlim() == (-25, 32)
    assert labels(below) == ["head (<0.1 % below)"]


def test_ranges_that_do_not_fit_are_counted():
    many = {f"part_{i}_of_many": Range(Counter({i - 20: 10}), 0) for i in range(40)}
    _, below, *_ = comparison_of(**many).plot().axes
    assert len(labels(below)) == 24
    assert labels(below)[-1] == "and 17 more"
    assert labels(comparison_of().plot().axes[1]) == []


@pytest.mark.parametrize(("ending", "start"), [("pdf", b"%PDF"), ("svg", b"<?xml"), ("png", b"\x89PNG")])
def test_pictures_are_saved_as_their_ending_says(ending, start, tmp_path):
    comparison = comparison_of(head=Range(Counter({0: 3, 1: 1}), 0))
    mixed_report().plot(tmp_path / f"flops.{ending}")
    comparison.plot().savefig(tmp_path / f"ranges.{ending}")
    for name in ("flops", "ranges"):
        written = (tmp_path / f"{name}.{ending}").read_bytes()
        assert written.startswith(start)
        assert ending == "png" or b"image/png" not in written  # vectors, not pixels


def test_nothing_is_clipped():
    for figure in (mixed_report().plot(), comparison_of(**{"a/long/scope": Range(Counter({0: 3}), 1)}).plot()):
        figure.canvas.draw()
        drawn, page = figure.get_tightbbox(), figure.bbox_inches
        assert drawn.x0 >= page.x0 - 0.01
        assert drawn.x1 <= page.x1 + 0.01
        assert drawn.y0 >= page.y0 - 0.01
        assert drawn.y1 <= page.y1 + 0.01
