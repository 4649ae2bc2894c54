"""Reasons are data; here they become text."""

import pytest

from jaxamp._inspect.reasons import Explanation, Role, text_of
from jaxamp._plan.reasons import Reason, Why

DETAILS = {
    Why.BY_SCOPE: "head",
    Why.BY_SCOPE_AND_PRIMITIVE: "head",
    Why.READ_ONLY_BY: ("exp",),
    Why.READ_BY_SOLVE: Reason(Why.BY_PRIMITIVE),
    Why.BY_PASS: "a product with 1",
    Why.NOT_REPLACED: "it is the last layer",
    Why.REPLACED: (Reason(Why.BY_PRIMITIVE), "results in e4m3"),
    Why.FIXED_DTYPE: "cholesky",
    Why.ASKS_FOR_PRECISION: "HIGHEST",
    Why.SETTING_ASKS_FOR_PRECISION: "float32",
    Why.LITERAL_UNDERFLOWS: (1e-12, "float16"),
    Why.LITERAL_OVERFLOWS: (-1e9, "float16"),
    Why.NOT_ENTERED: "pallas_call",
    Why.INSIDE: ("scan", Reason(Why.BY_PRIMITIVE)),
}


@pytest.mark.parametrize("why", Why)
def test_each_reason_has_a_text(why):
    text = text_of(Reason(why, DETAILS.get(why)))
    assert text
    assert "None" not in text
    assert "{" not in text


def test_texts_are_not_the_same():
    texts = [text_of(Reason(why, DETAILS.get(why))) for why in Why]
    assert len(set(texts)) == len(texts)


def test_texts_with_details():
    assert text_of(Reason(Why.LITERAL_OVERFLOWS, (-1e9, "float16"))) == "literal -1e+09 is beyond float16"
    assert text_of(Reason(Why.INSIDE, DETAILS[Why.INSIDE])) == "inside of scan: policy table"
    assert text_of(Reason(Why.READ_ONLY_BY, ())) == "consumed only by float32 results"


def test_explanations():
    reason = Reason(Why.NOT_ENTERED, "pallas_call")
    assert Explanation(Role.ITSELF, "pallas_call", reason).text() == "not entered: pallas_call"
    assert Explanation(Role.ADDED, "exp", reason).text() == "added for exp: not entered: pallas_call"
    derivative = Explanation(Role.DERIVATIVE, "exp", reason)
    assert derivative.text() == "derivative of exp: not entered: pallas_call"
    assert derivative.short_text() == "not entered: pallas_call"
    assert Explanation(Role.DERIVATIVE, "jit", Reason(Why.ENTERED)).text() == "derivative of jit: JAX's own rule"
    assert Explanation(Role.RESULT).text() == "a result in its dtype"
