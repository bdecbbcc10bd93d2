"""The analysis of the provider's cache use by a session's model calls, from the journal."""

from __future__ import annotations

from msgspec.structs import replace

from midstream.agents.cache_use import (
    KEPT_S,
    TOKENS_MIN,
    ModelCall,
    Prefix,
    TurnCost,
    turn_costs,
)
from midstream.history.messages import Response, Text, Usage
from midstream.session.records import (
    AttemptStarted,
    Delta,
    HistoryCompacted,
    PromptHead,
    Record,
    ResponseCompleted,
    ReuseDecided,
    ReuseDecision,
)
from tests.spec import spec

HEAD = PromptHead("system", "tools")


def response_record(
    number: int,
    cached: int = 0,
    *,
    at: float = 0.0,
    tokens: int = 5000,
    model: str = "m-1",
    prompt: PromptHead | None = HEAD,
) -> ResponseCompleted:
    body = Response((Text("hi"),), model=model, usage=Usage(tokens, 10, cached))
    return ResponseCompleted(1, number, 1, body, at or float(number), prompt=prompt)


def model_calls(records: list[Record]) -> list[ModelCall]:
    return [call for turn in turn_costs(records) for call in turn.calls]


def prefixes_of(*records: Record) -> list[tuple[Prefix, str]]:
    return [(call.kind, call.reason) for call in model_calls([*records])]


@spec("REUSE-65")
def test_each_call_has_its_kind_reason_and_tokens() -> None:
    calls = model_calls(
        [response_record(1), Delta(1, 2, 1, 0, "text", "h"), response_record(2, 4900, tokens=5100)]
    )

    assert calls == [
        ModelCall(1, 1, 1.0, Prefix.NEW, "first request", "m-1", 5000, 0),
        ModelCall(1, 2, 2.0, Prefix.CONTINUATION, "", "m-1", 5100, 4900),
    ]
    assert [call.uncached_tokens for call in calls] == [5000, 200]


@spec("REUSE-65")
def test_the_first_difference_of_the_prefix_is_named() -> None:
    assert prefixes_of(
        response_record(1),
        response_record(2, model="m-2"),
        response_record(3, model="m-2", prompt=PromptHead("system", "others")),
        response_record(4, model="m-2", prompt=PromptHead("another", "others")),
        HistoryCompacted(1, 5, 2, 4.0),
        response_record(5, model="m-2", prompt=PromptHead("another", "others")),
        response_record(6, 4000, model="m-2", prompt=PromptHead("another", "others")),
    )[1:] == [
        (Prefix.DIVERGENCE, "another model"),
        (Prefix.DIVERGENCE, "the tools changed"),
        (Prefix.DIVERGENCE, "the system prompt changed"),
        (Prefix.DIVERGENCE, "the older part is left out"),
        (Prefix.CONTINUATION, ""),
    ]


@spec("REUSE-65")
def test_a_continuation_without_cached_tokens_has_possible_reasons() -> None:
    assert prefixes_of(
        response_record(1),
        response_record(2, tokens=TOKENS_MIN - 1),
        response_record(3, at=2.0 + KEPT_S + 301.0),
        response_record(4, at=3.0 + KEPT_S + 302.0),
    )[1:] == [
        (Prefix.CONTINUATION, f"below {TOKENS_MIN} tokens"),
        (Prefix.CONTINUATION, "10 min idle: no longer kept"),
        (Prefix.CONTINUATION, "unknown: compare requests"),
    ]


def test_the_request_after_a_hand_in_does_not_continue_it() -> None:
    assert prefixes_of(
        response_record(1),
        AttemptStarted(1, 2, 1, 2.0, is_last=True),
        response_record(2, prompt=PromptHead("system", "none")),
        AttemptStarted(2, 1, 1, 3.0),
        response_record(3, 4000),
    )[1:] == [(Prefix.DIVERGENCE, "asked to hand in"), (Prefix.CONTINUATION, "")]


def test_without_usage_and_digests_there_is_no_verdict() -> None:
    silent = ResponseCompleted(1, 2, 1, Response((Text("hi"),)), 2.0)
    (_, call) = model_calls([response_record(1), silent])

    assert (call.kind, call.reason) == (Prefix.CONTINUATION, "no usage was counted")
    assert (call.input_tokens, call.cached_tokens, call.uncached_tokens) == (-1, -1, -1)
    assert prefixes_of(response_record(1), silent, response_record(3, 10, prompt=PromptHead("new", "tools")))[
        2
    ] == (
        Prefix.DIVERGENCE,
        "the system prompt changed",
    )


NEW = ReuseDecision("new", "no record", "fresh", "record", new=1)
KNOWN = ReuseDecision("continuation", "one user message is new", "resumed", "users", 1, 1, 1)


def in_turn(response: ResponseCompleted, turn: int) -> ResponseCompleted:
    return replace(response, turn=turn)


@spec("REUSE-65")
def test_a_turn_is_one_row_with_the_tokens_of_all_its_responses() -> None:
    first, second, third = (
        in_turn(response_record(1), 1),
        in_turn(response_record(2, 4900, at=9.0), 1),
        in_turn(response_record(1, 10), 2),
    )
    one, two = turn_costs([first, second, third])
    assert (one.turn, one.at, one.kind, one.reason) == (1, 9.0, "new", "first request")
    assert (one.input_tokens, one.cached_tokens, one.uncached_tokens) == (10_000, 4900, 5100)
    assert [call.response for call in one.calls] == [1, 2]
    assert (two.kind, two.reason, two.way) == ("continuation", "", "")


@spec("REUSE-65")
def test_a_turn_reports_the_end_of_its_prefix_whichever_response_had_it() -> None:
    changed = in_turn(response_record(2, prompt=PromptHead("another", "tools")), 1)
    (one,) = turn_costs([in_turn(response_record(1), 1), changed])
    assert (one.kind, one.reason) == ("divergence", "the system prompt changed")


@spec("REUSE-65", "REUSE-78")
def test_a_pooled_turn_has_the_pools_decision() -> None:
    gone = replace(KNOWN, way="fresh", rebuilt="upstream_gone")
    costs = turn_costs(
        [
            ReuseDecided(1, 1, 1, NEW, 1.0),
            in_turn(response_record(1, tokens=9), 1),
            ReuseDecided(2, 1, 1, KNOWN, 2.0),
            ReuseDecided(2, 1, 1, gone, 3.0),
        ]
    )
    assert [(each.kind, each.reason, each.way) for each in costs] == [
        ("new", "no record", "fresh"),
        ("continuation", "rebuilt (upstream_gone)", "fresh"),
    ]
    assert costs[1] == TurnCost(
        2,
        2.0,
        "continuation",
        "rebuilt (upstream_gone)",
        "fresh",
        judgements=(KNOWN, gone),
    )
    assert costs[1].uncached_tokens == -1  # this turn has no response
