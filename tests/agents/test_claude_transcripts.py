"""The check that Claude Code's transcript of a conversation is complete as its processes will read it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from midstream.agents.claude_transcripts import is_whole

NAME = "860d03dd-0086-4d64-8d9d-f77f6d285397"


def entry(name: str, before: str | None, kind: str = "user") -> dict[str, object]:
    return {"type": kind, "uuid": name, "parentUuid": before, "isSidechain": False}


ONE, ANSWER = entry("q1", None), entry("r1", "q1", "assistant")
BEHIND = entry("snapshot", "r1", "attachment")
TWO, SECOND = entry("q2", "snapshot"), entry("r2", "q2", "assistant")
SIDE = {**entry("s1", "elsewhere"), "isSidechain": True}


def leaf(name: str) -> dict[str, object]:
    return {"type": "last-prompt", "leafUuid": name}


@pytest.mark.parametrize(
    ("lines", "last", "expected"),
    [
        ([ONE, ANSWER, BEHIND, leaf("snapshot"), TWO, SECOND, leaf("r2")], "", True),
        ([ONE, ANSWER, BEHIND, leaf("snapshot"), SIDE], "r1", True),
        (
            [ONE, ANSWER, BEHIND, leaf("snapshot"), TWO, SECOND],
            "r2",
            True,
        ),  # it continues after the noted message
        ([BEHIND, TWO, SECOND], "", False),
        ([ONE, ANSWER], "r2", False),
        # Another version has answered "q2" without a note: the next process continues after "snapshot".
        ([ONE, ANSWER, BEHIND, leaf("snapshot"), entry("q2", "r1"), SECOND], "", False),
        ([{"type": "user"}, {"note": 1}], "", True),
        ([], "", True),
    ],
)
def test_a_transcript_is_whole_if_a_process_would_find_all_of_it(
    tmp_path: Path,
    lines: list[dict[str, object]],
    last: str,
    expected: bool,  # noqa: FBT001
) -> None:
    folder = tmp_path / "projects" / "-work"
    folder.mkdir(parents=True)
    text = "".join(f"{json.dumps(line)}\n" for line in lines)
    (folder / f"{NAME}.jsonl").write_text(f"{text}no json\n")
    assert is_whole(tmp_path, NAME, last) is expected


def test_a_missing_transcript_is_left_to_the_program(tmp_path: Path) -> None:
    assert is_whole(tmp_path, NAME, "r1")
