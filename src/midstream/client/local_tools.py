"""Tools that run at the client: the calls of one stream, with their state in the checkpoint.

The states and rules are those of the server (`session/calls.py`, `session/rerun_policy.py`). The object does no I/O:
`take` a record, store `writes()` (with the stream's changes, in one transaction), then run `to_start()`. A call with a
stored intent of an earlier process, but no outcome, is in doubt: the policy of its tool decides. A call with an outcome
never runs again; the stream resends its command.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import assert_never

from msgspec import Struct
from msgspec.structs import replace

from midstream.client.checkpoint_file import (
    DAMAGED_DIGEST,
    CallAnswered,
    CallAsked,
    CallIntended,
    CallNoted,
    CallWrite,
    KeptCall,
    Place,
)
from midstream.errors import ToolDefinitionError
from midstream.history.messages import Outcome, ToolCall, ToolResult
from midstream.protocol.frames import FRAME_BYTES_MAX, ResultPayload, encode
from midstream.session.calls import UNKNOWN_CONTENT, CallState, OnDoubt, Site
from midstream.session.records import CallEnded, CallStarted, ClientTool, Record, ResponseCompleted
from midstream.session.rerun_policy import RERUNS_MAX, CallVerdict, judge
from midstream.tools.function_tools import CallContext, Tool, probe_call, run_call

RESULT_BYTES_MAX = FRAME_BYTES_MAX - 4096
"""Greatest size of a result's payload, so that its command fits into a frame."""
ALLOWED_ONCE_CONTENT = (
    "It did not happen: the program that was to do it ended before. The permission for it is used up; call it again if "
    "it is still wanted."
)


class StartLocally(Struct, frozen=True):
    """A call to run now, whose intent is stored; with `is_probe`, probe first whether it took effect."""

    place: Place
    call: ToolCall
    run: int
    is_probe: bool = False


class LocalTools:
    """The client's calls in one stream.

    Args:
        epoch: From `CheckpointFile.start_epoch`; open calls of older epochs are in doubt.
        kept: The stored calls of the stream.
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
        self._starts: list[StartLocally] = []
        self._stops: list[Place] = []
        for call in kept:
            place = (call.turn, call.response, call.state.call.id)
            self._calls[place] = call.state
            if call.is_asked:
                self._consider(place)

    # --- outlets ------------------------------------------------------------------------------------------------

    def writes(self) -> list[CallWrite]:
        """Return the changes to store before any other action."""
        writes, self._writes = self._writes, []
        return writes

    def answers(self) -> list[ResultPayload]:
        """Return the outcomes to submit, each stored in one transaction with its `CallAnswered`."""
        answers, self._answers = self._answers, []
        return answers

    def to_start(self) -> list[StartLocally]:
        """Return the calls to run now, after `writes()` were stored."""
        starts, self._starts = self._starts, []
        return starts

    def to_stop(self) -> list[Place]:
        """Return the running calls whose outcome is no longer needed."""
        stops, self._stops = self._stops, []
        return stops

    # --- inlets -------------------------------------------------------------------------------------------------

    def take(self, record: Record) -> None:
        """Handle a record of the stream's turn."""
        match record:
            case ResponseCompleted():
                self._note(record)
            case CallStarted(turn=turn, response=response, call_id=call_id, arguments=arguments) if (
                place := (turn, response, call_id)
            ) in self._calls:
                if arguments is not None:
                    self._edit(place, arguments)
                self._writes.append(CallAsked(*place))
                self._consider(place)
            case CallEnded(turn=turn, response=response, result=result) if (
                place := (turn, response, result.call_id)
            ) in self._calls:
                # The server's record is final. It may differ from this client's outcome after a stop or a timeout.
                self._calls[place] = replace(self._calls[place], result=result)
                self._stops.append(place)
            case _:
                pass

    def note_end(self, place: Place, result: ToolResult | None) -> None:
        """Handle the end of a run or a probe; `result` is the outcome, None if the call did not take effect."""
        call = self._calls[place]
        if call.result is not None:
            return
        # TURN-35: only the server can request another approval.
        if result is None and call.plan.needs_approval:
            self._answer(place, ToolResult(call.call.id, ALLOWED_ONCE_CONTENT, Outcome.ERROR))
        elif result is None and call.runs <= RERUNS_MAX:
            self._run(place)
        else:
            self._answer(place, result or ToolResult(call.call.id, UNKNOWN_CONTENT, Outcome.UNKNOWN))

    async def run(self, start: StartLocally) -> ToolResult | None:
        """Run the tool, or its probe, within the tool's timeout. It raises only `CancelledError`."""
        found = self._tools.get(start.call.name)
        turn, response, call_id = start.place
        context = CallContext(self._session, turn, response, call_id, start.run)
        if found is None and start.is_probe:
            return ToolResult(start.call.id, UNKNOWN_CONTENT, Outcome.UNKNOWN)
        if found is None:
            known = ", ".join(sorted(self._tools)) or "none"
            message = f"This client has no tool named {start.call.name!r} any more. Known tools: {known}."
            return ToolResult(start.call.id, message, Outcome.ERROR)
        if not start.is_probe:
            return await run_call(found, start.call, context)
        result, may_run = await probe_call(found, start.call, context)
        unknown = ToolResult(start.call.id, UNKNOWN_CONTENT, Outcome.UNKNOWN)
        return None if may_run else result or unknown

    # --- decisions ----------------------------------------------------------------------------------------------

    def _note(self, record: ResponseCompleted) -> None:
        plans = {plan.call_id: plan for plan in record.plans}
        for call in record.body.calls:
            plan = plans[call.id]
            place = (record.turn, record.response, call.id)
            known = self._calls.get(place)
            is_ours = plan.site is Site.CLIENT and plan.problem is None
            # After a power failure of the server, the same place may have another call.
            is_new = known is None or known.plan.digest not in (plan.digest, DAMAGED_DIGEST)
            if is_ours and is_new:
                self._calls[place] = CallState(call, plan)
                self._writes.append(CallNoted(record.turn, record.response, call, plan))

    def _consider(self, place: Place) -> None:
        call = self._calls[place]
        # The rule is that of the server for its own calls, so the call's site is set to the server.
        here = replace(call, plan=replace(call.plan, site=Site.SERVER))
        match judge(here, epoch=self._epoch):
            case CallVerdict.START | CallVerdict.RERUN:
                self._run(place)
            case CallVerdict.PROBE:
                self._calls[place] = replace(call, is_in_doubt=True)
                self._starts.append(StartLocally(place, call.call, call.runs, is_probe=True))
            case CallVerdict.GIVE_UP | CallVerdict.ASK:
                # Only the server can ask a person, about its own calls: here, `hold` means that the outcome is unknown.
                self._answer(place, ToolResult(call.call.id, UNKNOWN_CONTENT, Outcome.UNKNOWN))
            case CallVerdict.LEAVE | CallVerdict.DONE:
                pass
            case never:
                assert_never(never)

    def _run(self, place: Place) -> None:
        call = self._calls[place]
        run = call.runs + 1
        self._calls[place] = replace(call, runs=run, epoch=self._epoch, is_in_doubt=False)
        self._writes.append(CallIntended(*place, run, self._epoch))
        self._starts.append(StartLocally(place, call.call, run))

    def _edit(self, place: Place, arguments: str) -> None:
        """Replace the model's arguments by those of a person; the plan does not change."""
        state = self._calls[place]
        if state.runs or state.call.arguments == arguments:
            return  # a repeated record
        call = replace(state.call, arguments=arguments)
        self._calls[place] = replace(state, call=call)
        self._writes.append(CallNoted(place[0], place[1], call, state.plan))

    def _answer(self, place: Place, result: ToolResult) -> None:
        turn, response, _ = place
        fitting = _shorten(ResultPayload(turn, response, result))
        self._calls[place] = replace(self._calls[place], result=fitting.result)
        self._writes.append(CallAnswered(turn, response, fitting.result))
        self._answers.append(fitting)


def declare(tools: Iterable[Tool]) -> tuple[ClientTool, ...]:
    """Return the declaration of this client's tools for the server.

    A function as `needs_approval` cannot be sent: every call of such a tool needs an approval.
    """
    return tuple(
        ClientTool(
            each.spec,
            each.has_effects,
            each.on_doubt,
            each.timeout_s,
            each.needs_approval is not False,
            each.answer_s,
            each.approvers,
        )
        for each in tools
    )


def refuse_foreign(tools: Iterable[Tool]) -> None:
    """Refuse tools that only a server can have.

    Raises:
        ToolDefinitionError: A tool's calls are answered at the server, or it writes in transactions of the store.
    """
    for each in tools:
        if each.site is not Site.SERVER:
            raise ToolDefinitionError(
                f"the tool {each.name!r} belongs to an agent at the server, not to a client"
            )
        if each.on_doubt is OnDoubt.IN_TRANSACTION:
            raise ToolDefinitionError(
                f"{each.name!r} runs at a client, but its policy needs the transaction of the outcome at the server"
            )


def _shorten(payload: ResultPayload) -> ResultPayload:
    """Shorten a result to the size limit, with a note about the missing part."""
    content = payload.result.content
    kept = content
    while len(encode(payload)) > RESULT_BYTES_MAX:
        kept = kept[: len(kept) // 2]
        marked = f"{kept}\n[+{len(content) - len(kept)} characters]"
        payload = replace(payload, result=replace(payload.result, content=marked))
    return payload
