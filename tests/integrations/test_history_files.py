from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest

from midstream.errors import InvalidHistoryError
from midstream.history import repair
from midstream.integrations.history_files import format_of, read_history, write_history
from tests.core.repair.histories import FORMATS, valid
from tests.core.repair.reported import reply, result, text, thought, use, user


def written(path: Path, *records: object, tail: str = "") -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records) + tail, encoding="utf-8")
    return path


def line(uuid: str, parent: str | None, message: dict[str, Any], **more: Any) -> dict[str, Any]:  # noqa: ANN401
    return {"uuid": uuid, "parentUuid": parent, "type": message["role"], "message": message, **more}


@pytest.mark.parametrize("form", FORMATS)
def test_a_list_of_messages_is_known_by_what_is_in_it(form: str) -> None:
    messages = [m for seed in range(3) for m in valid(form, Random(seed))]
    alike = {"mistral": "openai-chat"}
    assert format_of(messages) == alike.get(form, form)


def test_claude_code_lines_become_messages(tmp_path: Path) -> None:
    path = written(
        tmp_path / "session.jsonl",
        {"type": "summary", "summary": "x"},
        line("1", None, user("q")),
        line("2", "1", {**reply(thought()), "id": "msg_1"}),
        line("3", "2", {**reply(use("a")), "id": "msg_1"}),
        line("4", "3", {**reply(use("b")), "id": "msg_1"}),
        line("5", "3", user([result("a")])),
        line("6", "4", user([result("b")])),
        line("7", "6", user("side"), isSidechain=True),
        line("8", "6", reply(text("done"))),
        tail='{"uuid": "9", "parentUu',
    )
    stored = read_history(path)
    assert (stored.kind, stored.form) == ("claude-code", "anthropic")
    assert stored.messages == [
        user("q"),
        reply(thought(), use("a"), use("b")),
        user([result("a")]),
        user([result("b")]),
        reply(text("done")),
    ]
    assert len(stored.notes) == 2


def test_a_repaired_claude_code_file_is_one_chain_again(tmp_path: Path) -> None:
    path = written(
        tmp_path / "s.jsonl",
        line("1", None, user("q"), cwd="/x"),
        line("2", "1", reply(use("a")), cwd="/x"),
        line("3", "2", user("hello?"), cwd="/x"),
    )
    stored = read_history(path)
    target = tmp_path / "s.repaired.jsonl"
    write_history(stored, repair(stored.messages).messages, path, target)
    again = read_history(target)
    assert repair(again.messages).edits == ()
    assert len(again.messages) == 4
    assert [record["cwd"] for record in again.records.values()] == ["/x"] * 4


def test_codex_lines_become_items(tmp_path: Path) -> None:
    call = {"type": "function_call", "call_id": "a", "name": "shell", "arguments": "{}"}
    path = written(
        tmp_path / "rollout.jsonl",
        {"type": "session_meta", "payload": {"id": "x"}},
        {"type": "response_item", "payload": {"type": "message", "role": "user", "content": "q"}},
        {"type": "event_msg", "payload": {}},
        {"type": "response_item", "payload": call},
    )
    stored = read_history(path)
    assert (stored.kind, stored.form, len(stored.messages)) == ("codex", "openai-responses", 2)


@pytest.mark.parametrize(
    ("document", "form", "at"),
    [
        ([user("q"), reply(use("a"))], "anthropic", ()),
        (
            {"model": "x", "messages": [user("q"), {"role": "tool", "content": ""}]},
            "openai-chat",
            ("messages",),
        ),
        ({"input": [user("q")]}, "openai-responses", ("input",)),
        ({"contents": [{"parts": [{"text": "q"}]}]}, "gemini", ("contents",)),
        (
            {"channel_values": {"messages": [{"type": "human", "content": "q"}]}},
            "langchain",
            ("channel_values", "messages"),
        ),
        ({"session_id": "s", "messages": [{"kind": "request", "parts": []}]}, "pydantic-ai", ("messages",)),
    ],
)
def test_a_document_is_searched_for_its_messages(
    document: object, form: str, at: tuple[str, ...], tmp_path: Path
) -> None:
    path = tmp_path / "h.json"
    path.write_text(json.dumps(document), encoding="utf-8")
    stored = read_history(path)
    assert (stored.form, stored.at) == (form, at)
    write_history(stored, stored.messages, path, tmp_path / "copy.json")
    assert json.loads((tmp_path / "copy.json").read_text(encoding="utf-8")) == document


@pytest.mark.parametrize("content", ["", "no json", "3", '"text"', "{}", "[1", "[" * 100_000])
def test_what_is_no_history_is_refused(content: str, tmp_path: Path) -> None:
    path = tmp_path / "h.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(InvalidHistoryError):
        read_history(path)
