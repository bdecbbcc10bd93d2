"""Log lines on stderr: text, or one JSON object per line. Neither contains text of a conversation."""

from __future__ import annotations

import logging
import os
import traceback

import msgspec
from typing_extensions import override

from midstream.cli.terminal import clean
from midstream.observability.debug_output import NETWORK_LOGGER, NETWORK_VARIABLE

LINE_CHARS_MAX = 8 * 1024
"""Characters of one text line with its traceback, and of one message. The middle of a longer one is omitted: the
beginning contains the event, the end the error. A deeply nested value could cause half a megabyte of frames."""
FRAMES_MAX = 40
"""Innermost frames of a traceback in one line of JSON."""
IDS = ("session", "turn", "stream", "call_id", "epoch", "code", "recovery")
"""Fields of a record's `extra` that are logged: only ids and counts."""

LIBRARIES = frozenset(
    [
        "acp",
        "aiohttp",
        "anthropic",
        "asyncpg",
        "boto3",
        "botocore",
        "claude_agent_sdk",
        "google_genai",
        "httpcore",
        "httpcore2",
        "httpx",
        "httpx2",
        "langchain",
        "langchain_core",
        "langgraph",
        "LiteLLM",
        "mcp",
        "nats",
        "openai",
        "pydantic_ai",
        "urllib3",
        "websockets",
    ]
)
"""Loggers of libraries that write addresses with their query, headers, prompts, arguments or answers below WARNING."""


class ContentFilter(logging.Filter):
    """Drops lines that may have text of a conversation, arguments, results, keys, or addresses with their query."""

    @override
    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether a line is written; the network log only if its variable requests it."""
        if record.name == NETWORK_LOGGER:
            return os.environ.get(NETWORK_VARIABLE) == "1"
        return record.levelno >= logging.WARNING or record.name.partition(".")[0] not in LIBRARIES


class WithSession(logging.Formatter):
    """Adds the session of a record to its line."""

    def __init__(self, worker: int = 0) -> None:
        where = f"worker {worker} " if worker else ""
        super().__init__(f"%(asctime)s {where}%(levelname)s %(name)s: %(message)s")

    @override
    def format(self, record: logging.LogRecord) -> str:
        line = super().format(record)
        session = getattr(record, "session", None)
        return clean(shorten_middle(f"{line} [session {session}]" if session else line))


class JsonLines(logging.Formatter):
    """One JSON object per line. An error is logged by type and place: its message may contain user content."""

    def __init__(self, worker: int = 0) -> None:
        super().__init__()
        self._worker = {"worker": worker} if worker else {}

    @override
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "at": round(record.created, 6),
            **self._worker,
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": shorten_middle(record.getMessage()),
        }
        line |= {name: value for name in IDS if (value := getattr(record, name, None)) is not None}
        if record.exc_info and record.exc_info[0] is not None:
            frames = traceback.extract_tb(record.exc_info[2], limit=-FRAMES_MAX)
            line["error"] = record.exc_info[0].__name__
            line["raised_in"] = [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames]
        return msgspec.json.encode(line, enc_hook=str).decode()


def shorten_middle(line: str) -> str:
    """Shorten a line to `LINE_CHARS_MAX` characters, with a note about the omitted middle."""
    left_out = len(line) - LINE_CHARS_MAX
    if left_out <= 0:
        return line
    half = LINE_CHARS_MAX // 2
    return f"{line[:half]}\n[{left_out} characters left out]\n{line[-half:]}"


FORMATS: dict[str, type[WithSession | JsonLines]] = {"text": WithSession, "json": JsonLines}
"""Formatters by the values of `--log-format`."""
