"""A report as HTML: the page holds all of it, whatever it says, and asks for nothing; notebooks show a summary."""

import json
import re
from html.parser import HTMLParser

import jax
import jax.numpy as jnp
import pytest
from reports import F32, because, large_report, matmul, mixed_report, report_of

from jaxamp import amp_report
from jaxamp._plan.reasons import Why
from jaxamp._table import si

HOSTILE = "</script><b>&\"'<!--\u2028"


def saved(report, tmp_path):
    path = tmp_path / "report.html"
    assert report.save(path) is None
    return path.read_text(encoding="utf-8")


class Tags(HTMLParser):
    """The tags of a page in order, and the text of its data."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.data, self.is_data = [], "", False
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.is_data = ("id", "data") in attrs

    def handle_data(self, data):
        self.data += data if self.is_data else ""

    def handle_endtag(self, tag):
        self.is_data = False


def decoded(page):
    """What `to_dict` had, from a page."""
    data = json.loads(Tags(page).data)
    del data["page"]
    columns = {name: [column["values"][code] for code in column["codes"]] for name, column in data["rows"].items()}
    return data | {"rows": [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]}


def as_json(report):
    return json.loads(json.dumps(report.to_dict()))


def loss(params, x):
    with jax.named_scope("up"):
        x = jnp.tanh(x @ params["up"])
    with jax.named_scope("down"):
        x = jax.lax.scan(lambda x, _: (jnp.exp(-(x @ params["down"])), None), x, length=3)[0]
    return jnp.sum(x**2)


def test_the_page_of_a_traced_function_holds_its_dict(tmp_path):
    shape = jax.ShapeDtypeStruct((16, 16), jnp.float32)
    report = amp_report(loss, compute_dtype=jnp.bfloat16)({"up": shape, "down": shape}, shape)
    assert len(report.rows) > 10
    assert decoded(saved(report, tmp_path)) == as_json(report)


@pytest.mark.parametrize("report", [mixed_report(), report_of()], ids=["mixed", "empty"])
def test_the_page_holds_the_dict(report, tmp_path):
    assert decoded(saved(report, tmp_path)) == as_json(report)


def hostile_report():
    row = matmul(HOSTILE, 1000, dtype=F32, why=because(Why.NOT_ENTERED, HOSTILE), primitive=HOSTILE, dims=(7, 7, 7))
    row = row._replace(source=row.source._replace(file=f"/home/{HOSTILE}.py"))
    return report_of(
        row, row._replace(kind="not entered"), name=HOSTILE, unmatched=(HOSTILE, "{{data}}"), notes=(HOSTILE,)
    )


def test_what_the_user_named_is_text_on_the_page(tmp_path):
    page = saved(hostile_report(), tmp_path)
    assert decoded(page) == as_json(hostile_report())
    assert Tags(page).tags.count("script") == 2
    assert "<b>&" not in page
    assert "<!--" not in page


def test_what_the_user_named_is_text_in_a_notebook():
    shown = hostile_report()._repr_html_()
    assert set(Tags(shown).tags) <= {"div", "table", "thead", "tbody", "tr", "th", "td"}
    assert "&lt;/script&gt;&lt;b&gt;" in shown


@pytest.mark.parametrize("report", [mixed_report(), hostile_report()], ids=["mixed", "hostile"])
def test_the_page_refers_to_nothing_outside_it(report, tmp_path):
    page = saved(report, tmp_path)
    assert not re.findall(r"https?:|[\"'(]//|\bsrc=|\burl\(|@import|\bimport\b", page)
    assert re.findall(r"href=\S+", page) == ['href="data:,">']
    assert "default-src 'none'" in page


def test_nothing_of_the_machine_but_source_paths_is_on_the_page(tmp_path):
    page = saved(mixed_report(), tmp_path)
    assert set(re.findall(r"/(?:home|tmp|usr|root|work)/[\w./]*", page)) == {"/home/someone/model.py"}


@pytest.mark.parametrize(("count", "limit"), [(5_000, 0.5e6), (20_000, 2e6)])
def test_a_page_is_small_where_layers_repeat(count, limit, tmp_path):
    assert len(saved(large_report(count), tmp_path)) < limit


def test_a_page_with_5000_rows_that_have_nothing_in_common_is_under_5_mb(tmp_path):
    assert len(saved(large_report(5_000, distinct=True), tmp_path).encode()) < 5e6


def test_sections_say_what_was_found_and_what_was_not(tmp_path):
    page = saved(mixed_report(), tmp_path)
    titles = re.findall(r"<h2>([^<]+?)\s*<span class=\"count\">([\d,]+)", page)
    assert titles == [
        ("Matmuls left in float32, and why", "1"),
        ("Matmul dimensions that waste tensor cores", "1"),
        ("Casts", "2"),
        ("Not entered", "1"),
        ("Keys that matched nothing", "1"),
    ]
    assert "<code>decoder/*</code>" in page
    assert "<code>pallas_call (1)</code>" in page
    assert "no backward pass: TypeError: integers" in page
    page = saved(report_of(), tmp_path)
    assert page.count(": <b>none</b>") == 5
    assert "There are no matmuls." in page


def test_layers_that_say_the_same_are_one_line_of_a_section(tmp_path):
    rows = [matmul(f"block_{i}/router", 10**6, dtype=F32) for i in range(48)]
    rows += [matmul(f"Conv{i}d", 10**6 // i, dtype=F32) for i in (2, 4)]
    page = saved(report_of(*rows, matmul("head", 10**6, dtype=F32)), tmp_path)
    (section,) = re.findall(r"<section><h2>Matmuls left.*?</section>", page)
    assert re.findall(r'<td title="([^"]+)">\1<td>dot_general<td class="n">(\d+)<td class="n">([^<]+)', section) == [
        ("block_*/router", "48", "48 M"),
        ("head", "1", "1 M"),
        ("Conv2d", "1", "500 k"),
        ("Conv4d", "1", "250 k"),
    ]


def test_a_notebook_shows_totals_wide_matmuls_and_the_first_lines():
    shown = mixed_report()._repr_html_()
    for words in (
        "amp report of loss, compute dtype bfloat16",
        "2.18 G: 97.7 % bfloat16, 2.3 % float32",
        "4 kB in float32, 1 kB under amp (0.25 times)",
        "note: no backward pass: TypeError: integers",
        "Matmuls not in bfloat16, and why",
        "scope &#x27;amp_stop&#x27;",
        "model.py:20",
        "width:2.295%",
    ):
        assert words in shown
    assert "<script" not in shown
    assert "class=" not in shown
    assert "more lines" not in shown


def test_a_notebook_shows_at_most_thirty_lines():
    shown = large_report(5_000)._repr_html_()
    assert len(shown) < 40_000
    assert re.search(r"\.\.\. and [\d,]+ more lines: report\.save\(&#x27;report\.html&#x27;\)", shown)
    assert 30 < shown.count("<tr>") < 70


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0 "),
        (999, "999 "),
        (999_499, "999 k"),
        (999_600, "1 M"),
        (1_234_567, "1.23 M"),
        (3.2e15, "3.2 P"),
        (5e21, "5e+03 E"),
    ],
)
def test_a_number_is_said_in_three_digits_and_a_unit(number, text):
    assert si(number) == text


def test_a_page_is_not_saved_under_the_name_of_something_else(tmp_path):
    report = amp_report(lambda x: x @ x)(jnp.ones((2, 2)))
    with pytest.raises(ValueError, match=r"save got the path .*r.pdf'; expected one that ends in .html. Write for"):
        report.save(tmp_path / "r.pdf")
