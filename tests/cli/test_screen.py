"""A live session, on a terminal and through a pipe."""

from __future__ import annotations

from midstream.cli.screen import Flow, Screen
from midstream.cli.terminal import PLAIN, Ink
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
from midstream.session.records import (
    AttemptContinued,
    AttemptFailed,
    AttemptStarted,
    CallEnded,
    CallStarted,
    CancelRequested,
    Delta,
    EpochStarted,
    MessageAccepted,
    Record,
    ResponseCompleted,
    StallEnded,
    StallNoticed,
    ToolsChanged,
    TurnEnded,
    TurnStatus,
)
from midstream.timing import StalledOn

CALLED = ResponseCompleted(1, 1, 1, Response((Text("Hm."), ToolCall("c1", "look", "{}")), Finish.CALLS), 1.0)
STARTED = CallStarted(1, 1, "c1", 1, 1.0)
ENDED = CallEnded(1, 1, ToolResult("c1", "seen", Outcome.OK), 2.0)


def words(text: str, kind: str = "text") -> Delta:
    return Delta(1, 1, 1, 0, "thinking" if kind == "thinking" else "text", text)


def on_terminal(*records: Record, width: int = 30) -> str:
    seen: list[str] = []
    ink = Ink(is_colored=False, is_terminal=True)
    screen = Screen(seen.append, seen.append, ink, width)
    for record in records:
        screen.show(record)
    return "".join(seen)


def through_pipe(*records: Record) -> tuple[str, str]:
    text: list[str] = []
    lines: list[str] = []
    screen = Screen(text.append, lines.append, PLAIN, 0)
    for record in records:
        screen.show(record)
    return "".join(text), "".join(lines)


def test_text_is_wrapped_at_spaces_wherever_the_deltas_were_cut() -> None:
    seen: list[str] = []
    flow = Flow(seen.append, indent="  ", width=12)
    for piece in ("one tw", "o thr", "ee\n\nfo", "ur a-word-longer-than-a-line"):
        flow.add(piece)
    flow.end()
    assert "".join(seen) == "one two\n  three\n  \n  four\n  a-word-longer-than-a-line\n"


def test_inner_spaces_are_kept_and_leading_ones_dropped() -> None:
    seen: list[str] = []
    flow = Flow(seen.append, indent="  ", width=20)
    for piece in (" on", " from", " here:\n  x =  1"):
        flow.add(piece)
    flow.end()
    assert "".join(seen) == "on from here:\n    x =  1\n"


def test_the_users_text_is_wrapped() -> None:
    asked = MessageAccepted(1, UserMessage.of("one two three four five six seven"), 1.0)
    assert on_terminal(asked) == "you    one two three four five\n       six seven\n"


RUNS = Delta(1, 1, 1, 1, "thinking", "", UpstreamCall("u", "grep", '{"for":"x"}'))
RAN = Delta(1, 1, 1, 1, "thinking", "", UpstreamCall("u", "grep", '{"for":"x"}', "line 1", Outcome.OK))


def test_a_tool_of_the_upstream_is_one_line_that_is_overwritten() -> None:
    after = Delta(1, 1, 1, 2, "text", "Found.")
    seen = on_terminal(words("Hm."), RUNS, RAN, after, width=60)
    assert seen == (
        "agent  Hm.\n"
        '       · grep {"for":"x"} running, elsewhere\r\x1b[K       ✓ grep {"for":"x"} ok, elsewhere\n'
        "agent  "
    )


def test_through_a_pipe_a_tool_of_the_upstream_is_two_lines() -> None:
    text, lines = through_pipe(words("Hm."), RUNS, RAN)
    assert text == ""
    assert lines == '       · grep {"for":"x"} running, elsewhere\n       ✓ grep {"for":"x"} ok, elsewhere\n'


def test_after_text_the_end_of_a_tool_is_a_separate_line() -> None:
    seen = on_terminal(RUNS, Delta(1, 1, 1, 2, "text", "I wait."), RAN, width=60)
    assert seen == (
        '       · grep {"for":"x"} running, elsewhere\n'
        "agent  I wait.\n"
        '       ✓ grep {"for":"x"} ok, elsewhere\n'
    )


def test_through_a_pipe_responses_are_whole_and_messages_separate() -> None:
    done = ResponseCompleted(1, 2, 1, Response((Text("Done now."),), Finish.STOP), 3.0)
    text, lines = through_pipe(
        words("Hm"), words("."), CALLED, STARTED, ENDED, words("Done "), words("now."), done
    )
    assert text == "Hm.\nDone now.\n"
    assert lines.splitlines() == ["       · look {} running", "       ✓ look {} ok 1.0 s"]


def test_on_a_terminal_the_line_of_a_call_is_overwritten_when_it_ends() -> None:
    assert on_terminal(words("Hm."), CALLED, STARTED, ENDED) == (
        "agent  Hm.\n       · look {} running\r\x1b[K       ✓ look {} ok 1.0 s\n"
    )


def test_a_line_that_is_no_longer_the_last_one_is_not_overwritten() -> None:
    seen = on_terminal(CALLED, STARTED, EpochStarted(2, "other", 1.5), ENDED)
    assert seen.splitlines() == [
        "       · look {} running",
        "       ~ a new process took o…",
        "       ✓ look {} ok 1.0 s",
    ]


def test_a_call_without_its_response_still_ends() -> None:
    assert on_terminal(STARTED, ENDED) == "       ✓ call c1 ok\n"


def test_events_of_the_turn_are_reported() -> None:
    seen = on_terminal(
        MessageAccepted(1, UserMessage.of("hi\x1b[2J"), 1.0),
        AttemptStarted(1, 1, 1, 1.0),
        words("Hel"),
        AttemptFailed(1, 1, 1, "model_stalled", "silence", 2.0),
        AttemptStarted(1, 1, 2, 3.0),
        CancelRequested(1, 4.0, 5.0),
        TurnEnded(1, TurnStatus.FAILED, 6.0, "model_rejected", "too long"),
        width=80,
    )
    assert seen.splitlines() == [
        "you    hi",
        "agent  Hel",
        "       ~ attempt 1 failed: silence [model_stalled]",
        "       ~ retried (attempt 2): the text of the previous attempt is void",
        "       ~ stopped on request",
        "       ~ turn 1 failed: too long [model_rejected]",
    ]


def test_thinking_is_separate_from_text() -> None:
    whole = ResponseCompleted(1, 1, 1, Response((Thinking("hm"), Text("Hello.")), Finish.STOP), 1.0)
    ended = TurnEnded(1, TurnStatus.COMPLETED, 2.0)
    text, lines = through_pipe(words("hm", "thinking"), words("Hello."), whole, ended)
    assert (text, lines) == ("Hello.\n", "thinking: hm\n")


def test_escape_sequences_in_text_are_removed() -> None:
    whole = ResponseCompleted(1, 1, 1, Response((Text("a\x1b[2Jb\u202e"),), Finish.STOP), 1.0)
    assert through_pipe(whole)[0] == "ab\n"


def test_a_pipe_receives_no_text_that_may_be_replaced() -> None:
    begun = (AttemptStarted(1, 1, 1, 1.0), words("Hel"), AttemptStarted(1, 1, 2, 2.0), words("Hello"))
    assert through_pipe(*begun)[0] == ""
    whole = ResponseCompleted(1, 1, 2, Response((Text("Hello."),), Finish.STOP), 3.0)
    assert through_pipe(*begun, whole, TurnEnded(1, TurnStatus.COMPLETED, 4.0))[0] == "Hello.\n"
    text, lines = through_pipe(*begun, TurnEnded(1, TurnStatus.FAILED, 4.0, "model", "it broke"))
    assert (text, "the answer was interrupted: Hello\n" in lines) == ("", True)


def test_added_and_removed_tools_are_reported() -> None:
    text, lines = through_pipe(ToolsChanged(1, 1.0, added=("files__read",)))
    assert (text, "tools added: files__read" in lines) == ("", True)


def test_silence_and_its_end_are_reported_and_the_text_continues_where_it_was_cut() -> None:
    lines = on_terminal(
        words("Half a "),
        StallNoticed(1, 1, StalledOn.FIRST_TOKEN, 30.0, 1.0),
        AttemptContinued(1, 1, 1, 1, 2.0),
        StallEnded(1, 1, StalledOn.FIRST_TOKEN, 31.0, 3.0),
        words("word"),
        TurnEnded(1, TurnStatus.COMPLETED, 4.0),
        width=80,
    )
    assert lines.startswith("agent  Half a")
    assert lines.endswith("agent  word\n")
    assert "the model has not begun for 30 s" in lines
    assert "continues where it stopped" in lines
    assert "resumed after 31 s" in lines
