"""A journal as text for people."""

from __future__ import annotations

from msgspec import Raw
from msgspec.structs import replace

from midstream.cli.terminal import PLAIN, width_of
from midstream.cli.transcript import (
    CONTINUED_NOTE,
    Called,
    Noted,
    SpokenText,
    call_line,
    lines,
    note_of,
    read,
    tools_note,
)
from midstream.history.messages import (
    Finish,
    Outcome,
    Response,
    Text,
    Thinking,
    ToolCall,
    ToolResult,
    UpstreamCall,
    UserMessage,
)
from midstream.session.calls import Choice, QuestionKind
from midstream.session.records import (
    AnswerUsed,
    AttemptContinued,
    AttemptFailed,
    AttemptStarted,
    CallEnded,
    CallInDoubt,
    CallProgressed,
    CallStarted,
    CancelRequested,
    ChildDelta,
    CloseReason,
    Delta,
    EpochStarted,
    MessageAccepted,
    MessageQueued,
    MessageWithdrawn,
    QuestionAnswered,
    QuestionAsked,
    QuestionClosed,
    Record,
    ResponseCompleted,
    ResultArrivedLate,
    StallNoticed,
    StepCommitted,
    ToolsChanged,
    TurnEnded,
    TurnResumed,
    TurnStatus,
    encode,
)
from midstream.session.session import fold, prune_session
from midstream.timing import StalledOn

ASKED = MessageAccepted(1, UserMessage.of("hi"), at=10.0)


def delta(words: str, *, attempt: int = 1, part: int = 0) -> Delta:
    return Delta(1, 1, attempt, part, "text", words)


def entries(*records: Record) -> list[SpokenText | Called | Noted]:
    (turn,) = read([EpochStarted(1, "me", 9.0), ASKED, *records])
    return turn.entries[1:]


def test_a_whole_response_replaces_its_deltas() -> None:
    response = Response((Thinking("hm"), Text("Hello.")))
    found = entries(AttemptStarted(1, 1, 1, 10.0), delta("Hel"), ResponseCompleted(1, 1, 1, response, 11.0))
    assert found == [SpokenText("thinking", "hm"), SpokenText("agent", "Hello.")]


def test_a_tool_that_ran_upstream_is_shown_where_it_started() -> None:
    def ran(content: str = "", outcome: Outcome | None = None) -> UpstreamCall:
        return UpstreamCall("u", "grep", "{}", content, outcome)

    def notes_of(call: UpstreamCall) -> Delta:
        return Delta(1, 1, 1, 1, "thinking", "", call)

    begun = (AttemptStarted(1, 1, 1, 10.0), delta("I look"), notes_of(ran()), delta("found", part=2))
    cut = [SpokenText("agent", "I look", is_cut=True), SpokenText("agent", "found", is_cut=True)]
    running = Called("grep", "{}", is_elsewhere=True)
    ended = Called("grep", "{}", outcome="ok", content="line 1", is_elsewhere=True)
    assert entries(*begun) == [cut[0], running, cut[1]]
    assert entries(*begun, notes_of(ran("line 1", Outcome.OK))) == [cut[0], ended, cut[1]]

    response = Response((Text("I look"), ran("line 1", Outcome.OK), Text("found")))
    whole = entries(*begun, ResponseCompleted(1, 1, 1, response, 11.0))
    assert whole == [SpokenText("agent", "I look"), ended, SpokenText("agent", "found")]
    assert call_line(running, PLAIN, 60) == "       · grep {} running, elsewhere"
    assert call_line(ended, PLAIN, 60) == "       ✓ grep {} ok, elsewhere"


def test_unfinished_text_is_marked() -> None:
    found = entries(AttemptStarted(1, 1, 1, 10.0), delta("Hel"), delta("lo"))
    assert found == [SpokenText("agent", "Hello", is_cut=True)]


def test_the_text_of_a_failed_attempt_is_removed_and_its_reason_stays() -> None:
    found = entries(
        AttemptStarted(1, 1, 1, 10.0),
        delta("Hel"),
        AttemptFailed(1, 1, 1, "model_stalled", "silence", 11.0),
        AttemptStarted(1, 1, 2, 12.0),
        delta("Hello.", attempt=2),
    )
    assert found == [
        Noted("attempt 1 failed: silence [model_stalled]"),
        SpokenText("agent", "Hello.", is_cut=True),
    ]


def test_a_continued_attempt_keeps_its_text_and_silence_is_noted() -> None:
    found = entries(
        AttemptStarted(1, 1, 1, 10.0),
        delta("Half a "),
        StallNoticed(1, 1, StalledOn.BETWEEN_TOKENS, 15.0, 11.0),
        AttemptContinued(1, 1, 1, 1, 12.0),
        delta("word"),
    )
    assert found == [
        SpokenText("agent", "Half a word", is_cut=True),
        Noted("the model has been silent for 15 s"),
        Noted(CONTINUED_NOTE),
    ]


def test_a_call_has_its_outcome_and_the_number_of_its_runs() -> None:
    response = Response((ToolCall("c1", "look", "{}"),), Finish.CALLS)
    found = entries(
        ResponseCompleted(1, 1, 1, response, 11.0),
        CallStarted(1, 1, "c1", 1, 11.0),
        EpochStarted(2, "other", 12.0),
        CallStarted(1, 1, "c1", 2, 12.0),
        CallEnded(1, 1, ToolResult("c1", "seen", Outcome.OK), 12.5),
    )
    assert found == [
        Called("look", "{}", 2, "ok", "seen", 12.0, 12.5),
        Noted("a new process took over (epoch 2)"),
    ]


def test_the_end_of_a_turn_is_noted() -> None:
    (turn,) = read([ASKED, CancelRequested(1, 11.0, 16.0), TurnEnded(1, TurnStatus.CANCELLED, 12.0)])
    assert (turn.status, turn.ended_at) == ("cancelled", 12.0)
    assert list(lines([turn], PLAIN, 60))[1:] == [
        "you    hi",
        "       ~ stopped on request",
        "       cancelled after 2.0 s",
    ]
    failed = TurnEnded(1, TurnStatus.FAILED, 12.0, code="model_rejected", message="too long")
    (turn,) = read([ASKED, failed])
    assert list(lines([turn], PLAIN, 60))[-1] == "       failed after 2.0 s: too long [model_rejected]"
    (turn,) = read([ASKED])
    assert list(lines([turn], PLAIN, 60))[-1] == "       … still running"


def test_no_line_is_wider_than_the_terminal_and_long_results_are_cut() -> None:
    call = ToolCall("c1", "look", '{"where": "' + "far " * 50 + '"}')
    (turn,) = read(
        [
            ASKED,
            delta("word " * 100),
            ResponseCompleted(1, 1, 1, Response((Text("word " * 100), call), Finish.CALLS), 11.0),
            CallEnded(1, 1, ToolResult("c1", "\n".join("line" for _ in range(9))), 12.0),
        ]
    )
    seen = list(lines([turn], PLAIN, 60))
    assert max(map(width_of, seen)) <= 60
    assert "         … 6 more lines" in seen


def test_a_call_is_one_line_with_its_state() -> None:
    assert call_line(Called("look", "{}"), PLAIN, 60) == "       · look {} waiting"
    assert call_line(Called("look", "{}", 1), PLAIN, 60) == "       · look {} running"
    ended = Called("look", "{}", 2, "unknown", "", 1.0, 2.0)
    assert call_line(ended, PLAIN, 60) == "       ? look {} unknown 1.0 s (run 2)"


def test_added_and_removed_tools_are_named_up_to_a_limit() -> None:
    many = tuple(f"t{number}" for number in range(9))
    changed = ToolsChanged(1, 10.0, many, ("a", "b"), ("mail",))
    expected = "tools added: t0, t1, t2, t3, t4, t5, t6, t7, …; tools gone: a, b; not reachable: mail"
    assert tools_note(changed) == expected
    assert tools_note(ToolsChanged(1, 10.0)) == "all tools are reachable again"
    assert entries(changed) == [Noted(expected)]


def test_people_and_sub_agents_are_shown_in_their_turn() -> None:
    call = ToolCall("c1", "clerk", '{"task":"pay"}')
    responded = ResponseCompleted(1, 1, 1, Response((call,), Finish.CALLS), 11.0)
    inner: tuple[Record, ...] = (
        MessageAccepted(1, UserMessage.of("pay"), 11.0),
        ResponseCompleted(1, 1, 1, Response((Text("It is paid."),)), 12.0),
    )
    turns = read(
        [
            ASKED,
            responded,
            QuestionAsked(1, 1, "c1", QuestionKind.APPROVAL, "d", 11.0, "Sure?"),
            QuestionAnswered(
                1, 1, "c1", QuestionKind.APPROVAL, "d", Choice.ALLOW, 11.5, arguments="{}", by="ann"
            ),
            CallStarted(1, 1, "c1", 1, 12.0, arguments='{"task":"pay 2"}'),
            *(ChildDelta(1, 1, "c1", "s::1.1.0", at, Raw(encode(each))) for at, each in enumerate(inner, 1)),
            CallProgressed(1, 1, "c1", 1, "half way", 12.5),
            CallInDoubt(1, 1, "c1", 12.6),
            CallEnded(1, 1, ToolResult("c1", "unknown", Outcome.UNKNOWN), 13.0),
            MessageQueued(1, UserMessage.of("and then?"), 13.0),
            MessageWithdrawn(1, 13.5),
            TurnEnded(1, TurnStatus.FAILED, 14.0, "model_rejected", "no key"),
            ResultArrivedLate(1, 1, ToolResult("c1", "it was paid"), 15.0),
            TurnResumed(1, 2, 16.0),
            TurnEnded(1, TurnStatus.COMPLETED, 17.0),
        ]
    )
    assert list(lines(turns, PLAIN, 100))[1:] == [
        "you    hi",
        '       ? clerk {"task":"pay 2"} unknown 1.0 s',
        "  agent  It is paid.",
        "         unknown",
        "       ~ waits for a person: Sure?",
        "       ~ ann answered: allow, with other arguments",
        "       ~ the process that ran a call died; its outcome is unknown",
        "       ~ message 1 is queued until the end of this turn: and then?",
        "       ~ message 1 was withdrawn",
        "       ~ the outcome of a call arrived late (ok): it was paid",
        "       ~ turn 1 continues",
        "       completed after 7.0 s",
    ]


def test_a_pruned_journal_starts_with_its_text_and_results_without_their_times() -> None:
    call = Response((Text("look"), ToolCall("a", "read", "{}")), Finish.CALLS)
    records: list[Record] = [
        EpochStarted(1, "me", 9.0),
        ASKED,
        AttemptStarted(1, 1, 1, 11.0),
        ResponseCompleted(1, 1, 1, call, 12.0),
        CallStarted(1, 1, "a", 1, 13.0),
        CallEnded(1, 1, ToolResult("a", "it says"), 14.0),
        StepCommitted(1, 1),
        TurnEnded(1, TurnStatus.FAILED, 15.0, "model_rejected"),
    ]
    begins = prune_session(fold((1, record) for record in records), at=99.0)
    again = MessageAccepted(2, UserMessage.of("again"), at=100.0)
    first, second = read([begins, again])
    called = Called("read", "{}", outcome="ok", content="it says")
    assert first.entries == [SpokenText("user", "hi"), SpokenText("agent", "look"), called]
    assert (first.turn, first.status, first.at, second.turn, second.at) == (1, "failed", 0.0, 2, 100.0)
    shown = list(lines([first], PLAIN, 70))
    assert "turn 1 · its events are no longer kept" in shown[0]
    assert shown[-1].strip() == "failed"
    running = read([prune_session(fold((1, record) for record in records[:-1]), at=99.0)])
    assert [turn.status for turn in running] == ["running"]


def test_a_permission_request_of_an_upstream_agent_is_noted_with_its_result() -> None:
    permission = QuestionAsked(
        1, 1, "leave-1", QuestionKind.APPROVAL, "d", 11.0, attempt=1, name="Bash", arguments='{"a":1}'
    )
    assert note_of(permission) == 'requests permission for Bash {"a":1}'
    closed = QuestionClosed(1, 1, "leave-1", CloseReason.EXPIRED, 12.0)
    assert note_of(closed) == "the question is closed: no answer came in time"
    assert (
        note_of(replace(closed, why=CloseReason.WITHDRAWN))
        == "the question is closed: no answer is needed any more"
    )
    assert note_of(AnswerUsed(1, 1, 1, "leave-1", 12.0)) == ""


def test_a_failed_call_shows_its_error_within_the_width() -> None:
    arguments = '{"url": "https://example.com/a/long/path"}'
    failed = Called("fetch", arguments, outcome="error", content="ValueError: no such page\nmore")
    line = call_line(failed, PLAIN, 79, has_reason=True)
    assert line.endswith(" error: ValueError: no such page")
    assert line.startswith('       ✗ fetch {"url": ')
    assert width_of(line) <= 79
    assert "ValueError" not in call_line(failed, PLAIN, 79)
    long = Called("fetch", arguments, outcome="error", content="x" * 500)
    assert width_of(call_line(long, PLAIN, 79, has_reason=True)) == 79
    fine = Called("fetch", "{}", outcome="ok", content="found")
    assert "found" not in call_line(fine, PLAIN, 79, has_reason=True)
