"""Assistants and threads of LangGraph's clients: the served agent and its sessions."""

from __future__ import annotations

from typing import Any

import pytest
from httpx import HTTPStatusError

from midstream.server.api.langgraph_endpoint import assistant_id_of, timestamp
from tests.server.api.test_langgraph_runs_endpoint import graph, user_input

Json = dict[str, Any]


async def test_the_agent_is_the_only_assistant() -> None:
    async with graph() as client:
        (found,) = await client.assistants.search()
        assert (found["graph_id"], found["assistant_id"]) == ("agent", assistant_id_of("agent"))
        for name in ("agent", found["assistant_id"]):
            assert await client.assistants.get(name) == found
        assert await client.assistants.search(graph_id="other") == []
        schemas: Any = await client.assistants.get_schemas("agent")
        assert "messages" in schemas["input_schema"]["properties"]
        drawn: Any = await client.assistants.get_graph("agent")
        assert [each["id"] for each in drawn["nodes"]] == ["__start__", "agent", "tools", "__end__"]
        with pytest.raises(HTTPStatusError, match="no assistant"):
            await client.assistants.get("other")


async def test_a_thread_exists_before_its_first_message() -> None:
    async with graph() as client:
        made: Any = await client.threads.create(metadata={"user": "ada"})
        thread = made["thread_id"]
        assert (made["status"], made["values"], made["metadata"]) == ("idle", None, {"user": "ada"})
        assert await client.threads.get(thread) == made
        state: Any = await client.threads.get_state(thread)
        assert (state["values"], state["next"]) == ({}, [])
        assert await client.threads.get_history(thread) == []
        assert await client.runs.list(thread) == []
        with pytest.raises(HTTPStatusError, match="exists") as refused:
            await client.threads.create(thread_id=thread)
        assert refused.value.response.status_code == 409
        assert await client.threads.create(thread_id=thread, if_exists="do_nothing") == made


async def test_a_thread_with_messages_has_one_state_and_can_be_found_by_its_metadata() -> None:
    async with graph() as client:
        thread = (await client.threads.create(metadata={"user": "ada"}))["thread_id"]
        done: Any = await client.runs.wait(thread, "agent", input=user_input("hi"))
        shown: Any = await client.threads.get(thread)
        assert (shown["status"], shown["values"]) == ("idle", done)
        (state,) = await client.threads.get_history(thread, limit=3)
        assert state == await client.threads.get_state(thread)
        assert (state["values"], state["next"], state["interrupts"]) == (done, [], [])
        await client.threads.update(thread, metadata={"title": "greeting"})
        await client.runs.wait("other", "agent", input=user_input("hi"), if_not_exists="create")
        for wanted in ({"user": "ada"}, {"title": "greeting", "graph_id": "agent"}):
            assert [each["thread_id"] for each in await client.threads.search(metadata=wanted)] == [thread]
        assert [each["thread_id"] for each in await client.threads.search(limit=1, offset=1)] == [thread]
        assert await client.threads.search(status="busy") == []
        assert len(await client.threads.search(status="idle", ids=["other"])) == 1
        again: Any = await client.threads.create(thread_id=thread, if_exists="do_nothing")
        assert again["values"] == done


async def test_a_deleted_thread_and_its_session_are_gone() -> None:
    async with graph() as client:
        for name in ("empty", "spoken"):
            await client.threads.create(thread_id=name, metadata={"a": 1})
        await client.runs.wait("spoken", "agent", input=user_input("hi"))
        for name in ("empty", "spoken"):
            await client.threads.delete(name)
            with pytest.raises(HTTPStatusError, match=r"no (thread|session)"):
                await client.threads.get(name)
        fresh: Any = await client.threads.create(thread_id="spoken")
        assert fresh["metadata"] == {}


async def test_an_unsupported_operation_on_a_thread_is_refused() -> None:
    async with graph() as client:
        with pytest.raises(HTTPStatusError, match="supersteps"):  # Checkpoints are refused, too.
            await client.threads.create(supersteps=[{"updates": []}])
        for name in ("nobody", "00000000-0000-4000-8000-000000000000"):
            with pytest.raises(HTTPStatusError) as refused:
                await client.runs.wait(name, "agent", input=user_input("hi"))
            assert refused.value.response.status_code == 404


def test_timestamps_have_the_format_of_langgraph() -> None:
    assert timestamp(0) == "1970-01-01T00:00:00.000000+00:00"
