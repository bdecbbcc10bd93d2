"""The rule that several people must allow one act."""

from __future__ import annotations

import pytest

from midstream.session.call_references import CallRef
from midstream.session.calls import Choice
from midstream.session.turn.commands import Answer, Refused
from midstream.session.turn.several_people import require_another_person
from tests.spec import spec


def _answer(by: str, choice: Choice = Choice.ALLOW) -> Answer:
    return Answer(CallRef(1, 1, "c"), "d", choice, by=by)


@spec("SEC-27")
def test_a_person_can_allow_an_act_once_and_only_under_a_name() -> None:
    require_another_person(_answer("bob"), 2, ("ada",))
    require_another_person(_answer("ada", Choice.DENY), 2, ("ada",))
    require_another_person(_answer(""), 1, ())
    for by, words in (("ada", "another person"), ("", "authenticates none")):
        with pytest.raises(Refused) as caught:
            require_another_person(_answer(by), 2, ("ada",))
        assert words in caught.value.error.message
