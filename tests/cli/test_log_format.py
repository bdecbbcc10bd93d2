"""Log lines: for people or for machines, and never with the content of messages."""

from __future__ import annotations

import json
import logging
import sys

from midstream.cli.log_format import FRAMES_MAX, LINE_CHARS_MAX, JsonLines, WithSession
from tests.spec import spec

CANARY = "canary-19ab"


def _record(**extra: object) -> logging.LogRecord:
    try:
        int(CANARY)  # its message quotes its argument
    except ValueError:
        record = logging.LogRecord(
            "midstream.x", logging.ERROR, "x.py", 1, "failed: %s", ("code",), sys.exc_info()
        )
        vars(record).update(extra)
        return record
    raise AssertionError("a canary is no number")


def test_a_json_line_has_ids_and_the_place_of_the_error_and_nothing_else() -> None:
    line = json.loads(JsonLines().format(_record(session="s1", call_id="c1", words=CANARY)))
    at, raised_in = line.pop("at"), line.pop("raised_in")
    assert line == {
        "level": "error",
        "logger": "midstream.x",
        "message": "failed: code",
        "session": "s1",
        "call_id": "c1",
        "error": "ValueError",
    }
    assert at > 0
    assert raised_in[0].endswith("_record")
    assert CANARY not in json.dumps(raised_in)


def _overflow(depth: int) -> int:
    return _overflow(depth - 1) + 1 if depth else int(CANARY)


@spec("SEC-77")
def test_a_line_is_limited_and_keeps_its_event_and_its_error() -> None:
    try:
        _overflow(400)
    except ValueError:
        record = logging.LogRecord("midstream.x", logging.ERROR, "x.py", 1, "f" * 20_000, (), sys.exc_info())
    text = WithSession().format(record)
    assert len(text) < LINE_CHARS_MAX + 100
    assert " ERROR midstream.x: fff" in text
    assert text.endswith(f"invalid literal for int() with base 10: '{CANARY}'")
    line = json.loads(JsonLines().format(record))
    assert len(line["message"]) < LINE_CHARS_MAX + 100
    assert len(line["raised_in"]) == FRAMES_MAX
    assert line["raised_in"][-1].endswith("_overflow")


def test_a_line_for_people_has_the_session_and_no_control_characters() -> None:
    record = logging.LogRecord("midstream.x", logging.INFO, "x.py", 1, "a\x1b[31mb", (), None)
    record.session = "s1"
    assert WithSession().format(record).endswith(" INFO midstream.x: ab [session s1]")
