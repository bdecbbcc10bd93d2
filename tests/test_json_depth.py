"""The limit of nesting: the same for values and for their text, whatever their strings contain."""

from __future__ import annotations

import json
import time

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from midstream.json_depth import (
    DEPTH_MAX,
    is_text_too_deep,
    is_too_deep,
    require_shallow,
    require_shallow_text,
)
from tests.spec import spec

_leaf = st.none() | st.integers(-9, 9) | st.text(alphabet='[]{}"\\,:é', max_size=6)
_values = st.recursive(_leaf, lambda inner: st.lists(inner) | st.dictionaries(st.text('[{"\\'), inner))


def nested(value: object, levels: int) -> object:
    """Nest a value in lists and dicts alternately."""
    for level in range(levels):
        value = [value] if level % 2 else {"[": value}
    return value


def depth_of(value: object) -> int:
    if isinstance(value, dict):
        value = list(value.values())
    return 1 + max(map(depth_of, value), default=0) if isinstance(value, list) else 0


@spec("SEC-75")
@given(_values, st.integers(DEPTH_MAX - 8, DEPTH_MAX + 4))
def test_a_value_and_its_text_are_too_deep_only_beyond_the_limit(value: object, levels: int) -> None:
    deep = nested(value, levels)
    assert is_too_deep(deep) == (depth_of(deep) > DEPTH_MAX)
    for text in (json.dumps(deep), json.dumps(deep, ensure_ascii=False, indent=1)):
        assert is_text_too_deep(text) == is_text_too_deep(text.encode()) == is_too_deep(deep)


@given(st.binary(max_size=300))
def test_the_depth_of_any_bytes_can_be_measured(body: bytes) -> None:
    assert is_text_too_deep(body * 40) in {True, False}


@spec("SEC-75")
def test_too_deep_nesting_is_a_decoder_error() -> None:
    with pytest.raises(msgspec.DecodeError, match="nested more than 64 levels deep"):
        require_shallow(nested(1, DEPTH_MAX + 1))
    with pytest.raises(msgspec.DecodeError, match="nested more than 64 levels deep"):
        require_shallow_text("[" * 100_000)
    require_shallow(nested(1, DEPTH_MAX))
    require_shallow_text(json.dumps(nested(1, DEPTH_MAX)))


@pytest.mark.parametrize("piece", [b'"', b'\\"', b'["', b'[\\"', b"[]", b"[", b'"[\\'])
def test_the_check_takes_linear_time_for_any_text(piece: bytes) -> None:
    def cpu_s(body: bytes) -> float:
        begun = time.process_time()
        is_text_too_deep(body)
        return time.process_time() - begun

    start = b"[" * 70 + b'"\\"'
    small = start + piece * (100_000 // len(piece))
    large = start + piece * (800_000 // len(piece))
    assert cpu_s(large) < 40 * max(cpu_s(small), 0.001), "8 times the bytes"
