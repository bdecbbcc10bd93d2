"""An agent of the reference SDK, `a2a-sdk`, with the scenarios of the TCK, for comparison with ours.

    python a2a_reference.py PORT

It runs in the environment of the SDK, without this repository.
"""

from __future__ import annotations

import sys

import anyio
import uvicorn
from a2a.server.agent_execution.agent_executor import AgentExecutor
from a2a.server.agent_execution.context import RequestContext
from a2a.server.events.event_queue import EventQueue
from a2a.server.request_handlers import DefaultRequestHandler
from a2a.server.routes import create_agent_card_routes, create_jsonrpc_routes, create_rest_routes
from a2a.server.tasks.inmemory_task_store import InMemoryTaskStore
from a2a.server.tasks.task_updater import TaskUpdater
from a2a.types import (
    AgentCapabilities,
    AgentCard,
    AgentInterface,
    AgentSkill,
    Part,
    Task,
    TaskState,
    TaskStatus,
)
from google.protobuf import json_format, struct_pb2
from starlette.applications import Starlette

FILE = Part(raw=b"tck", media_type="text/plain", filename="output.txt")
LINK = Part(url="https://example.com/output.txt", media_type="text/plain", filename="output.txt")
DATA = Part(data=json_format.ParseDict({"key": "value", "count": 42}, struct_pb2.Value()))
ARTIFACTS = {
    "artifact-file-url": [LINK],
    "artifact-file": [FILE],
    "stream-artifact-file": [FILE],
    "artifact-data": [DATA],
    "artifact-text": [Part(text="Generated text content")],
    "stream-001": [Part(text="Stream hello from TCK")],
    "stream-003": [Part(text="Stream task lifecycle")],
    "stream-ordering-001": [Part(text="Ordered output")],
    "stream-artifact-text": [Part(text="Streamed text content")],
}


class Scenarios(AgentExecutor):  # type: ignore[misc]  # installed in an environment of its own
    """Plays the scenario that the prefix of a message's id selects."""

    async def execute(self, context: RequestContext, event_queue: EventQueue) -> None:
        """Answer a message."""
        name = context.message.message_id.removeprefix("tck-")
        updater = TaskUpdater(event_queue, context.task_id, context.context_id)
        if name.startswith("message-response"):
            await event_queue.enqueue_event(updater.new_agent_message([Part(text="Direct message response")]))
            return
        if context.current_task is None:
            status = TaskStatus(state=TaskState.TASK_STATE_SUBMITTED)
            task = Task(id=context.task_id, context_id=context.context_id, status=status)
            task.history.append(context.message)
            await event_queue.enqueue_event(task)
        if name.startswith("input-required"):
            await updater.requires_input()
            return
        await updater.start_work()
        if name.startswith("test-resubscribe"):
            await anyio.sleep(4)
        parts = next((parts for each, parts in ARTIFACTS.items() if name.startswith(each)), None)
        if name.startswith("stream-artifact-chunked"):
            await updater.add_artifact([Part(text="chunk-1 ")], artifact_id="a")
            await updater.add_artifact([Part(text="chunk-2")], artifact_id="a", append=True, last_chunk=True)
        elif parts is not None:
            await updater.add_artifact(parts)
        await updater.complete(updater.new_agent_message([Part(text="Hello from TCK")]))

    async def cancel(self, context: RequestContext, event_queue: EventQueue) -> None:
        """Cancel a task."""
        await TaskUpdater(event_queue, context.task_id, context.context_id).cancel()


def main(port: int) -> None:
    """Serve the agent on a port of this machine."""
    url = f"http://127.0.0.1:{port}"
    card = AgentCard(
        name="reference",
        description="Plays the scenarios of the TCK.",
        version="1.0.0",
        supported_interfaces=[
            AgentInterface(url=f"{url}/rpc/", protocol_binding="JSONRPC", protocol_version="1.0"),
            AgentInterface(url=f"{url}/rest", protocol_binding="HTTP+JSON", protocol_version="1.0"),
        ],
        capabilities=AgentCapabilities(streaming=True, push_notifications=False),
        default_input_modes=["text/plain"],
        default_output_modes=["text/plain"],
        skills=[AgentSkill(id="tck", name="TCK", description="Plays.", tags=["tck"])],
    )
    handler = DefaultRequestHandler(
        agent_executor=Scenarios(), task_store=InMemoryTaskStore(), agent_card=card
    )
    routes = [
        *create_agent_card_routes(agent_card=card),
        *create_jsonrpc_routes(request_handler=handler, rpc_url="/rpc/"),
        *create_rest_routes(request_handler=handler, path_prefix="/rest"),
    ]
    uvicorn.run(Starlette(routes=routes), host="127.0.0.1", port=port, access_log=False)


if __name__ == "__main__":
    main(int(sys.argv[1]))
