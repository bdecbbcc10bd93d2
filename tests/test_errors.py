from __future__ import annotations

import inspect
import re

import pytest

from midstream import errors
from midstream.errors import MidstreamError, SeqnoGapError


def _classes() -> list[type[MidstreamError]]:
    return [
        each
        for _, each in inspect.getmembers(errors, inspect.isclass)
        if issubclass(each, MidstreamError) and each.__module__ == errors.__name__
    ]


def test_every_error_has_its_own_code_and_a_retry_class() -> None:
    codes = [each.code for each in _classes()]
    assert len(set(codes)) == len(codes)
    assert all(each.retry in ("never", "later", "now", "ask") for each in _classes())
    assert all(each.__doc__ for each in _classes())


def test_the_tree_in_the_module_docstring_is_complete() -> None:
    drawn = set(re.findall(r"\b(\w+Error)\b", errors.__doc__ or ""))
    assert {each.__name__ for each in _classes()} <= drawn | {"MidstreamError"}


def test_errors_carry_data_beside_their_text() -> None:
    assert SeqnoGapError("gap", expected=3).expected == 3
    assert MidstreamError("later", retry_after_s=2.0).retry_after_s == 2.0


def test_a_copied_error_keeps_its_data_and_no_traceback() -> None:
    with pytest.raises(SeqnoGapError) as raised:
        raise SeqnoGapError("gap", expected=3)
    again = raised.value.again()
    assert (type(again), again.expected, again.message, str(again)) == (SeqnoGapError, 3, "gap", "gap")
    assert again.__traceback__ is None
