"""Any possible history: the output of real models, tools and people, and worse."""

from __future__ import annotations

from hypothesis import strategies as st

from midstream.history.messages import (
    Entry,
    File,
    Finish,
    History,
    Outcome,
    Response,
    ResponsePart,
    Step,
    Text,
    Thinking,
    ToolCall,
    ToolResult,
    UpstreamCall,
    UserMessage,
)

MODEL = "claude-1"
"""The requested model; it signs as Claude does, so that its signatures look alike."""
SIGNATURES = ("EqoBCkgIARABGAIiQA", "EqoBCkgIARABGAIiQB")

_texts = st.sampled_from(["hi", "", " ", "\n", "two words", "ends in space ", "ünï ", "a\nb", "\ud800"])
_ids = st.sampled_from(
    [
        "a",
        "b",
        "a_2",
        "call_1",
        "call 1",
        "functions.read:0",
        "null",
        " ",
        "x" * 41,
        "x" * 70,
        "id\nnewline",
        "ABCDEFGHI",
    ]
)
_names = st.sampled_from(["read", "read file", "fs.read", "", "n" * 80])
_arguments = st.sampled_from(
    [
        "{}",
        "",
        '{"path": "a"}',
        '{"path": "a',
        "[1]",
        "null",
        '"{}"',
        '{"x": NaN}',
        '{"x": "\\ud800"}',
        '{"a":' * 300,
    ]
)
_files = st.sampled_from(
    [
        File("image/png", data="AAAA"),
        File("image/png", data="!"),
        File("image/svg+xml", data="AAAA"),
        File("image/png", url="https://example.org/a.png"),
        File("image/png", url="file:///a.png"),
        File("image/png"),
        File("audio/wav", data="AAAA"),
        File("application/pdf", data="AAAA", name="a.pdf"),
        File("application/pdf", url="https://example.org/a.pdf"),
        File("text/plain", data="aGk="),
        File("text/plain", data="/w=="),
        File("", data=""),
    ]
)
_users = st.lists(st.one_of(_texts.map(Text), _files), max_size=3).map(
    lambda parts: UserMessage(tuple(parts))
)
_ran_elsewhere = st.builds(UpstreamCall, _ids, _names, _arguments, _texts, st.sampled_from(Outcome))
_thoughts = st.one_of(
    st.builds(Thinking, _texts, st.sampled_from([None, "", *SIGNATURES])),
    st.builds(Thinking, st.just(""), st.sampled_from(["", *SIGNATURES]), st.just(True)),  # noqa: FBT003 - a strategy
)


@st.composite
def steps(draw: st.DrawFn) -> Step:
    """Draw a response with the results of its calls."""
    parts: list[ResponsePart] = draw(
        st.lists(st.one_of(_texts.map(Text), _thoughts, _ran_elsewhere), max_size=3)
    )
    calls = [
        ToolCall(call_id, draw(_names), draw(_arguments))
        for call_id in draw(st.lists(_ids, unique=True, max_size=3))
    ]
    results = tuple(ToolResult(call.id, draw(_texts), draw(st.sampled_from(Outcome))) for call in calls)
    finish = draw(st.sampled_from(Finish))
    model = draw(st.sampled_from(["", MODEL, "another"]))
    return Step(Response((*parts, *calls), finish, model), results)


def histories(entries_max: int = 6) -> st.SearchStrategy[History]:
    """Draw a history; turns in it may have ended in any way."""
    entries: st.SearchStrategy[Entry] = st.one_of(_users, steps())
    return st.lists(entries, max_size=entries_max).map(lambda drawn: History(tuple(drawn)))
