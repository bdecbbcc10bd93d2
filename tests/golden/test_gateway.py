"""The gateway answers what SDKs sent to it as it was recorded, and asks its upstream the same."""

from __future__ import annotations

import json
import re

import pytest

from tests.golden.record_gateway import play
from tests.golden.transcripts import FOLDER, Json, joined

STORIES = sorted(path.stem for path in FOLDER.glob("*.json"))
COUNT = 16
LIBRARY_ERROR = re.compile(r"failed: \w+")
"""How the HTTP library calls an error."""


@pytest.mark.parametrize("name", STORIES)
async def test_a_transcript_is_answered_as_recorded(name: str) -> None:
    recorded: Json = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    actual = await play(recorded)
    for number, (expected, step) in enumerate(zip(recorded["steps"], actual["steps"], strict=True)):
        assert _comparable(step) == _comparable(expected), f"step {number} of {name}"
    assert actual["asked"] == recorded["asked"]


def _comparable(step: Json) -> Json:
    response = step.get("response", {})
    if "events" in response:
        response = {**response, "events": joined(response["events"])}
    whole: Json = json.loads(LIBRARY_ERROR.sub("failed: ERROR", json.dumps({**step, "response": response})))
    return whole


def test_no_transcript_is_lost() -> None:
    assert len(STORIES) == COUNT
