"""Inputs of the Responses API without a response: compaction and token counts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec.structs import replace
from starlette.types import Message, Receive, Send

from midstream.agents.prior_transcript import transcript
from midstream.dialects.accepted_requests import Accepting
from midstream.dialects.api_errors import BAD_GATEWAY, ApiError
from midstream.dialects.compacted_items import compaction_item, list_user_items
from midstream.dialects.conversation_index import EPHEMERAL_HEADER
from midstream.dialects.dialect_registry import RESPONSES
from midstream.dialects.gateway_bodies import Arrived, RefusedError
from midstream.dialects.live_responses import LiveResponses
from midstream.dialects.request_fields import bad_field
from midstream.dialects.response_reader import ResponseReader, send_whole
from midstream.environment import World
from midstream.history.codecs.codec_spec import Json
from midstream.history.messages import Entry, File, History, Text, UserMessage

CHARS_PER_TOKEN = 4
FILE_TOKENS = 1000
"""Estimated tokens of an image or another file: those of an image with a million pixels."""
_COMPACT = (
    "You compact conversations. Write a summary from which another model can continue the conversation that the user "
    "quotes: the goals, the decisions, facts and names word for word, what the tools returned that still matters, and "
    "what is left to do. Write the summary and nothing else."
)
_NO_TOKENS: Json = {
    "input_tokens": 0,
    "input_tokens_details": {"cached_tokens": 0},
    "output_tokens": 0,
    "output_tokens_details": {"reasoning_tokens": 0},
    "total_tokens": 0,
}
_OK = 200


class ResponseInputs:
    """`/v1/responses/compact` and `/v1/responses/input_tokens`."""

    def __init__(self, accepting: Accepting, responses: LiveResponses, world: World) -> None:
        self._accepting = accepting
        self._responses = responses
        self._world = world

    async def compact(self, arrived: Arrived, receive: Receive, send: Send) -> None:
        """Answer with the user's messages and the model's summary of the conversation, without storing them.

        Raises:
            RefusedError: The model is not available, or returned no summary.
            MidstreamError: The request is invalid, or no response can begin now.
        """
        params, entries = await self._accepting.read_input(RESPONSES, arrived)
        if not params.model:
            raise bad_field("model", "`model` is required")
        wanted = {
            "model": params.model,
            "instructions": _COMPACT,
            "input": _quote(entries, params.instructions),
        }
        body = msgspec.json.encode({**wanted, "store": False})
        headers = {**arrived.headers, EPHEMERAL_HEADER: "1"}
        whole = _Whole()
        reply = await self._accepting.response_to(RESPONSES, replace(arrived, headers=headers, body=body))
        reader = ResponseReader(
            reply.live,
            self._responses,
            self._world,
            receive,
            whole,
            form=reply.form,
            shows_upstream_calls=False,
        )
        async with reader:
            await reader.whole({})
        if whole.status != _OK:
            await whole.pass_on(send)
            return
        response = msgspec.json.decode(whole.body)
        summary = "".join(_texts(response))
        if not summary.strip():
            raise RefusedError(ApiError(BAD_GATEWAY, "no_summary", "the model returned no summary"))
        suffix = reply.live.id.removeprefix(RESPONSES.id_prefix)
        output = [*list_user_items(entries, f"msg_{suffix}"), compaction_item(summary, f"cmp_{suffix}")]
        compacted = {
            "id": reply.live.id,
            "object": "response.compaction",
            "created_at": response["created_at"],
            "output": output,
            "usage": response["usage"] or _NO_TOKENS,
        }
        await send_whole(send, msgspec.json.encode(compacted))

    async def count(self, arrived: Arrived, send: Send) -> None:
        """Answer with an estimate of an input's tokens by its length, because models count only when they answer.

        Raises:
            RefusedError: The model is not available, or the previous response does not exist.
            MidstreamError: The request is invalid.
        """
        params, entries = await self._accepting.read_input(RESPONSES, arrived)
        chars = len(params.instructions) + sum(map(_chars, entries))
        if params.tools:
            chars += len(msgspec.json.encode(params.tools))
        tokens = max(1, chars // CHARS_PER_TOKEN)
        await send_whole(
            send, msgspec.json.encode({"object": "response.input_tokens", "input_tokens": tokens})
        )


class _Whole:
    """Buffers an HTTP response."""

    def __init__(self) -> None:
        self.status = 0
        """0 if nothing was sent because the client disconnected."""
        self.body = b""
        self._messages: list[Message] = []

    async def __call__(self, message: Message) -> None:
        self._messages.append(message)
        self.status = message.get("status", self.status)
        self.body += message.get("body", b"")

    async def pass_on(self, send: Send) -> None:
        """Send the buffered response."""
        for message in self._messages:
            await send(message)


def _quote(entries: Sequence[Entry], instructions: str) -> str:
    """Return the message that requests the summary of a conversation."""
    rules = f"The conversation had these instructions:\n\n{instructions}\n\n" if instructions else ""
    return f"{rules}{transcript(History(tuple(entries)))}\n\nWrite the summary of this conversation."


def _texts(response: Any) -> list[str]:  # noqa: ANN401 - JSON
    messages = [item for item in response["output"] if item["type"] == "message"]
    return [part["text"] for item in messages for part in item["content"] if part["type"] == "output_text"]


def _chars(entry: Entry) -> int:
    if not isinstance(entry, UserMessage):
        return len(msgspec.json.encode(entry))
    files = sum(isinstance(part, File) for part in entry.parts)
    return files * FILE_TOKENS * CHARS_PER_TOKEN + sum(
        len(part.text) for part in entry.parts if isinstance(part, Text)
    )
