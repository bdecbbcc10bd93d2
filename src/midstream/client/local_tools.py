"""Tools that run at the client: the calls of one stream, judged by its own journal.

The life of a call is the server's (`core/calls.py`), and so is the judgement. This object does no I/O: `take` a
record, keep `writes()` (with the stream's own, in one transaction), then run `to_start()`. A call whose intent an
earlier process kept, and no outcome, is in doubt: its tool's policy decides. One with an outcome is never run
again: the chunk that carries it is played back by the stream.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec import Struct
from msgspec.structs import replace

from midstream.client.checkpoint import (
    CallAnswered,
    CallAsked,
    CallIntended,
    CallNoted,
    CallWrite,
    KeptCall,
)
from midstream.core.calls import UNKNOWN_CONTENT, CallState, OnDoubt, Site, Verdict, judge
from midstream.core.frames import FRAME_BYTES_MAX, ResultPayload, encode
from midstream.core.messages import Call, Outcome, Result
from midstream.core.records import CallEnded, CallStarted, ClientTool, Record, ReplyCompleted
from midstream.errors import ToolDefinitionError
from midstream.tools import CallContext, Tool, run_call

RESULT_BYTES_MAX = FRAME_BYTES_MAX - 4096
"""Of a result's payload, so that its chunk fits a frame."""

Place = tuple[int, int, str]
"""Turn, reply, call id: what names a call."""


class Start(Struct, frozen=True):
    """Run this call now: its intent is kept."""

    place: Place
    call: Call
    run: int


class LocalTools:
    """The client's calls in one stream.

    Args:
        session: The session, for the tools to know.
        tools: By name.
        epoch: From `CheckpointFile.start_epoch`: calls that older ones started and did not end are in doubt.
        kept: What the checkpoint holds of this stream's calls.
    """

    def __init__(
        self, session: str, tools: Mapping[str, Tool], *, epoch: int, kept: Iterable[KeptCall] = ()
    ) -> None:
        self._session = session
        self._tools = tools
        self._epoch = epoch
        self._calls: dict[Place, CallState] = {}
        self._writes: list[CallWrite] = []
        self._answers: list[ResultPayload] = []
        self._starts: list[Start] = []
        self._stops: list[Place] = []
        for call in kept:
            place = (call.turn, call.reply, call.state.call.id)
            self._calls[place] = call.state
            if call.is_asked:
                self._consider(place)

    # --- outlets ------------------------------------------------------------------------------------------------

    def writes(self) -> list[CallWrite]:
        """Return what to keep before anything else is done."""
        writes, self._writes = self._writes, []
        return writes

    def answers(self) -> list[ResultPayload]:
        """Return the outcomes to submit, each in the transaction of its `CallAnswered`."""
        answers, self._answers = self._answers, []
        return answers

    def to_start(self) -> list[Start]:
        """Return the calls to run now. Do `writes()` first."""
        starts, self._starts = self._starts, []
        return starts

    def to_stop(self) -> list[Place]:
        """Return the calls whose outcome nobody waits for any more."""
        stops, self._stops = self._stops, []
        return stops

    # --- inlets -------------------------------------------------------------------------------------------------

    def take(self, record: Record) -> None:
        """Take a record of the stream's turn."""
        match record:
            case ReplyCompleted():
                self._note(record)
            case CallStarted(turn=turn, reply=reply, call_id=call_id) if (
                place := (turn, reply, call_id)
            ) in self._calls:
                self._writes.append(CallAsked(*place))
                self._consider(place)
            case CallEnded(turn=turn, reply=reply, result=result) if (
                place := (turn, reply, result.call_id)
            ) in self._calls:
                # The server's word is final: ours, or its own where the turn was stopped or we were late.
                self._calls[place] = replace(self._calls[place], result=result)
                self._stops.append(place)
            case _:
                pass

    def ended(self, place: Place, result: Result) -> None:
        """A call was run; `result` is its one outcome."""
        call = self._calls[place]
        if call.result is None:
            self._answer(place, result)

    async def run(self, start: Start) -> Result:
        """Run a call with its tool, within the tool's timeout. Never raises but for cancellation."""
        found = self._tools.get(start.call.name)
        if found is None:
            known = ", ".join(sorted(self._tools)) or "none"
            message = f"This client has no tool named {start.call.name!r} any more. Known tools: {known}."
            return Result(start.call.id, message, Outcome.ERROR)
        turn, reply, call_id = start.place
        return await run_call(found, start.call, CallContext(self._session, turn, reply, call_id, start.run))

    # --- judgement ----------------------------------------------------------------------------------------------

    def _note(self, record: ReplyCompleted) -> None:
        plans = {plan.call_id: plan for plan in record.plans}
        for call in record.body.calls:
            plan = plans[call.id]
            place = (record.turn, record.reply, call.id)
            known = self._calls.get(place)
            is_ours = plan.site is Site.CLIENT and plan.problem is None
            # After a power cut of the server the same place may hold another call.
            if is_ours and (known is None or known.plan.digest != plan.digest):
                self._calls[place] = CallState(call, plan)
                self._writes.append(CallNoted(record.turn, record.reply, call, plan))

    def _consider(self, place: Place) -> None:
        call = self._calls[place]
        # Seen from here the call's site is this one: the rule is the server's for its own.
        here = replace(call, plan=replace(call.plan, site=Site.SERVER))
        match judge(here, epoch=self._epoch):
            case Verdict.START | Verdict.RERUN:
                run = call.runs + 1
                self._calls[place] = replace(call, runs=run, epoch=self._epoch)
                self._writes.append(CallIntended(*place, run, self._epoch))
                self._starts.append(Start(place, call.call, run))
            case Verdict.GIVE_UP | Verdict.PROBE | Verdict.ASK:  # nobody can be asked from here
                self._answer(place, Result(call.call.id, UNKNOWN_CONTENT, Outcome.UNKNOWN))
            case Verdict.LEAVE | Verdict.DONE:
                pass

    def _answer(self, place: Place, result: Result) -> None:
        turn, reply, _ = place
        fitting = _shortened(ResultPayload(turn, reply, result))
        self._calls[place] = replace(self._calls[place], result=fitting.result)
        self._writes.append(CallAnswered(turn, reply, fitting.result))
        self._answers.append(fitting)


def offered(tools: Iterable[Tool]) -> tuple[ClientTool, ...]:
    """Return what the server is told of this client's tools.

    Raises:
        ToolDefinitionError: One is to write in the transactions of the session's store, which is not here.
    """
    tools = [*tools]
    for tool in tools:
        if tool.on_doubt is OnDoubt.IN_TRANSACTION:
            raise ToolDefinitionError(
                f"{tool.name!r} runs at a client, where no transaction of its outcome is"
            )
    return tuple(ClientTool(tool.spec, tool.has_effects, tool.on_doubt, tool.timeout_s) for tool in tools)


def _shortened(payload: ResultPayload) -> ResultPayload:
    """Cut a result until its payload fits a frame, with a mark that says by how much."""
    content = payload.result.content
    kept = content
    while len(encode(payload)) > RESULT_BYTES_MAX:
        kept = kept[: len(kept) // 2]
        marked = f"{kept}\n[+{len(content) - len(kept)} characters]"
        payload = replace(payload, result=replace(payload.result, content=marked))
    return payload
