"""What the journal says of a session's model calls and the provider's cache."""

from __future__ import annotations

from midstream.core.messages import Reply, Text, Usage
from midstream.core.records import (
    AttemptStarted,
    Delta,
    HistoryCompacted,
    PromptHead,
    Record,
    ReplyCompleted,
)
from midstream.core.reuse.caching import KEPT_S, TOKENS_MIN, ModelCall, Prefix, model_calls
from tests.spec import spec

HEAD = PromptHead("system", "tools")


def replied(
    number: int,
    cached: int = 0,
    *,
    at: float = 0.0,
    tokens: int = 5000,
    model: str = "m-1",
    prompt: PromptHead | None = HEAD,
) -> ReplyCompleted:
    body = Reply((Text("hi"),), model=model, usage=Usage(tokens, 10, cached))
    return ReplyCompleted(1, number, 1, body, at or float(number), prompt=prompt)


def told(*records: Record) -> list[tuple[Prefix, str]]:
    return [(call.kind, call.reason) for call in model_calls(records)]


@spec("REUSE-65")
def test_each_call_has_its_kind_its_reason_and_its_tokens() -> None:
    calls = model_calls([replied(1), Delta(1, 2, 1, 0, "text", "h"), replied(2, 4900, tokens=5100)])

    assert calls == [
        ModelCall(1, 1, 1.0, Prefix.NEW, "first request", "m-1", 5000, 0),
        ModelCall(1, 2, 2.0, Prefix.CONTINUATION, "", "m-1", 5100, 4900),
    ]
    assert [call.uncached_tokens for call in calls] == [5000, 200]


@spec("REUSE-65")
def test_what_was_another_in_the_beginning_is_named() -> None:
    assert told(
        replied(1),
        replied(2, model="m-2"),
        replied(3, model="m-2", prompt=PromptHead("system", "others")),
        replied(4, model="m-2", prompt=PromptHead("another", "others")),
        HistoryCompacted(1, 5, 2, 4.0),
        replied(5, model="m-2", prompt=PromptHead("another", "others")),
        replied(6, 4000, model="m-2", prompt=PromptHead("another", "others")),
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
        replied(1),
        replied(2, tokens=TOKENS_MIN - 1),
        replied(3, at=2.0 + KEPT_S + 301.0),
        replied(4, at=3.0 + KEPT_S + 302.0),
    )[1:] == [
        (Prefix.CONTINUATION, f"below {TOKENS_MIN} tokens"),
        (Prefix.CONTINUATION, "10 min idle: no longer kept"),
        (Prefix.CONTINUATION, "unknown: compare requests"),
    ]


def test_nobody_goes_on_from_the_request_to_hand_in() -> None:
    assert told(
        replied(1),
        AttemptStarted(1, 2, 1, 2.0, is_last=True),
        replied(2, prompt=PromptHead("system", "none")),
        AttemptStarted(2, 1, 1, 3.0),
        replied(3, 4000),
    )[1:] == [(Prefix.DIVERGENCE, "asked to hand in"), (Prefix.CONTINUATION, "")]


def test_without_usage_and_digests_nothing_is_claimed() -> None:
    silent = ReplyCompleted(1, 2, 1, Reply((Text("hi"),)), 2.0)
    (_, call) = model_calls([replied(1), silent])

    assert (call.kind, call.reason) == (Prefix.CONTINUATION, "no usage was counted")
    assert (call.input_tokens, call.cached_tokens, call.uncached_tokens) == (-1, -1, -1)
    assert told(replied(1), silent, replied(3, 10, prompt=PromptHead("new", "tools")))[2] == (
        Prefix.DIVERGENCE,
        "the system prompt changed",
    )
