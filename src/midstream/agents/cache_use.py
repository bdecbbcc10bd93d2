"""Cache use of a session's turns, at their provider or in an upstream's memory, and reasons for misses.

The journal is the source. For a turn of a pool, it has the pool's classification. For any other turn, each request is
compared here with the previous one.

The journal has the provider's token counts, the model, the time, digests of the system prompt and of the tools, and
every change of the visible history. It does not have the sent bytes. To find the reason for another digest, or changes
by a proxy or an SDK, use `first_difference` with two recorded requests.
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
"""Tokens below which providers do not cache a prompt; some models need up to four times as many."""
KEPT_S = 300.0
"""Seconds after which most providers drop an unread cache entry."""


class Prefix(StrEnum):
    """Relation of a request to the previous one."""

    NEW = "new"
    """There was no previous request."""
    CONTINUATION = "continuation"
    """It began with the whole previous request."""
    DIVERGENCE = "divergence"
    """It differed at its beginning."""


class ModelCall(Struct, frozen=True, omit_defaults=True):
    """One response and the cost of its request. Tokens are the provider's count; -1 if it gave none.

    Args:
        turn, response: The numbers of the response.
        at: Its time of completion, in seconds since 1970.
        kind: Relation of its request to the previous one.
        reason: The difference; for a continuation, the reason why the cache may not have been used.
        model: The model's name, as it reports it.
        input_tokens: All input tokens, from the cache or not.
        cached_tokens: The part from the cache.
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
        """Input tokens that were not from the cache; -1 if unknown."""
        return -1 if self.input_tokens < 0 else max(self.input_tokens - max(self.cached_tokens, 0), 0)


class TurnCost(Struct, frozen=True, omit_defaults=True):
    """One turn and its cost. Tokens are those of all its responses; -1 if they were not counted.

    Args:
        kind: The pool's classification (docs/spec/reuse.md) if there is one; else the relation of its first diverging
            model call, or of its first one.
        reason: The reason for `kind`.
        way: Origin of the pool's agent; "" without a pool.
        calls: Its complete responses.
        judgements: All classifications by a pool, in order: several if agents failed, or a response had calls.
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
        """Input tokens that were not from the cache; -1 if unknown."""
        return -1 if self.input_tokens < 0 else max(self.input_tokens - max(self.cached_tokens, 0), 0)


def turn_costs(records: Iterable[Record]) -> list[TurnCost]:
    """Return the costs of a journal's turns, in order, without those of unknown cost."""
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
    """Return the first classification and its result: a fresh agent may have needed the whole transcript."""
    first, last = judgements[0], judgements[-1]
    rebuilt = next((each.rebuilt for each in judgements if each.rebuilt), "")
    reason = f"rebuilt ({rebuilt})" if rebuilt else first.why
    return first.kind, reason, last.way


def _of_calls(calls: list[ModelCall], cached: int) -> tuple[str, str, str]:
    first = next((call for call in calls if call.kind is Prefix.DIVERGENCE), calls[0])
    is_warm = first.kind is Prefix.CONTINUATION and cached > 0
    return first.kind.value, "" if is_warm else first.reason, ""


class _Reading:
    """State of the last request, with which the next one should begin."""

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
        if not self._is_last:  # a hand-in is requested without tools, and no turn continues from it
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
        """Return the difference at the beginning of this request; "" if none is known."""
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
