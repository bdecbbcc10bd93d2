from __future__ import annotations

from midstream.history.repair.call_ids import settle_ids
from midstream.history.repair.pairing import Pairing
from tests.history.repair.makers import codes, task_for, turns_for
from tests.history.repair.reported import response, result, use, user


def ids_after(profile: str | None, *ids: str) -> list[str]:
    task = task_for(profile=profile)
    messages = [message for each in ids for message in (response(use(each)), user([result(each)]))]
    pairing = Pairing(turns_for(task, messages), task)
    pairing.run()
    settle_ids(pairing.turns, pairing.calls, task)
    for call in pairing.calls:
        assert [answer.id for answer in call.answers or ()] == [call.id]
    return [str(call.id) for call in pairing.calls]


def test_a_repeated_id_gets_a_numeric_suffix() -> None:
    assert ids_after(None, "a", "b", "a", "a") == ["a", "b", "a_2", "a_3"]


def test_a_taken_suffix_is_not_used_again() -> None:
    assert ids_after(None, "a", "a_2", "a") == ["a", "a_2", "a_3"]


def test_invalid_characters_are_replaced() -> None:
    assert ids_after(None, "functions.run:0", "") == ["functions_run_0", "call_6048aa95"]


def test_shortened_ids_are_deterministic() -> None:
    first = ids_after("mistral-v3", "call_1", "call_2")
    assert [len(each) for each in first] == [9, 9]
    assert first == ids_after("mistral-v3", "call_1", "call_2", "call_3")[:2]


def test_a_valid_id_stays() -> None:
    task = task_for()
    pairing = Pairing(turns_for(task, [response(use("toolu_1")), user([result("toolu_1")])]), task)
    pairing.run()
    settle_ids(pairing.turns, pairing.calls, task)
    assert codes(task) == []


def test_a_call_without_an_id_is_named_by_its_content_at_any_place() -> None:
    assert ids_after(None, "a", "")[1] == ids_after(None, "a", "b", "")[2]
    first, second = ids_after(None, "", "")
    assert second == f"{first}_2"
