"""Open questions to a person."""

from __future__ import annotations

from midstream.history.messages import Finish, Response, ToolCall, UserMessage
from midstream.session.calls import CallPlan, Choice, QuestionKind, Site
from midstream.session.questions import Question, questions_of
from midstream.session.records import (
    AttemptStarted,
    CallStarted,
    MessageAccepted,
    Parent,
    QuestionAnswered,
    QuestionAsked,
    Record,
    ResponseCompleted,
)
from midstream.session.session import fold

ASKS = Response((ToolCall("a", "pay", '{"sum":3}'), ToolCall("b", "ask_user", "{}")), Finish.CALLS)
PLANS = (
    CallPlan("a", "da", needs_approval=True, question="It is a lot."),
    CallPlan("b", "db", Site.PERSON, has_effects=False, question="To whom?", answer_s=60.0),
)
RECORDS: tuple[Record, ...] = (
    MessageAccepted(1, UserMessage.of("hi"), 2.0),
    AttemptStarted(1, 1, 1, 2.0),
    ResponseCompleted(1, 1, 1, ASKS, 3.0, PLANS),
    QuestionAsked(1, 1, "a", QuestionKind.APPROVAL, "da", 3.0, "It is a lot."),
    QuestionAsked(1, 1, "b", QuestionKind.QUESTION, "db", 3.0, "To whom?", 63.0),
)
PAY = Question(
    session="s1",
    turn=1,
    response=1,
    call_id="a",
    kind=QuestionKind.APPROVAL,
    digest="da",
    name="pay",
    arguments='{"sum":3}',
    choices=(Choice.ALLOW, Choice.DENY),
    asked_at=3.0,
    text="It is a lot.",
)
WHOM = Question(
    session="s1",
    turn=1,
    response=1,
    call_id="b",
    kind=QuestionKind.QUESTION,
    digest="db",
    name="ask_user",
    arguments="{}",
    choices=(Choice.RESPOND,),
    asked_at=3.0,
    text="To whom?",
    expires_at=63.0,
)


def open_questions(*records: Record) -> tuple[Question, ...]:
    return questions_of("s1", fold((1, record) for record in records))


def test_a_session_without_questions_has_none() -> None:
    assert open_questions() == open_questions(*RECORDS[:2]) == ()


def test_each_question_has_all_information_for_the_person() -> None:
    assert open_questions(*RECORDS) == (PAY, WHOM)


def test_an_answered_question_is_removed() -> None:
    answered = QuestionAnswered(1, 1, "a", QuestionKind.APPROVAL, "da", Choice.ALLOW, 4.0)
    assert open_questions(*RECORDS, answered, CallStarted(1, 1, "a", 1, 4.0)) == (WHOM,)


def test_a_question_of_a_sub_agent_names_the_agents() -> None:
    parent = Parent("top", 1, 1, "c1", ("boss", "clerk"))
    opened = MessageAccepted(1, UserMessage.of("hi"), 2.0, parent=parent)
    (first, _) = open_questions(opened, *RECORDS[1:])
    assert first.agents == ("boss", "clerk")


def test_a_permission_of_an_upstream_agent_is_shown_with_its_original_arguments() -> None:
    asked_by_agent = QuestionAsked(
        1,
        1,
        "leave-1",
        QuestionKind.APPROVAL,
        "dx",
        3.0,
        attempt=1,
        name="Bash",
        arguments='{"command":"make"}',
        is_fixed=True,
    )
    (question,) = open_questions(*RECORDS[:2], asked_by_agent)
    assert question == Question(
        "s1",
        1,
        1,
        "leave-1",
        QuestionKind.APPROVAL,
        "dx",
        "Bash",
        '{"command":"make"}',
        (Choice.ALLOW, Choice.DENY),
        3.0,
        is_fixed=True,
    )
    answered = QuestionAnswered(1, 1, "leave-1", QuestionKind.APPROVAL, "dx", Choice.ALLOW, 4.0)
    assert open_questions(*RECORDS[:2], asked_by_agent, answered) == ()
