"""Log lines: for people or for machines, and never with what was said."""

from __future__ import annotations

import json
import logging
import sys

from midstream.cli.log_format import JsonLines, WithSession

CANARY = "canary-19ab"


def _record(**extra: object) -> logging.LogRecord:
    try:
        int(CANARY)  # its message quotes what it was given
    except ValueError:
        record = logging.LogRecord(
            "midstream.x", logging.ERROR, "x.py", 1, "failed: %s", ("code",), sys.exc_info()
        )
        vars(record).update(extra)
        return record
    raise AssertionError("a canary is no number")


def test_a_json_line_has_ids_and_where_it_was_raised_and_nothing_else() -> None:
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


def test_a_line_for_people_names_the_session_and_is_one_of_words() -> None:
    record = logging.LogRecord("midstream.x", logging.INFO, "x.py", 1, "a\x1b[31mb", (), None)
    record.session = "s1"
    assert WithSession().format(record).endswith(" INFO midstream.x: ab [session s1]")
