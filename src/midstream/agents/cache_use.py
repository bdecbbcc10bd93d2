"""Cache use of a session's turns, at their provider or in an upstream's memory, and reasons for misses.

It is read from the journal. Of a turn that a pool answered it has the pool's own judgement; of any other it is found
out here how each request stood to the one before.

The journal has the tokens that the provider counted, the model, the moment, digests of the system prompt and of the
tools, and every change of what is shown. It does not have the bytes that were sent: why a prompt has another digest,
and what a proxy or an SDK made of a request, is for `first_difference` of two recorded requests.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from msgspec import Struct

from midstream.session.records import (
    AttemptStarted,
    HistoryCompacted,
    PromptHead,
    Record,
    ResponseCompleted,
    ReuseDecided,
    ReuseDecision,
)

TOKENS_MIN = 1024
"""Tokens of a prompt from which providers keep it at all; some models need up to four times as many."""
KEPT_S = 300.0
"""Seconds that most providers keep what is not read."""


class Prefix(StrEnum):
    """How a request stood to the one before it."""

    NEW = "new"
    """There was none."""
    CONTINUATION = "continuation"
    """It began with all of the one before."""
    DIVERGENCE = "divergence"
    """Something in its beginning was another."""


class ModelCall(Struct, frozen=True, omit_defaults=True):
    """One response, and what its request cost. Tokens are the provider's count; -1 where it gave none.

    Args:
        turn, response: Which response it is.
        at: When it was complete, in seconds since 1970.
        kind: How its request stood to the one before.
        reason: What it was that differed; of a continuation, why nothing of it may have come from the cache.
        model: Who answered, as it names itself.
        input_tokens: What was read, from the cache or not.
        cached_tokens: What of it came from the cache.
    """

    turn: int
    response: int
    at: float
    kind: Prefix
    reason: str = ""
    model: str = ""
    input_tokens: int = -1
    cached_tokens: int = -1

    @property
    def uncached_tokens(self) -> int:
        """Tokens that were not read from the cache; -1 where that is unknown."""
        return -1 if self.input_tokens < 0 else max(self.input_tokens - max(self.cached_tokens, 0), 0)


class TurnCost(Struct, frozen=True, omit_defaults=True):
    """One turn, and what it cost. Tokens are those of all its responses; -1 where they were not counted.

    Args:
        kind: How it stood to what was there before: the pool's judgement (docs/spec/reuse.md) where there was one, or
            that of the first of its model calls that diverged, or of its first.
        reason: What was decisive.
        way: How the pool's agent was got; "" where there was no pool.
        calls: Its whole responses.
        judgements: All that a pool judged in it, in order: several where agents failed, or a response had calls.
    """

    turn: int
    at: float
    kind: str
    reason: str = ""
    way: str = ""
    input_tokens: int = -1
    cached_tokens: int = -1
    calls: tuple[ModelCall, ...] = ()
    judgements: tuple[ReuseDecision, ...] = ()

    @property
    def uncached_tokens(self) -> int:
        """Tokens that were not read from the cache; -1 where that is unknown."""
        return -1 if self.input_tokens < 0 else max(self.input_tokens - max(self.cached_tokens, 0), 0)


def turn_costs(records: Iterable[Record]) -> list[TurnCost]:
    """Return what the turns of a journal cost, in order; those of which nothing is known are left out."""
    reading = _Reading()
    calls: dict[int, list[ModelCall]] = {}
    judgements: dict[int, list[ReuseDecision]] = {}
    at: dict[int, float] = {}
    for record in records:
        call = reading.take(record)
        if call is not None:
            calls.setdefault(call.turn, []).append(call)
            at[call.turn] = call.at
        elif isinstance(record, ReuseDecided):
            judgements.setdefault(record.turn, []).append(record.judgement)
            at.setdefault(record.turn, record.at)
    return [_cost(turn, at[turn], calls.get(turn, []), judgements.get(turn, [])) for turn in sorted(at)]


def _cost(turn: int, at: float, calls: list[ModelCall], judgements: list[ReuseDecision]) -> TurnCost:
    counted = [call for call in calls if call.input_tokens >= 0]
    read = sum(call.input_tokens for call in counted) if counted else -1
    cached = sum(max(call.cached_tokens, 0) for call in counted) if counted else -1
    kind, reason, way = _of_pool(judgements) if judgements else _of_calls(calls, cached)
    return TurnCost(turn, at, kind, reason, way, read, cached, tuple(calls), tuple(judgements))


def _of_pool(judgements: list[ReuseDecision]) -> tuple[str, str, str]:
    """Return the first decision and its result: a fresh agent may have needed the whole transcript."""
    first, last = judgements[0], judgements[-1]
    rebuilt = next((each.rebuilt for each in judgements if each.rebuilt), "")
    reason = f"rebuilt ({rebuilt})" if rebuilt else first.why
    return first.kind, reason, last.way


def _of_calls(calls: list[ModelCall], cached: int) -> tuple[str, str, str]:
    first = next((call for call in calls if call.kind is Prefix.DIVERGENCE), calls[0])
    is_warm = first.kind is Prefix.CONTINUATION and cached > 0
    return first.kind.value, "" if is_warm else first.reason, ""


class _Reading:
    """Facts known of the last request that the next one should begin with."""

    def __init__(self) -> None:
        self._is_begun = False
        self._is_last = False
        self._is_compacted = False
        self._model = ""
        self._prompt: PromptHead | None = None
        self._at = 0.0

    def take(self, record: Record) -> ModelCall | None:
        match record:
            case AttemptStarted():
                self._is_last = record.is_last
            case HistoryCompacted():
                self._is_compacted = True
            case ResponseCompleted():
                return self._add_response(record)
            case _:
                pass
        return None

    def _add_response(self, record: ResponseCompleted) -> ModelCall:
        kind, reason = self._judge(record)
        body = record.body
        used = body.usage
        call = ModelCall(
            record.turn,
            record.response,
            record.at,
            kind,
            reason,
            body.model,
            -1 if used is None else used.input_tokens,
            -1 if used is None else used.cached_tokens,
        )
        if not self._is_last:  # a hand-in is requested without tools, and no turn goes on from it
            self._prompt = record.prompt or self._prompt
            self._is_compacted = False
        self._is_begun, self._at = True, record.at
        self._model = body.model or self._model
        return call

    def _judge(self, record: ResponseCompleted) -> tuple[Prefix, str]:
        if not self._is_begun:
            return Prefix.NEW, "first request"
        changed = self._find_change(record)
        if changed:
            return Prefix.DIVERGENCE, changed
        used = record.body.usage
        if used is None:
            return Prefix.CONTINUATION, "no usage was counted"
        if used.cached_tokens:
            return Prefix.CONTINUATION, ""
        if used.input_tokens < TOKENS_MIN:
            return Prefix.CONTINUATION, f"below {TOKENS_MIN} tokens"
        idle_s = record.at - self._at
        if idle_s > KEPT_S:
            return Prefix.CONTINUATION, f"{idle_s / 60:.0f} min idle: no longer kept"
        return Prefix.CONTINUATION, "unknown: compare requests"

    def _find_change(self, record: ResponseCompleted) -> str:
        """Return the difference at the beginning of this request; "" where none is known."""
        if self._model and record.body.model and record.body.model != self._model:
            return "another model"
        if self._is_last:
            return "asked to hand in"
        before, now = self._prompt, record.prompt
        if before is not None and now is not None:
            if before.tools != now.tools:
                return "the tools changed"
            if before.system != now.system:
                return "the system prompt changed"
        return "the older part is left out" if self._is_compacted else ""
