"""A session in an editor: prompts, permissions, questions, stops, and loads that show the same updates again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

pytest.importorskip("acp", reason="agent-client-protocol is not installed (requirements/upstreams.txt)")

from acp import RequestError
from acp.schema import (
    AudioContentBlock,
    BlobResourceContents,
    EmbeddedResourceContentBlock,
    ImageContentBlock,
    ResourceContentBlock,
    TextContentBlock,
    TextResourceContents,
)

from tests.dialects.acp_editor import Editor
from tests.dialects.acp_kills import make_editor

pytestmark = pytest.mark.slow
Json = dict[str, Any]
TALKING = "tests.dialects.acp_agents:talking"
IMAGE = "aGVsbG8="


@pytest_asyncio.fixture
async def editor(tmp_path: Path) -> AsyncIterator[Editor]:
    async with make_editor(tmp_path, agent=TALKING) as started:
        yield started


async def test_a_load_replays_the_same_updates_in_the_same_order(editor: Editor) -> None:
    session = await editor.new()
    await editor.prompt(session, "hello")
    await editor.prompt(session, "look")
    live = editor.shown
    await editor.load(session)
    users = [each for each in editor.shown if each["sessionUpdate"] == "user_message_chunk"]
    assert [each["content"]["text"] for each in users] == ["hello", "look"]
    assert [each for each in editor.shown if each not in users] == live
    assert editor.text() == "You sent Text: helloIt came to: nothing at here, and stdin has ''"


async def test_stdin_and_stdout_of_a_tool_are_separate_from_the_protocol(editor: Editor) -> None:
    session = await editor.new()
    answer = await editor.prompt(session, "look")
    assert answer.stop_reason == "end_turn"
    calls = [each for each in editor.shown if each["sessionUpdate"].startswith("tool_call")]
    assert [(each["sessionUpdate"], each.get("status"), each.get("kind")) for each in calls] == [
        ("tool_call", "pending", "read"),
        ("tool_call_update", "in_progress", None),
        ("tool_call_update", None, None),
        ("tool_call_update", "completed", None),
    ]
    assert calls[0]["rawInput"] == {"where": "here"}
    assert calls[2]["content"][0]["content"]["text"] == "looking"


@pytest.mark.parametrize(("choice", "result"), [("allow", "burnt tree"), ("deny", "declined")])
async def test_a_person_decides_whether_a_call_runs(editor: Editor, choice: str, result: str) -> None:
    session = await editor.new()
    editor.choices = [choice]
    assert (await editor.prompt(session, "burn")).stop_reason == "end_turn"
    (asked,) = editor.permissions
    (call,) = [each for each in editor.shown if each["sessionUpdate"] == "tool_call"]
    assert asked["toolCallId"] == call["toolCallId"]
    assert (asked["rawInput"], asked["options"]) == ({"what": "tree"}, ["allow", "deny"])
    assert result in editor.results()[0]


async def test_a_permission_of_a_sub_agent_is_requested(editor: Editor) -> None:
    session = await editor.new()
    editor.choices = ["allow"]
    await editor.prompt(session, "help")
    assert [each["rawInput"] for each in editor.permissions] == [{"what": "twig"}]
    assert editor.results() == ["helped"]


async def test_a_permission_open_at_a_kill_is_requested_again(editor: Editor) -> None:
    session = await editor.new()
    asking = asyncio.create_task(editor.prompt(session, "burn", **{"midstream/key": "k"}))
    await editor.wait_until(lambda: bool(editor.permissions))
    await editor.kill()
    with pytest.raises(ConnectionError):
        await asking
    await editor.start()
    editor.choices = ["allow"]
    await editor.load(session)
    assert (await editor.prompt(session, "burn", **{"midstream/key": "k"})).stop_reason == "end_turn"
    assert len(editor.permissions) == 2
    assert editor.results() == ["burnt tree"]
    assert editor.text() == "It came to: burnt tree"


async def test_a_cancelled_permission_stops_the_turn(editor: Editor) -> None:
    session = await editor.new()
    editor.choices = ["cancelled"]
    assert (await editor.prompt(session, "burn")).stop_reason == "cancelled"


async def test_the_next_prompt_answers_a_text_question(editor: Editor) -> None:
    session = await editor.new()
    assert (await editor.prompt(session, "ask")).stop_reason == "end_turn"
    assert editor.text() == "Which one?"
    assert (await editor.prompt(session, "The red one")).stop_reason == "end_turn"
    assert editor.text() == "Which one?It came to: The red one"
    await editor.load(session)
    assert editor.text("user_message_chunk") == "askThe red one"
    assert editor.text() == "Which one?It came to: The red one"


async def test_a_cancel_stops_the_turn_and_keeps_its_text(editor: Editor) -> None:
    session = await editor.new()
    asking = asyncio.create_task(editor.prompt(session, "wait"))
    await editor.wait_until(lambda: editor.text() == "Waiting")
    words = TextContentBlock(type="text", text="behind")
    behind = asyncio.create_task(editor.connection.prompt(session_id=session, prompt=[words]))
    await asyncio.create_task(editor.connection.cancel(session))  # It follows that one on the connection.
    assert (await asking).stop_reason == "cancelled"
    assert (await behind).stop_reason == "cancelled"
    await editor.load(session)
    assert editor.text() == "Waiting"


async def test_an_answer_cut_by_the_length_limit_has_its_stop_reason(editor: Editor) -> None:
    assert (await editor.prompt(await editor.new(), "long")).stop_reason == "max_tokens"


async def test_the_same_key_is_the_same_prompt_and_another_text_under_it_is_refused(editor: Editor) -> None:
    session = await editor.new()
    meta = {"midstream/key": "one"}
    first = await editor.prompt(session, "hello", **meta)
    assert await editor.prompt(session, "hello", **meta) == first
    assert editor.text() == "You sent Text: hello"
    with pytest.raises(RequestError):
        await editor.prompt(session, "another", **meta)


async def test_every_kind_of_content_reaches_the_agent_and_is_replayed(editor: Editor) -> None:
    session = await editor.new()
    blocks = [
        TextContentBlock(type="text", text="See "),
        ImageContentBlock(type="image", data=IMAGE, mime_type="image/png"),
        AudioContentBlock(type="audio", data=IMAGE, mime_type="audio/wav"),
        EmbeddedResourceContentBlock(
            type="resource", resource=TextResourceContents(uri="file:///a.py", text="print()")
        ),
        EmbeddedResourceContentBlock(
            type="resource",
            resource=BlobResourceContents(uri="file:///a.pdf", blob=IMAGE, mime_type="application/pdf"),
        ),
        ResourceContentBlock(type="resource_link", uri="file:///b.py", name="b.py"),
        ResourceContentBlock(
            type="resource_link", uri="https://example.com/c.png", name="c.png", mime_type="image/png"
        ),
    ]
    await editor.prompt(session, blocks)
    assert editor.text().startswith("You sent Text, File, File, Text, File, Text, File: See ")
    await editor.load(session)
    shown = [each["content"] for each in editor.shown if each["sessionUpdate"] == "user_message_chunk"]
    sent = [each.model_dump(mode="json", by_alias=True, exclude_none=True) for each in blocks]
    sent[3] = {"type": "text", "text": '<resource uri="file:///a.py">\nprint()\n</resource>'}
    sent[5] = {"type": "text", "text": "[b.py](file:///b.py)"}
    assert shown == sent


async def test_two_windows_of_one_session_show_the_same_and_take_turns(
    editor: Editor, tmp_path: Path
) -> None:
    session = await editor.new()
    await editor.prompt(session, "hello")
    async with make_editor(tmp_path, agent=TALKING) as other:
        await other.load(session)
        assert other.text() == editor.text() == "You sent Text: hello"
        await other.prompt(session, "look")
        await editor.wait_until(lambda: editor.text().endswith("stdin has ''"))
        assert editor.text("user_message_chunk") == "look"  # The client has its own first message already.
        assert editor.text() == other.text()
        await editor.kill()  # The window whose process runs the session.
        await other.prompt(session, "again")
        assert other.text().endswith("You sent Text: again")


async def test_a_turn_of_another_agent_is_not_continued(tmp_path: Path) -> None:
    async with make_editor(tmp_path) as noting:
        session = await noting.new()
        asking = asyncio.create_task(noting.prompt(session, "turn 0;"))
        await noting.wait_until(lambda: "word0 " in noting.text())
        await noting.kill()
        with pytest.raises(ConnectionError):
            await asking
    async with make_editor(tmp_path, agent=TALKING) as editor:
        await editor.load(session)
        with pytest.raises(RequestError, match="agent"):
            await editor.prompt(session, "hello")


async def test_a_session_deleted_by_another_window_accepts_no_prompt(editor: Editor, tmp_path: Path) -> None:
    session = await editor.new()
    await editor.prompt(session, "hello")
    async with make_editor(tmp_path, agent=TALKING) as other:
        await other.connection._conn.send_request("session/delete", {"sessionId": session})
    for _ in range(2):
        with pytest.raises(RequestError, match="no session"):
            await editor.prompt(session, "hello")
