from __future__ import annotations

from midstream.history import repair
from tests.core.repair.histories import prompt
from tests.core.repair.reported import (
    PROMPT,
    TOOL_CALL,
    TOOL_RETURN,
    reply,
    request,
    response,
    result,
    text,
    use,
    user,
)


def test_rollback_ends_with_the_last_complete_exchange() -> None:
    whole = [user("q"), reply(use("a")), user([result("a")]), reply(text("done"))]
    done = repair([*whole, user("more"), reply(use("b")), user("hello?")], mode="rollback")
    assert done.messages == [*whole, user("more")]
    assert done.is_lossy


def test_rollback_of_a_good_history_is_that_history() -> None:
    good = [user("q")]
    assert repair(good, mode="rollback").messages is good


def test_drop_leaves_out_what_the_seeds_left_out() -> None:
    system = {"part_kind": "system-prompt", "content": "be brief"}
    history = [
        request(system),
        request(PROMPT),
        request(PROMPT) | {"run_id": "r1"},
        response(TOOL_CALL),
        request(TOOL_RETURN),
        response({"part_kind": "text", "content": "done"}),
        request(PROMPT),
        response(),
        request(PROMPT),
        response(TOOL_CALL),
        prompt("pydantic-ai"),
    ]
    done = repair(history, format="pydantic-ai", mode="drop")
    assert done.messages == [request(PROMPT), *history[3:6]]
    assert {edit.code for edit in done.edits} == {"dropped"}


def test_drop_leaves_a_whole_history_alone() -> None:
    whole = [user("q"), reply(use("a")), user([result("a")]), reply(text("done"))]
    assert repair(whole, mode="drop").messages is whole
