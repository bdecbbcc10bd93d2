"""A loop of the JavaScript client over a turn that does not complete, in node, against a real server."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from midstream.errors import ModelRejectedError
from midstream.history.messages import UserMessage
from midstream.models.responses import Finished, ModelRequest, TextDelta
from midstream.testing.scripted_model import Gate, ScriptedStep
from tests.server.serving import Json, make_app, served
from tests.server.test_browser_client import CLIENT, run_program

pytestmark = pytest.mark.skipif(shutil.which("node") is None, reason="no node here")

PROGRAM = """
import {{ connect }} from "{client}/midstream.js";
const client = await connect({{ url: "{url}" }});
async function shown(stream, act = () => {{}}) {{
  const seen = {{ transcript: "", last: "" }};
  try {{
    for await (const {{ transcript, record, type }} of stream) {{
      Object.assign(seen, {{ transcript, last: record?.type ?? type }});
      await act(seen);
    }}
    seen.error = null;
  }} catch ({{ name, code, status, cause, turn, transcript, isResumable }}) {{
    seen.error = {{ name, code, status, cause, turn, transcript, isResumable }};
  }}
  return seen;
}}
async function play() {{
{body}
}}
console.log(JSON.stringify(await play()));
client.close();
"""


def _answers(gate: asyncio.Event) -> object:
    def response(request: ModelRequest) -> Sequence[ScriptedStep]:
        message = [entry for entry in request.history.entries if isinstance(entry, UserMessage)][-1]
        if message == UserMessage.of("fail"):
            return [TextDelta("some words"), ModelRejectedError("no such model")]
        if message == UserMessage.of("wait"):
            return [TextDelta("some words"), Gate(gate), Finished()]
        return [TextDelta("well"), Finished()]

    return response


async def _played(body: str, tmp_path: Path) -> Json:
    gate = asyncio.Event()
    async with served(make_app(_answers(gate))) as server:  # type: ignore[arg-type] # a function of one request
        program = tmp_path / "program.mjs"
        program.write_text(PROGRAM.format(client=CLIENT.as_uri(), url=server.url, body=body))
        found: Json = json.loads(await run_program("node", "--no-warnings", str(program), at=tmp_path))
        gate.set()
        return found


async def test_a_loop_over_a_failing_turn_throws_after_its_last_event(tmp_path: Path) -> None:
    body = """
  const stream = client.send("s1", "fail");
  const looped = await shown(stream);
  const answered = await stream.answer().catch(({ message, status }) => ({ message, status }));
  const next = await shown(client.send("s1", "go on"));
  return { looped, answered, next };
"""
    found = await _played(body, tmp_path)
    assert found["looped"] == {
        "transcript": "some words",
        "last": "turn_ended",
        "error": {
            "name": "TurnFailedError",
            "code": "turn_failed",
            "status": "failed",
            "cause": "model_rejected",
            "turn": 1,
            "transcript": "some words",
            "isResumable": True,
        },
    }
    assert found["answered"]["status"] == "failed"
    assert "no such model" in found["answered"]["message"]
    assert found["next"] == {"transcript": "well", "last": "turn_ended", "error": None}


async def test_a_loop_over_a_stopped_turn_or_a_withdrawn_message_throws(
    tmp_path: Path,
) -> None:
    body = """
  let queued;
  const stopped = await shown(client.send("s1", "wait"), async ({ transcript }) => {
    if (!transcript || queued) return;
    const second = client.send("s1", "and then?");
    queued = shown(second);
    await second.accepted;
    await client.withdraw("s1");
    client.cancel("s1");
  });
  return { stopped: stopped.error, queued: (await queued).error };
"""
    found = await _played(body, tmp_path)
    stopped, queued = found["stopped"], found["queued"]
    assert (stopped["name"], stopped["status"], stopped["transcript"]) == (
        "TurnFailedError",
        "cancelled",
        "some words",
    )
    assert not stopped["isResumable"]
    assert (queued["name"], queued["status"], queued["turn"]) == ("TurnFailedError", "withdrawn", 0)


async def test_a_loop_that_is_left_or_closed_and_a_follower_throw_nothing(tmp_path: Path) -> None:
    body = """
  const failed = await shown(client.send("s1", "fail"));
  const follower = client.follow("s1", "0-0");
  const followed = await shown(follower, ({ last }) => last === "turn_ended" && follower.abandon());
  const stream = client.send("s1", "wait");
  const left = await shown(stream, ({ transcript }) => transcript && stream.detach());
  return { failed: failed.error.status, followed, left: left.error };
"""
    found = await _played(body, tmp_path)
    assert found["failed"] == "failed"
    assert found["followed"] == {"transcript": "some words", "last": "turn_ended", "error": None}
    assert found["left"] is None
