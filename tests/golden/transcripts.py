"""Golden transcripts of the gateway: normalised steps, and their replay as raw HTTP."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import httpx2

from tests.golden.gateway_adapter import TOKEN, WAIT_S, Upstream

Json = dict[str, Any]

FOLDER = Path(__file__).parent / "gateway"
REQUEST_HEADERS = (
    "authorization",
    "x-api-key",
    "content-type",
    "anthropic-version",
    "anthropic-beta",
    "idempotency-key",
    "x-stainless-retry-count",
    "x-midstream-session",
    "x-midstream-ephemeral",
)
RESPONSE_HEADERS = (
    "content-type",
    "request-id",
    "x-request-id",
    "retry-after",
    "x-should-retry",
    "x-midstream-replayed",
    "x-midstream-ignored",
)
"""Headers that clients act on; all others may change."""
_TIMES = ("created", "created_at", "completed_at")
_ID = re.compile(r"[0-9a-f]{24,}")
"""The random part of an id; ids of one answer share it."""


class IdNames:
    """Numbers for ids, in the order of their appearance in a story, and back."""

    def __init__(self) -> None:
        self._numbers: dict[str, str] = {}

    def recorded(self, text: str) -> str:
        """Return a text with numbers in the place of ids."""
        return _ID.sub(lambda found: self._numbers.setdefault(found[0], f"<{len(self._numbers) + 1}>"), text)

    def actual(self, text: str) -> str:
        """Return a recorded text with the ids of this run."""
        for actual, number in self._numbers.items():
            text = text.replace(number, actual)
        return text


def recorded_request(request: httpx2.Request, body: bytes, names: IdNames) -> Json:
    """Return the stored form of a request."""
    headers = {name: request.headers[name] for name in REQUEST_HEADERS if name in request.headers}
    if "idempotency-key" in headers and headers["idempotency-key"].startswith("stainless"):
        del headers["idempotency-key"]  # An SDK's own, drawn at random.
    shown: Json = {
        "method": request.method,
        "path": names.recorded(request.url.raw_path.decode()),
        "headers": {name: value.replace(TOKEN, "TOKEN") for name, value in headers.items()},
    }
    if body:
        shown["body"] = json.loads(names.recorded(body.decode()))
    return shown


def recorded_response(status: int, headers: Mapping[str, str], body: bytes, names: IdNames) -> Json:
    """Return the stored form of a response: JSON, or the events of a stream in order."""
    shown: Json = {"status": status}
    text = names.recorded(body.decode())
    if headers.get("content-type", "").startswith("text/event-stream"):
        shown["events"] = [_event(block) for block in _blocks(text)]
    elif text:
        shown["body"] = _timeless(json.loads(text))
    # After the body, so that ids are numbered in the order of the body whatever the headers hold.
    shown["headers"] = {name: names.recorded(headers[name]) for name in RESPONSE_HEADERS if name in headers}
    return shown


def _blocks(text: str) -> list[str]:
    """Return the blocks of a stream that are events; comments and pings depend on the clock."""
    blocks = text.split("\n\n")
    return [each for each in blocks if "data: " in each and not each.startswith("event: ping")]


def _event(block: str) -> Json:
    shown: Json = {}
    for line in block.splitlines():
        name, _, value = line.partition(": ")
        if name in ("event", "id"):
            shown[name] = value
        elif name == "data":
            shown["data"] = value if value == "[DONE]" else _timeless(json.loads(value))
    return shown


_TEXT_FIELDS = ("content", "reasoning_content", "text", "thinking", "delta")
"""Fields of an event that hold a piece of text."""


def join_pieces(events: list[Json]) -> list[Json]:
    """Return events with neighbouring pieces of one text joined: the cuts of a text vary."""
    whole: list[Json] = []
    for event in events:
        shape, field, piece = _piece(event)
        if whole and piece and shape == whole[-1].get("shape"):
            whole[-1]["piece"] += piece
        else:
            whole.append({"shape": shape, "field": field, "piece": piece})
    return whole


def _piece(event: Json) -> tuple[Json, str, str]:
    """Return an event without its piece of text and its number, the field of that piece, and the piece."""
    shape = json.loads(json.dumps(event))
    data = shape.get("data")
    if not isinstance(data, dict):
        return shape, "", ""
    data.pop("sequence_number", None)
    choices = data.get("choices")
    holder: Json = choices[0]["delta"] if choices else data
    if isinstance(data.get("delta"), dict):
        holder = data["delta"]
    for field in _TEXT_FIELDS:
        if isinstance(holder.get(field), str) and holder[field] and "role" not in holder:
            return shape, field, holder.pop(field)
    return shape, "", ""


def _timeless(value: Any) -> Any:  # noqa: ANN401 - JSON
    if isinstance(value, list):
        return [_timeless(each) for each in value]
    if isinstance(value, dict):
        return {
            key: "TIME" if key in _TIMES and isinstance(each, int | float) else _timeless(each)
            for key, each in value.items()
        }
    return value


async def replayed(story: Json, url: str, upstream: Upstream) -> Json:
    """Send the requests of a story; return the current responses as a story."""
    names = IdNames()
    steps = []
    async with httpx2.AsyncClient(base_url=url, timeout=WAIT_S, headers={"user-agent": "replay"}) as client:
        for step in story["steps"]:
            if "release" in step:
                upstream.gate.set()
                steps.append(step)
                continue
            response = await _replay_step(client, step, names)
            steps.append({**step, "response": response})
    return {**story, "steps": steps, "asked": _upstream_requests(upstream, names)}


def _upstream_requests(upstream: Upstream, names: IdNames) -> Any:  # noqa: ANN401 - JSON
    return json.loads(names.recorded(json.dumps(upstream.sent_messages)))


async def _replay_step(client: httpx2.AsyncClient, step: Json, names: IdNames) -> Json:
    given = step["request"]
    headers = {name: value.replace("TOKEN", TOKEN) for name, value in given["headers"].items()}
    body = names.actual(json.dumps(given["body"])).encode() if "body" in given else None
    request = client.build_request(
        given["method"], names.actual(given["path"]), headers=headers, content=body
    )
    for name in ("accept-encoding", "connection"):
        request.headers.pop(name, None)
    response = await client.send(request, stream=True)
    try:
        async with asyncio.timeout(WAIT_S):
            read = step.get("events_read")
            expected = None if read is None else join_pieces(step["response"]["events"][:read])
            whole = await _read_body(response, expected)
    finally:
        await response.aclose()
    return recorded_response(response.status_code, response.headers, whole, names)


async def _read_body(response: httpx2.Response, expected: list[Json] | None) -> bytes:
    """Return the body, or its first events where the story's client leaves after them."""
    pieces: AsyncIterator[bytes] = response.aiter_raw()
    whole = b""
    async for piece in pieces:
        whole += piece
        if expected is None:
            continue
        # The last piece may end in the middle of an event.
        found = _blocks(whole[: whole.rfind(b"\n\n") + 2].decode())
        now = join_pieces([_event(block) for block in found])
        if [len(each["piece"]) for each in now] == [len(each["piece"]) for each in expected]:
            return "\n\n".join(found).encode()
    return whole
