"""What the journal says of a session's model calls and the provider's cache."""

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


def responded(
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


def told(*records: Record) -> list[tuple[Prefix, str]]:
    return [(call.kind, call.reason) for call in model_calls([*records])]


@spec("REUSE-65")
def test_each_call_has_its_kind_its_reason_and_its_tokens() -> None:
    calls = model_calls([responded(1), Delta(1, 2, 1, 0, "text", "h"), responded(2, 4900, tokens=5100)])

    assert calls == [
        ModelCall(1, 1, 1.0, Prefix.NEW, "first request", "m-1", 5000, 0),
        ModelCall(1, 2, 2.0, Prefix.CONTINUATION, "", "m-1", 5100, 4900),
    ]
    assert [call.uncached_tokens for call in calls] == [5000, 200]


@spec("REUSE-65")
def test_what_was_another_in_the_beginning_is_named() -> None:
    assert told(
        responded(1),
        responded(2, model="m-2"),
        responded(3, model="m-2", prompt=PromptHead("system", "others")),
        responded(4, model="m-2", prompt=PromptHead("another", "others")),
        HistoryCompacted(1, 5, 2, 4.0),
        responded(5, model="m-2", prompt=PromptHead("another", "others")),
        responded(6, 4000, model="m-2", prompt=PromptHead("another", "others")),
    )[1:] == [
        (Prefix.DIVERGENCE, "another model"),
        (Prefix.DIVERGENCE, "the tools changed"),
        (Prefix.DIVERGENCE, "the system prompt changed"),
        (Prefix.DIVERGENCE, "the older part is left out"),
        (Prefix.CONTINUATION, ""),
    ]


@spec("REUSE-65")
def test_a_continuation_that_found_nothing_says_what_may_be_the_reason() -> None:
    assert told(
        responded(1),
        responded(2, tokens=TOKENS_MIN - 1),
        responded(3, at=2.0 + KEPT_S + 301.0),
        responded(4, at=3.0 + KEPT_S + 302.0),
    )[1:] == [
        (Prefix.CONTINUATION, f"below {TOKENS_MIN} tokens"),
        (Prefix.CONTINUATION, "10 min idle: no longer kept"),
        (Prefix.CONTINUATION, "unknown: compare requests"),
    ]


def test_nobody_goes_on_from_the_request_to_hand_in() -> None:
    assert told(
        responded(1),
        AttemptStarted(1, 2, 1, 2.0, is_last=True),
        responded(2, prompt=PromptHead("system", "none")),
        AttemptStarted(2, 1, 1, 3.0),
        responded(3, 4000),
    )[1:] == [(Prefix.DIVERGENCE, "asked to hand in"), (Prefix.CONTINUATION, "")]


def test_without_usage_and_digests_nothing_is_claimed() -> None:
    silent = ResponseCompleted(1, 2, 1, Response((Text("hi"),)), 2.0)
    (_, call) = model_calls([responded(1), silent])

    assert (call.kind, call.reason) == (Prefix.CONTINUATION, "no usage was counted")
    assert (call.input_tokens, call.cached_tokens, call.uncached_tokens) == (-1, -1, -1)
    assert told(responded(1), silent, responded(3, 10, prompt=PromptHead("new", "tools")))[2] == (
        Prefix.DIVERGENCE,
        "the system prompt changed",
    )


NEW = ReuseDecision("new", "no record", "fresh", "record", new=1)
KNOWN = ReuseDecision("continuation", "one user message is new", "resumed", "users", 1, 1, 1)


def of_turn(response: ResponseCompleted, turn: int) -> ResponseCompleted:
    return replace(response, turn=turn)


@spec("REUSE-65")
def test_a_turn_is_one_row_with_the_tokens_of_all_its_responses() -> None:
    first, second, third = (
        of_turn(responded(1), 1),
        of_turn(responded(2, 4900, at=9.0), 1),
        of_turn(responded(1, 10), 2),
    )
    one, two = turn_costs([first, second, third])
    assert (one.turn, one.at, one.kind, one.reason) == (1, 9.0, "new", "first request")
    assert (one.input_tokens, one.cached_tokens, one.uncached_tokens) == (10_000, 4900, 5100)
    assert [call.response for call in one.calls] == [1, 2]
    assert (two.kind, two.reason, two.way) == ("continuation", "", "")


@spec("REUSE-65")
def test_a_turn_in_which_the_prefix_ended_says_so_whichever_response_it_was() -> None:
    changed = of_turn(responded(2, prompt=PromptHead("another", "tools")), 1)
    (one,) = turn_costs([of_turn(responded(1), 1), changed])
    assert (one.kind, one.reason) == ("divergence", "the system prompt changed")


@spec("REUSE-65", "REUSE-78")
def test_of_a_pools_turn_the_pools_judgement_stands() -> None:
    gone = replace(KNOWN, way="fresh", rebuilt="upstream_gone")
    costs = turn_costs(
        [
            ReuseDecided(1, 1, 1, NEW, 1.0),
            of_turn(responded(1, tokens=9), 1),
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
    assert costs[1].uncached_tokens == -1  # it has no response
