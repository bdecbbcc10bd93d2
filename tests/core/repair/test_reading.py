from __future__ import annotations

from typing import Any

import pytest

from midstream.core.repair.reading import has_surrogates, mended_text
from midstream.errors import InvalidHistoryError
from midstream.history import repair
from tests.core.repair.reported import reply, text, thought, user


def test_half_characters_are_replaced_and_halves_that_fit_are_joined() -> None:
    assert mended_text("a\ud83d") == "a\ufffd"
    assert mended_text("a\ud83d\ude00") == "a\U0001f600"
    assert mended_text("plain") == "plain"


def test_signed_thinking_that_had_to_change_goes() -> None:
    done = repair([user("q"), reply(thought("hm \ud83d"), text("a"))])
    assert done.messages[1]["content"] == [text("a")]
    assert not has_surrogates(done.messages)


def test_a_cycle_is_refused_with_its_place() -> None:
    knot: dict[str, Any] = {"role": "user"}
    knot["content"] = [knot]
    with pytest.raises(InvalidHistoryError, match="message 1"):
        repair([user("q"), knot])


def test_ten_thousand_levels_are_refused_with_their_place() -> None:
    deep: Any = "x"
    for _ in range(10_000):
        deep = [deep]
    with pytest.raises(InvalidHistoryError, match="message 0"):
        repair([user(deep)])


def test_an_object_that_is_no_json_is_refused() -> None:
    with pytest.raises(InvalidHistoryError):
        repair([user(object())])


def test_a_result_whose_words_stand_under_another_key_keeps_them() -> None:
    done = repair([{"role": "tool", "text": "by the way"}], format="mistral")
    assert done.messages[-1]["content"].endswith(" by the way")
