"""The client of the reference SDK, `a2a-sdk`, unmodified: it follows one message to the end of its task.

    python a2a_client.py '{"url": ..., "message": {...}, "binding": "JSONRPC", "is_streaming": true}'

A broken stream is followed by `SubscribeToTask` if the task is known, and otherwise by the same message again.
The SDK's own `TaskManager` folds the events. It runs in the environment of the SDK, without this repository,
and prints its result as JSON.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from typing import Any

import anyio
import httpx
from a2a.client import Client, ClientConfig, create_client
from a2a.client.errors import A2AClientError
from a2a.server.context import ServerCallContext
from a2a.server.tasks.inmemory_task_store import InMemoryTaskStore
from a2a.server.tasks.task_manager import TaskManager
from a2a.types import (
    GetTaskRequest,
    SendMessageRequest,
    StreamResponse,
    SubscribeToTaskRequest,
    Task,
    TaskState,
)
from a2a.utils.errors import A2AError
from google.protobuf import json_format

Json = dict[str, Any]
ENDED = (TaskState.TASK_STATE_COMPLETED, TaskState.TASK_STATE_FAILED, TaskState.TASK_STATE_CANCELED)
STOPPED = (*ENDED, TaskState.TASK_STATE_INPUT_REQUIRED)
BREAKS = (A2AClientError, httpx.HTTPError, json_format.ParseError, ValueError)
TRIES_MAX = 300
PAUSE_S = 0.1


class TaskReader:
    """One message and its task.

    Args:
        asked: The story.
    """

    def __init__(self, asked: Json) -> None:
        self.asked = asked
        self.task: Task | None = None
        self.tries = 0
        self.events = 0
        self.subscribed = 0
        self._manager: TaskManager | None = None
        self._request = SendMessageRequest()
        json_format.ParseDict({"message": asked["message"]}, self._request)

    async def read(self) -> None:
        """Read until the task has stopped."""
        while self.task is None or self.task.status.state not in STOPPED:
            self.tries += 1
            if self.tries > TRIES_MAX:
                raise TimeoutError("the task does not end")
            try:
                timeout = httpx.Timeout(60.0)
                async with httpx.AsyncClient(timeout=timeout) as http:
                    config = ClientConfig(
                        streaming=self.asked["is_streaming"],
                        httpx_client=http,
                        supported_protocol_bindings=[self.asked["binding"]],
                    )
                    client = await create_client(self.asked["url"], config)
                    await self._follow(client)
            except BREAKS:
                await anyio.sleep(PAUSE_S)

    async def _follow(self, client: Client) -> None:
        if self.task is None or not self.asked["is_streaming"]:
            await self._fold(client.send_message(self._request))
            return
        try:
            self.subscribed += 1
            await self._fold(client.subscribe(SubscribeToTaskRequest(id=self.task.id)))
        except A2AError as error:
            if "has ended" not in str(error):
                raise
            self.task = await client.get_task(GetTaskRequest(id=self.task.id))

    async def _fold(self, events: AsyncIterator[StreamResponse]) -> None:
        async for response in events:
            event = getattr(response, response.WhichOneof("payload"))
            if isinstance(event, Task):  # it adds to the state that was read before
                self._manager = TaskManager(
                    InMemoryTaskStore(), ServerCallContext(), event.id, event.context_id, None
                )
            assert self._manager is not None, "a stream begins with its task"
            self.task = await self._manager.save_task_event(event)
            self.events += 1


async def snapshot(url: str, task_id: str) -> Task:
    """Return the task as `GetTask` has it."""
    for _ in range(TRIES_MAX):
        try:
            async with httpx.AsyncClient(timeout=httpx.Timeout(60.0)) as http:
                client = await create_client(url, ClientConfig(httpx_client=http))
                return await client.get_task(GetTaskRequest(id=task_id))
        except BREAKS:
            await anyio.sleep(PAUSE_S)
    raise TimeoutError("the task cannot be read")


async def main(asked: Json) -> Json:
    """Play a story, with as many concurrent clients as its `clients`."""
    readers = [TaskReader(asked) for _ in range(asked.get("clients", 1))]
    await asyncio.gather(*(each.read() for each in readers))
    tasks = [each.task for each in readers if each.task is not None]
    return {
        "folds": [json_format.MessageToDict(each) for each in tasks],
        "task": json_format.MessageToDict(await snapshot(asked["url"], tasks[0].id)),
        **{name: sum(getattr(each, name) for each in readers) for name in ("tries", "events", "subscribed")},
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asyncio.run(main(json.loads(sys.argv[1])))))
