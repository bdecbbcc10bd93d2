"""The output of sub-agents is indented below their call, in whole lines."""

from __future__ import annotations

import msgspec

from midstream.cli.subagents import SubAgents
from midstream.cli.terminal import PLAIN
from midstream.history.messages import (
    Finish,
    Outcome,
    Response,
    Text,
    ToolCall,
    ToolResult,
    UpstreamCall,
    UserMessage,
)
from midstream.session.calls import QuestionKind
from midstream.session.records import (
    CallEnded,
    CallProgressed,
    CallStarted,
    ChildDelta,
    Delta,
    MessageAccepted,
    QuestionAsked,
    Record,
    ResponseCompleted,
    TurnEnded,
    TurnStatus,
    encode,
)

WORK: tuple[Record, ...] = (
    MessageAccepted(1, UserMessage.of("find it"), 1.0),
    Delta(1, 1, 1, 0, "text", "I lo"),
    ResponseCompleted(
        1, 1, 1, Response((Text("I look."), ToolCall("c1", "look", '{"at":1}')), Finish.CALLS), 1.0
    ),
    QuestionAsked(1, 1, "c1", QuestionKind.APPROVAL, "d", 1.0),
    CallStarted(1, 1, "c1", 1, 2.0, arguments='{"at":2}'),
    CallProgressed(1, 1, "c1", 1, "half\x1b[2J way", 2.5),
    CallEnded(1, 1, ToolResult("c1", "seen", Outcome.OK), 3.0),
)


def child_delta(record: Record, child: str = "s::1.1.0") -> ChildDelta:
    return ChildDelta(1, 1, "c1", child, 1, msgspec.Raw(encode(record)))


def render(*records: ChildDelta, width: int = 60) -> list[str]:
    below = SubAgents(PLAIN, width)
    return [line for record in records for line in below.lines(record)]


def test_text_is_shown_whole_and_calls_when_they_end() -> None:
    assert render(*map(child_delta, WORK)) == [
        "       │ I look.",
        "       │ ~ half way",
        '       │ ✓ look {"at":2} ok 1.0 s',
    ]


def test_a_tool_of_its_upstream_is_shown_in_order() -> None:
    response = Response((UpstreamCall("u", "grep", "{}", "line 1", Outcome.OK), Text("Found.")))
    assert render(child_delta(ResponseCompleted(1, 1, 1, response, 1.0))) == [
        "       │ ✓ grep {} ok, elsewhere",
        "       │ Found.",
    ]


def test_a_sub_agent_of_a_sub_agent_is_indented_further() -> None:
    inner = [child_delta(child_delta(record, "s::1.1.0::1.1.0")) for record in WORK]
    assert render(*inner)[0] == "         │ I look."


def test_the_output_of_two_concurrent_sub_agents_is_not_mixed() -> None:
    both = [child_delta(record, child) for record in WORK for child in ("s::1.1.0", "s::1.1.1")]
    assert [line for line in render(*both) if "✓" in line] == 2 * ['       │ ✓ look {"at":2} ok 1.0 s']


def test_an_unsuccessful_end_is_reported() -> None:
    well, badly = (
        TurnEnded(1, status, 4.0, code, message)
        for status, code, message in (
            (TurnStatus.COMPLETED, "", ""),
            (TurnStatus.FAILED, "model_rejected", "no key"),
        )
    )
    assert render(child_delta(well), child_delta(badly)) == [
        "       │ ~ the sub-agent failed: no key [model_rejected]"
    ]


def test_a_call_without_its_response_is_shown() -> None:
    assert render(child_delta(WORK[-1])) == ["       │ ✓ call c1 ok"]
