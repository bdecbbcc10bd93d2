from __future__ import annotations

import pytest

from midstream.dialects.request_fields import BadFieldError, field, fields_of, texts_of
from midstream.errors import MalformedFrameError


def test_a_field_that_is_null_is_missing() -> None:
    fields = fields_of(b'{"a": null, "b": "null", "c": 1}')
    assert set(fields) == {"b", "c"}
    assert (field(fields, "a", int), field(fields, "b", str), field(fields, "c", int)) == (None, "null", 1)


def test_a_field_of_another_form_is_named() -> None:
    with pytest.raises(BadFieldError) as met:
        field(fields_of(b'{"n": "many"}'), "n", int)
    assert met.value.param == "n"
    assert "many" not in str(met.value)


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b"\xff", b"[" * 100_000])
def test_a_body_that_is_not_an_object_is_refused(body: bytes) -> None:
    with pytest.raises(MalformedFrameError):
        fields_of(body)


def test_only_texts_of_an_object_are_kept() -> None:
    fields = fields_of(b'{"a": {"x": "1", "y": 2}, "b": "c"}')
    assert (texts_of(fields, "a"), texts_of(fields, "b")) == ({"x": "1"}, {})
