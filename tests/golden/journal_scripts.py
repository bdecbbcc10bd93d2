"""Small scripted sessions: all journal content that the simulation does not write.

Only recording needs this file; a recorded journal stays unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from midstream.history.messages import (
    Entry,
    File,
    Finish,
    Outcome,
    Response,
    Step,
    Text,
    Thinking,
    ToolCall,
    ToolResult,
    ToolSpec,
    UpstreamCall,
    Usage,
    UserMessage,
)
from midstream.session import applications, driven_turn
from midstream.session import session as sessions
from midstream.session.application_request import ApplicationRequest
from midstream.session.call_references import AttemptRef, CallRef
from midstream.session.calls import CallPlan, Choice, OnDoubt, Site, digest_of
from midstream.session.model_settings import ModelSettings
from midstream.session.records import (
    ClientTool,
    Delta,
    EpochStarted,
    Parent,
    PromptHead,
    Record,
    ReuseDecision,
    TurnStatus,
    encode,
)
from midstream.session.session import Received, Session, ToolsFound
from midstream.session.turn.commands import (
    Answer,
    CallFinished,
    CallProbed,
    CallProgress,
    Cancel,
    CancelExpired,
    ChildStreamed,
    Command,
    ModelFailed,
    ModelResponded,
    ModelReuseDecided,
    ModelStreamed,
    PermissionWithdrawn,
    QuestionExpired,
    Recover,
    Resume,
    SendMessage,
    SendTranscript,
    Stalled,
    StallFinished,
    TurnExpired,
    UseAnswer,
    WhenBusy,
    Withdraw,
)
from midstream.session.turn.states import LOOK_BACK_S
from midstream.timing import StalledOn
from tests.golden.journal_adapter import read
from tests.session.turn_stories import (
    AT,
    answers,
    asks,
    at_child,
    at_client,
    at_person,
    breaks,
    ended,
    fails,
    impossible,
    needs_approval,
    overflows,
    reads,
    requests_permission,
    response_lost,
    responses,
    resumable,
    sends,
    streams,
    writes,
)

NOTHING: Mapping[str, ToolResult] = {}
WORK = digest_of("work", "{}")


class JournalScript:
    """A session that takes commands, one a second, and keeps its journal."""

    def __init__(self, *, agent: str = "", version: str = "") -> None:
        self.session = Session()
        self.journal: list[tuple[int, str]] = []
        self.at = AT
        self.epoch = 0
        self._agent = (agent, version)
        self.node()

    def node(self, *, after_s: float = 0.0, is_handover: bool = False, suspected: int = 0) -> JournalScript:
        """Begin the next epoch, and recover."""
        self.epoch += 1
        self.at += after_s
        name, version = self._agent
        begun = EpochStarted(
            self.epoch,
            f"node-{self.epoch}",
            self.at,
            is_handover=is_handover,
            agent=name,
            agent_version=version,
            suspected=suspected,
        )
        self.append(begun)
        return self.take(Recover(LOOK_BACK_S))

    def take(self, *commands: Command | Received | ToolsFound | driven_turn.DrivenCommand) -> JournalScript:
        for command in commands:
            self.at += 1.0
            if isinstance(command, driven_turn.DrivenCommand):
                self.append(*driven_turn.decide(self.session, command, epoch=self.epoch, at=self.at))
            else:
                self.append(*sessions.decide(self.session, command, epoch=self.epoch, at=self.at))
        return self

    def append(self, *records: Record) -> None:
        for record in records:
            self.journal.append((self.epoch, encode(record).decode()))
            self.session = sessions.evolve(self.session, record, epoch=self.epoch)

    def prune(self) -> JournalScript:
        """Replace the journal by its fold."""
        assert sessions.is_prunable(self.session)
        record = sessions.prune_session(self.session, at=self.at)
        self.journal = [(self.epoch, encode(record).decode())]
        self.session = sessions.restore_session(record)
        return self

    def damage_last(self) -> JournalScript:
        """Cut the last outcome in the middle, and fold again as a reader of the damaged journal does.

        Records after it were decided from the whole outcome, as on a disk that damages one block.
        """
        at = max(at for at, (_, body) in enumerate(self.journal) if '"result":' in body)
        epoch, body = self.journal[at]
        self.journal[at] = (epoch, body[: body.index('"content"') + 12])
        self.session = sessions.fold(read(self.journal))
        return self


def command(command: Command | None, seqno: int = 0, *, stream: str = "st", connection: int = 0) -> Received:
    return Received(
        stream, "digest of a secret", seqno, f"digest {stream} {seqno}", command, 60.0, connection
    )


def client_tool(name: str = "at_client", *, needs_approval: bool = False) -> ClientTool:
    spec = ToolSpec(name, "Ask the client.", {"type": "object", "properties": {"word": {"type": "string"}}})
    return ClientTool(
        spec, on_doubt=OnDoubt.RERUN, timeout_s=20.0, needs_approval=needs_approval, answer_s=30.0
    )


def _streamed() -> JournalScript:
    message = SendMessage(
        UserMessage.of("use my tool"), (client_tool(), client_tool("other", needs_approval=True))
    )
    late = CallFinished(1, 1, ToolResult("b", "after all"))
    story = JournalScript().take(
        command(message, connection=1), streams("I ", "ask"), asks(at_client("a"), at_client("b"))
    )
    story.take(command(ended("a", "from the client"), 1, connection=2))
    story.take(sessions.notice_of(story.session, "st", 3) or Withdraw())
    story.take(Cancel(), CancelExpired(1), command(late, 2, connection=3))
    story.take(
        command(sends("again"), stream="st2"), answers("fine", turn=2), command(sends("third"), stream="st3")
    )
    return story.take(command(Cancel(), 1, stream="st3"))


def _queued() -> JournalScript:
    def queue(words: str) -> SendMessage:
        return SendMessage(
            UserMessage.of(words), (client_tool(),), when_busy=WhenBusy.QUEUE, timeout_s=30.0, responses_max=2
        )

    story = JournalScript().take(
        command(sends("first")), command(queue("second"), stream="st2"), queue("third"), queue("4th")
    )
    story.take(Withdraw(2), answers("one"), asks(reads("a"), turn=2), ended("a", turn=2))
    return story.take(answers("two", turn=2, response=2), TurnExpired(3), Cancel(3)).node()


def _held_response() -> JournalScript:
    story = JournalScript().take(
        sends(), resumable(), streams("one "), breaks(), streams("two"), breaks(), response_lost()
    )
    story.take(streams("anew", attempt=2), fails(attempt=2, retry_after_s=7.0), resumable(attempt=3))
    story.node().take(streams(" on", attempt=3), answers("anew on", attempt=3))
    return story


def _failing() -> JournalScript:
    story = JournalScript().take(
        sends(), fails(), streams("half", attempt=2), fails(attempt=2), fails(attempt=3)
    )
    story.take(Resume(), streams("other", response=1), answers("done", response=story.session.turns))
    story.take(sends("no"), fails(retriable=False, turn=2), command(Resume(), stream="r"))
    return story


def _interrupted() -> JournalScript:
    story = (
        JournalScript()
        .take(sends(), streams("I was "), asks(writes("a"), reads("b")))
        .node(after_s=3 * LOOK_BACK_S)
    )
    story.take(Resume(), streams("I go on", response=2)).node(after_s=3 * LOOK_BACK_S)
    return story.take(Resume(), answers("the end", response=3))


def _suspected() -> JournalScript:
    story = JournalScript(agent="main", version="1").take(sends(), asks(writes("a")))
    for count in (1, 2, 3):
        story.node(suspected=count)
    return story.take(Resume()).node(is_handover=True)


def _compacted() -> JournalScript:
    story = JournalScript()
    for turn in (1, 2, 3):
        story.take(sends(f"message {turn}"), asks(reads("a"), turn=turn), ended("a", "x" * 20, turn=turn))
        story.take(answers("fine", turn=turn, response=2))
    story.take(sends("too long"), overflows(4, turn=4), answers("shorter", turn=4, attempt=2))
    return story.take(sends("still"), overflows(None, turn=5))


def _stalled() -> JournalScript:
    story = JournalScript().take(sends(), Stalled(1, 1, StalledOn.FIRST_TOKEN, 10.0), streams("at last"))
    story.take(StallFinished(1, 1, StalledOn.FIRST_TOKEN, 12.0), Stalled(1, 1, StalledOn.BETWEEN_TOKENS, 5.0))
    story.take(StallFinished(1, 1, StalledOn.BETWEEN_TOKENS, 6.0), asks(writes("a")))
    story.take(Stalled(1, 1, StalledOn.TOOL, 30.0, "a"), CallProgress(CallRef(1, 1, "a"), 1, "half of it"))
    return story.take(StallFinished(1, 1, StalledOn.TOOL, 31.0, "a"), ended("a"), answers("ok", response=2))


def _tools_that_come_and_go() -> JournalScript:
    story = JournalScript().take(
        sends(), ToolsFound(1, 1, 1, frozenset(("look", "write")), frozenset(("far",)))
    )
    story.take(asks(reads("a")), ended("a"), ToolsFound(1, 2, 1, frozenset(("look",))))
    return story.take(answers("ok", response=2))


def _parts() -> JournalScript:
    files = (
        Text("see"),
        File("image/png", data="iVBORw0KGgo="),
        File("application/pdf", url="https://example.com/a.pdf", name="a.pdf"),
    )
    response = Response(
        (
            Thinking("hm", "signed"),
            Thinking("", "sealed", is_redacted=True),
            Text("I look.\n"),
            ToolCall("a", "work", '{"word": "x"}', provider_id="", signature="of the call"),
            ToolCall("b", "wörk it", '{"broken": '),
        ),
        Finish.CALLS,
        "model-1",
        Usage(10, 5, 3, 2),
    )
    story = JournalScript().take(SendMessage(UserMessage(files)))
    story.take(
        ModelStreamed(
            AttemptRef(1, 1, 1), (Delta(1, 1, 1, 0, "thinking", "hm"), Delta(1, 1, 1, 2, "text", "I look.\n"))
        ),
        ModelResponded(
            AttemptRef(1, 1, 1),
            response,
            (reads("a"), impossible("b")),
            PromptHead("of the system", "of the tools"),
        ),
        CallFinished(1, 1, ToolResult("a", "the beginning", blob="0" * 64, size=70_000)),
    )
    story.take(answers("cut", response=2))
    for finish in (Finish.LENGTH, Finish.FILTER):
        turn = story.session.turns + 1
        story.take(sends(), ModelResponded(AttemptRef(turn, 1, 1), Response((Text("It is"),), finish)))
    return story


def _upstream() -> JournalScript:
    begun, done = (
        UpstreamCall("u1", "Bash", '{"command": "ls"}'),
        UpstreamCall("u1", "Bash", '{"command": "ls"}', "a.md", Outcome.OK),
    )
    story = JournalScript().take(
        sends(),
        ModelReuseDecided(AttemptRef(1, 1, 1), ReuseDecision("new", "nothing is known of it", "fresh")),
    )
    story.take(
        ModelReuseDecided(
            AttemptRef(1, 1, 1),
            ReuseDecision("extends", "it goes on", "resumed", "messages", 1, 1, 1, "phase"),
        ),
        ModelStreamed(AttemptRef(1, 1, 1), (Delta(1, 1, 1, 0, "thinking", "", begun),)),
        ModelStreamed(
            AttemptRef(1, 1, 1),
            (Delta(1, 1, 1, 0, "thinking", "", done), Delta(1, 1, 1, 1, "text", "One file.")),
        ),
        ModelResponded(AttemptRef(1, 1, 1), Response((done, Text("One file.")))),
    )
    story.take(
        sends("and now"),
        ModelReuseDecided(AttemptRef(2, 1, 1), ReuseDecision("extends", "it goes on", "resumed")),
    )
    story.take(ModelStreamed(AttemptRef(2, 1, 1), (Delta(2, 1, 1, 0, "thinking", "", begun),)), fails(turn=2))
    return story.take(ModelStreamed(AttemptRef(2, 1, 2), (Delta(2, 1, 2, 0, "text", "Half"),)), Cancel())


def _leave() -> JournalScript:
    def allowed(question_id: str, choice: Choice, arguments: str | None = None) -> Answer:
        return Answer(CallRef(1, 1, question_id), WORK, choice, "as you like", arguments, "somebody")

    story = JournalScript().take(
        sends(),
        requests_permission("q1"),
        allowed("q1", Choice.ALLOW, '{"edited": true}'),
        UseAnswer(AttemptRef(1, 1, 1), "q1"),
    )
    story.take(
        requests_permission("q2", is_fixed=True),
        allowed("q2", Choice.DENY),
        UseAnswer(AttemptRef(1, 1, 1), "q2"),
    )
    story.take(requests_permission("q3", answer_s=60.0), QuestionExpired(CallRef(1, 1, "q3")))
    story.take(
        requests_permission("q4"),
        PermissionWithdrawn(AttemptRef(1, 1, 1), "q4"),
        requests_permission("q5"),
        allowed("q5", Choice.ALLOW),
    ).node()
    story.take(requests_permission("q6", attempt=2), UseAnswer(AttemptRef(1, 1, 2), "q6"))
    return story.take(answers("done", attempt=2))


def _people() -> JournalScript:
    story = JournalScript().take(
        sends(), asks(needs_approval("a", answer_s=60.0), needs_approval("b"), at_person("c", 60.0))
    )
    story.take(
        responses("a", Choice.ALLOW, "go", arguments='{"edited": true}'),
        ended("a"),
        responses("b", Choice.DENY, "no"),
    )
    story.take(
        responses("c", Choice.RESPOND, "the left one"),
        asks(needs_approval("d", answer_s=1.0), at_person("e", 1.0), response=2),
    )
    story.take(QuestionExpired(CallRef(1, 2, "d")), QuestionExpired(CallRef(1, 2, "e")))
    return story.take(asks(needs_approval("f"), response=3)).node().node(after_s=3 * LOOK_BACK_S)


def _in_doubt() -> JournalScript:
    story = JournalScript().take(sends())
    for turn, (policy, choice) in enumerate(
        [
            (OnDoubt.UNKNOWN, None),
            (OnDoubt.RERUN, None),
            (OnDoubt.RERUN_WITH_KEY, None),
            (OnDoubt.IN_TRANSACTION, None),
            (OnDoubt.PROBE, None),
            (OnDoubt.HOLD, Choice.HAPPENED),
            (OnDoubt.HOLD, Choice.RERUN),
            (OnDoubt.HOLD, Choice.SKIP),
        ],
        1,
    ):
        story.take(asks(writes("a", policy), response=turn)).node()
        if choice is not None:
            story.take(Answer(CallRef(1, turn, "a"), WORK, choice, "said"))
        if policy is OnDoubt.PROBE:
            story.take(CallProbed(CallRef(1, turn, "a"), ToolResult("a", "it happened")))
        story.take(CallFinished(1, turn, ToolResult("a", "came back")))
    story.take(asks(writes("a", OnDoubt.PROBE), response=9)).node().take(
        CallProbed(CallRef(1, 9, "a"), may_run=True)
    )
    return story.take(ended("a", response=9), answers("the end", response=10))


def _late() -> JournalScript:
    story = JournalScript().take(sends(), asks(writes("a"))).node().take(asks(writes("b"), response=2)).node()
    story.take(asks(writes("c"), response=3), CallFinished(1, 1, ToolResult("a", "late")))
    queued = SendMessage(UserMessage.of("second"), when_busy=WhenBusy.QUEUE)
    story.take(queued, Cancel(), queued, CallProgress(CallRef(1, 3, "c"), 1, "almost"), Withdraw())
    return story.take(CallFinished(1, 2, ToolResult("b", "later")), ended("c", response=3))


def _children() -> JournalScript:
    inner = [encode(EpochStarted(1, "node", AT)), encode(Delta(1, 1, 1, 0, "text", "from below"))]
    story = JournalScript().take(sends(), asks(at_child("a")))
    story.take(
        ChildStreamed(CallRef(1, 1, "a"), "s::1.1.0", tuple(enumerate(inner, 1))),
        CallFinished(1, 1, ToolResult("a", "helped")),
    )
    return story.take(answers("ok", response=2))


def _child() -> JournalScript:
    parent = Parent("s", 1, 1, "a", ("helper",))
    task = SendMessage(UserMessage.of("Do it."), parent=parent, responses_max=1, timeout_s=60.0)
    return JournalScript().take(task, asks(reads("a")), ended("a"), answers("handed in", response=2))


def _limited() -> JournalScript:
    story = JournalScript().take(
        SendMessage(UserMessage.of("quick"), timeout_s=5.0, responses_max=3), asks(writes("a"))
    )
    story.take(TurnExpired(1), ended("a"), answers("what I have", response=2))
    story.take(SendMessage(UserMessage.of("quick"), timeout_s=5.0), asks(writes("a"), turn=2), TurnExpired(2))
    return story.take(CancelExpired(2)).node()


def _pruned() -> JournalScript:
    story = _streamed().prune()
    story.take(
        sends("after"), asks(reads("a"), turn=4), ended("a", turn=4), answers("ok", turn=4, response=2)
    )
    return story


def _pruned_in_a_turn() -> JournalScript:
    story = _compacted().take(sends("on"), asks(reads("a"), turn=6), ended("a", turn=6)).prune()
    return story.node().take(answers("ok", turn=6, response=2, attempt=2))


def _damaged() -> JournalScript:
    story = (
        JournalScript()
        .take(sends(), asks(writes("a"), writes("b")), ended("a", "what is lost"))
        .damage_last()
    )
    return story.take(ended("b"), answers("ok", response=2))


def _damaged_late() -> JournalScript:
    story = (
        JournalScript()
        .take(sends(), asks(writes("a")))
        .node()
        .take(CallFinished(1, 1, ToolResult("a", "too late")))
    )
    return story.damage_last().take(answers("ok", response=2))


def _driven() -> JournalScript:
    sent_messages = Response((ToolCall("a", "work"), ToolCall("b", "work")), Finish.CALLS)
    story = JournalScript().take(
        driven_turn.Begin(UserMessage.of("go"), "pydantic-ai", "key", "digest"),
        driven_turn.RequestModelResponse(1, NOTHING),
    )
    story.take(
        driven_turn.AddOutput((Delta(1, 1, 1, 0, "text", "o"),)),
        driven_turn.AttemptLost("model_failed", "HTTP"),
    )
    story.take(
        driven_turn.RequestModelResponse(1, NOTHING),
        driven_turn.Responded(sent_messages, native='{"kind": "response"}'),
        driven_turn.BeginCall("a"),
    )
    story.take(
        driven_turn.Ended(ToolResult("a", "done"), native='{"kind": "result"}'), driven_turn.BeginCall("b")
    ).node()
    story.take(
        driven_turn.BeginCall("b", is_approved=True),
        driven_turn.Ended(ToolResult("b", "done")),
        driven_turn.RequestModelResponse(2, NOTHING),
    )
    story.take(
        driven_turn.Responded(Response((Text("ok"),))), driven_turn.EndTurn(TurnStatus.COMPLETED, NOTHING)
    )
    story.take(
        driven_turn.Begin(UserMessage.of("go"), "pydantic-ai"),
        driven_turn.RequestModelResponse(1, NOTHING),
        driven_turn.Responded(sent_messages),
        driven_turn.BeginCall("a"),
    )
    return story.take(Cancel())


def _resend(
    story: JournalScript, *entries: Entry, tools: bool = True, results: tuple[ToolResult, ...] = ()
) -> SendTranscript:
    """Let a client application resend its whole conversation; the part that the session has is kept."""
    application = story.session.application
    compared = applications.compare(
        applications.EntryChain().then(story.session.history),
        story.session.turn,
        applications.Beginning(),
        entries,
    )
    assert compared.results == results
    number = application.count + 1
    request = ApplicationRequest(
        f"resp_{number}",
        f"{number:032x}",
        "key" if number == 1 else "",
        "h:app",
        ModelSettings(
            temperature=0.5, stop=("END",), response_format={"type": "json_object"}, forced_tool="look"
        ),
        is_ephemeral=number == 2,
        is_background=number == 3,
        form={"dialect": "responses"},
        input=[{"role": "user", "content": "hi"}],
    )
    spec = (ToolSpec("look", "Look.", {"type": "object"}),) if tools else ()
    return SendTranscript(
        request, application.count, compared.keep, compared.tail, "Be brief.", spec, compared.results
    )


def _application() -> JournalScript:
    """Let a client application call a tool of its own, send the result, edit, be cut, and branch."""
    story, hi = JournalScript(agent="claude", version="2"), UserMessage.of("hi")
    story.take(_resend(story, hi))
    place, look = (1, 1, 1), ToolCall("a", "look", "{}", signature="signed")
    announced = (
        Delta(*place, 0, "thinking", "", signature="of the thought"),
        Delta(*place, 1, "text", "I look."),
        Delta(*place, 2, "thinking", "", requested=look),
    )
    story.take(ModelStreamed(AttemptRef(*place), (Delta(*place, 0, "thinking", "hm"), *announced)))
    sent_messages = Response((Thinking("hm", "of the thought"), Text("I look."), look), Finish.CALLS)
    plan = CallPlan("a", digest_of("look", "{}"), Site.CLIENT, has_effects=False)
    story.take(ModelResponded(AttemptRef(*place), sent_messages, (plan,))).node()
    seen = Step(Response((Text("I look."), look)), (ToolResult("a", "a tree"),))
    story.take(_resend(story, hi, seen, results=seen.results))
    story.take(ModelResponded(AttemptRef(1, 2, 1), Response((Text("A tree."),))))
    text = (hi, seen, Step(Response((Text("A tree."),))))
    story.take(_resend(story, *text, UserMessage.of("more")))
    story.take(ModelStreamed(AttemptRef(2, 1, 1), (Delta(2, 1, 1, 0, "text", "half"),))).node(after_s=1.0)
    story.take(
        ModelFailed(
            AttemptRef(2, 2, 1), "model_unavailable", "slow down", is_retriable=True, retry_after_s=7.0
        )
    )
    story.take(_resend(story, hi, UserMessage.of("edited"), tools=False))
    story.take(ModelResponded(AttemptRef(3, 1, 1), sent_messages, (plan,)))
    story.take(_resend(story, UserMessage.of("elsewhere")))
    other = Step(Response((Text("never said"),)))
    return story.take(_resend(story, UserMessage.of("elsewhere"), other, UserMessage.of("twice")))


SCRIPTS: dict[str, Callable[[], JournalScript]] = {
    each.__name__.removeprefix("_"): each
    for each in (
        _streamed,
        _queued,
        _held_response,
        _failing,
        _interrupted,
        _suspected,
        _compacted,
        _stalled,
        _tools_that_come_and_go,
        _parts,
        _upstream,
        _leave,
        _people,
        _in_doubt,
        _late,
        _children,
        _child,
        _limited,
        _pruned,
        _pruned_in_a_turn,
        _damaged,
        _damaged_late,
        _driven,
        _application,
    )
}
