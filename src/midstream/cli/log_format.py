"""Log lines on stderr: for people, or one JSON object a line for a machine. Neither has words of a conversation."""

from __future__ import annotations

import logging
import traceback

import msgspec
from typing_extensions import override

from midstream.cli.terminal import clean

IDS = ("session", "turn", "stream", "call_id", "epoch", "code", "recovery")
"""What of a line's `extra` is written: ids and counts, and no field that is added later by mistake."""


class WithSession(logging.Formatter):
    """Names the session a line is about."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    @override
    def format(self, record: logging.LogRecord) -> str:
        line = super().format(record)
        session = getattr(record, "session", None)
        return clean(f"{line} [session {session}]" if session else line)


class JsonLines(logging.Formatter):
    """One object a line. Of an error it has the kind and where it was raised: its message may quote anything."""

    @override
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "at": round(record.created, 6),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {name: value for name in IDS if (value := getattr(record, name, None)) is not None}
        if record.exc_info and record.exc_info[0] is not None:
            frames = traceback.extract_tb(record.exc_info[2])
            line["error"] = record.exc_info[0].__name__
            line["raised_in"] = [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames]
        return msgspec.json.encode(line, enc_hook=str).decode()


FORMATS: dict[str, type[logging.Formatter]] = {"text": WithSession, "json": JsonLines}
"""By the name that `--log-format` has."""
