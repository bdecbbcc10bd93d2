"""Histories on disk for tests: the hand-made ones, and builders for more."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

HISTORIES = Path(__file__).parent / "histories"

Json = dict[str, Any]


def put(tmp_path: Path, name: str) -> Path:
    """Copy a hand-made history into a test's folder; of opencode's, return the storage folder."""
    source, target = HISTORIES / name, tmp_path / name
    if source.is_dir():
        shutil.copytree(source, target)
        return target / "storage"
    shutil.copyfile(source, target)
    return target


def write_lines(path: Path, lines: list[Any], tail: str = "") -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + tail)
    return path


def read_lines(path: Path) -> list[Json]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def uuid(number: int) -> str:
    return f"{number:08d}-0000-4000-8000-000000000000"


def line(number: int, parent: int, message: Json, **more: object) -> Json:
    """Return one line of a Claude Code session, below the line with the number `parent` (0: none)."""
    return {
        "parentUuid": uuid(parent) if parent else None,
        "isSidechain": False,
        "sessionId": "5e55",
        "type": "assistant" if message["role"] == "assistant" else "user",
        "message": message,
        "uuid": uuid(number),
        "timestamp": "2026-02-03T10:00:00.000Z",
        **more,
    }


def prompt(words: str) -> Json:
    return {"role": "user", "content": words}


def text_response(response: str, words: str) -> Json:
    return {"id": response, "role": "assistant", "content": [{"type": "text", "text": words}]}


def call_response(response: str, *ids: str) -> Json:
    calls = [{"type": "tool_use", "id": each, "name": "Read", "input": {"path": each}} for each in ids]
    return {"id": response, "role": "assistant", "content": calls}


def results_message(*ids: str) -> Json:
    results = [{"type": "tool_result", "tool_use_id": each, "content": f"what {each} gave"} for each in ids]
    return {"role": "user", "content": results}
