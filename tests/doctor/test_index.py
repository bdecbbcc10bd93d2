"""Numbers by name, in a few bytes each."""

from __future__ import annotations

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from midstream.doctor.index import Index


@given(st.lists(st.tuples(st.text(max_size=3), st.integers(0, 2**31 - 1))))
def test_it_behaves_like_a_dict(entries: list[tuple[str, int]]) -> None:
    index, plain = Index(), dict(entries)
    for name, number in entries:
        index[name] = number
    assert len(index) == len(plain)
    assert {name: index.get(name) for name in plain} == plain
    assert all(name in index for name in plain)
    assert [index.get("none of them"), "none of them" in index] == [None, False]


def test_it_grows_and_stays_small() -> None:
    index = Index()
    for number in range(50_000):
        index[f"call_{number}_with_a_long_name"] = number
    assert [index.get(f"call_{number}_with_a_long_name") for number in (0, 777, 49_999)] == [0, 777, 49_999]
    held = sum(sys.getsizeof(each) for each in vars(index).values())
    assert held / 50_000 <= 36


def test_an_invalid_line_number_is_refused() -> None:
    with pytest.raises(OverflowError):
        Index()["a"] = 2**31
