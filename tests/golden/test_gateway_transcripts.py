"""Requests recorded from SDKs get the recorded responses of the gateway and cause the recorded requests to
its upstream.
"""

from __future__ import annotations

import json
import re

import pytest

from tests.golden.record_gateway import play
from tests.golden.transcripts import FOLDER, Json, join_pieces

STORIES = sorted(path.stem for path in FOLDER.glob("*.json"))
COUNT = 16
LIBRARY_ERROR = re.compile(r"failed: \w+")
"""Header names for the HTTP library's name in errors."""


@pytest.mark.parametrize("name", STORIES)
async def test_a_transcript_gets_the_recorded_responses(name: str) -> None:
    recorded: Json = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    actual = await play(recorded)
    for number, (expected, step) in enumerate(zip(recorded["steps"], actual["steps"], strict=True)):
        assert _comparable(step) == _comparable(expected), f"step {number} of {name}"
    assert actual["asked"] == recorded["asked"]


def _comparable(step: Json) -> Json:
    response = step.get("response", {})
    if "events" in response:
        response = {**response, "events": join_pieces(response["events"])}
    whole: Json = json.loads(LIBRARY_ERROR.sub("failed: ERROR", json.dumps({**step, "response": response})))
    return whole


def test_the_number_of_transcripts_is_unchanged() -> None:
    assert len(STORIES) == COUNT
