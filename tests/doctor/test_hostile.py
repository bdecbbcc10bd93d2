"""For any file the doctor gives a report, never a traceback; and a copy that it writes can be read."""

from __future__ import annotations

import copy
import json
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from midstream.doctor.examination import examine
from midstream.doctor.findings import Status
from tests.doctor.files import HISTORIES
from tests.search import tried

ODD: list[Any] = [
    None,
    True,
    0,
    -1.5,
    "",
    " ",
    "\ud83d",
    "a\nb",
    [],
    {},
    [[]],
    [{}],
    {"type": "text"},
    "x" * 50,
    10**40,
]
FILES = sorted(path for path in HISTORIES.iterdir() if path.is_file())


@st.composite
def mutated_history(draw: st.DrawFn) -> tuple[str, str]:
    """Return a hand-made history with a few of its values replaced, duplicated or removed."""
    path = draw(st.sampled_from(FILES))
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".jsonl":
        values = [json.loads(line) for line in text.splitlines() if line.endswith("}")]
    else:
        values = json.loads(text)
    for _ in range(draw(st.integers(1, 6))):
        _mutate(draw, values)
    if path.suffix == ".jsonl":
        return path.suffix, "".join(json.dumps(value) + "\n" for value in values)
    return path.suffix, json.dumps(values)


def _mutate(draw: st.DrawFn, root: Any) -> None:  # noqa: ANN401 - any JSON
    at = root
    while isinstance(at, dict | list) and at:
        key = draw(st.sampled_from(sorted(at) if isinstance(at, dict) else range(len(at))))
        inner = at[key]
        if not (isinstance(inner, dict | list) and inner) or draw(st.integers(0, 3)) == 0:
            match draw(st.sampled_from(["replace", "replace", "remove", "double"])):
                case "replace":
                    at[key] = copy.deepcopy(draw(st.sampled_from(ODD)))
                case "remove":
                    del at[key]
                case _ if isinstance(at, list):
                    at.insert(key, copy.deepcopy(inner))
            return
        at = inner


DUMPED = ["langchain", "schema", "messages"]
ASKED = {"name": "read_log", "args": {}, "id": "lc_1", "type": "tool_call"}
OF_NO_TYPE = {
    "v": 4,
    "channel_values": {
        "messages": [
            {
                "lc": 1,
                "type": "constructor",
                "id": [*DUMPED, "HumanMessage"],
                "kwargs": {"content": "Which boats are in?", "type": "human"},
            },
            {
                "lc": 1,
                "type": True,
                "id": [*DUMPED, "AIMessage"],
                "kwargs": {"content": "", "type": "ai", "tool_calls": [ASKED]},
            },
        ]
    },
}


@given(mutated_history())
@example((".json", json.dumps(OF_NO_TYPE)))
@settings(max_examples=tried(300))
def test_a_mutated_history_has_a_report_and_its_copy_can_be_read(file: tuple[str, str]) -> None:
    suffix, text = file
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"history{suffix}"
        path.write_text(text, encoding="utf-8")
        done = examine(path)
        assert isinstance(done.report.status, Status)
        if done.remedy is not None:
            again = examine(done.remedy.beside().path)
            assert again.report.status is not Status.MISSING


_json = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(
                ["role", "content", "type", "parts", "messages", "message", "uuid", "payload", "id", "kind"]
            ),
            inner,
            max_size=5,
        )
    ),
    max_leaves=20,
)


@given(st.lists(_json, max_size=6), st.booleans())
@settings(max_examples=tried(300))
def test_any_json_has_a_report(values: list[object], are_lines: bool) -> None:  # noqa: FBT001 - drawn
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / ("f.jsonl" if are_lines else "f.json")
        text = "".join(json.dumps(value) + "\n" for value in values) if are_lines else json.dumps(values)
        path.write_text(text, encoding="utf-8")
        assert isinstance(examine(path).report.status, Status)


@given(st.binary(max_size=200), st.sampled_from([".json", ".jsonl", ".db"]))
@settings(max_examples=tried(200))
def test_any_bytes_have_a_report(body: bytes, suffix: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"f{suffix}"
        path.write_bytes(body)
        assert examine(path).report.status in (Status.UNREADABLE, Status.FINDINGS, Status.LOSSY, Status.CLEAN)
