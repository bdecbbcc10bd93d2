from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import cast

import pytest

from midstream.agents.pool import Pooled
from midstream.agents.pool_records import ForkPoint
from midstream.agents.pool_turns import REBUILT_NOTE, AgentOrigin, PoolTurn, without_notes
from midstream.agents.prior_transcript import DONE, TranscriptBudget
from midstream.agents.reuse_classification import Fork, Fresh, RequestRelation, classify
from midstream.agents.upstream_abilities import Abilities
from midstream.agents.upstreams import Setup, UpstreamMessage
from midstream.history.messages import (
    Finish,
    History,
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
from midstream.models.fingerprint import ConversationDigest
from midstream.models.responses import ModelEvent, ModelRequest, ReuseReported
from midstream.session.model_settings import ModelSettings
from midstream.session.records import ReuseDecision
from midstream.testing.scripted_upstream import ScriptedUpstream, Trouble, words_of
from tests.agents.pooling import PoolApplication, PoolBench, assert_sent_once
from tests.spec import spec

ONE, TWO = UserMessage.of("one"), UserMessage.of("two")
ANSWER = Step(Response((Text("yes"),)))
CALLED = Step(Response((ToolCall("c", "look"),), Finish.CALLS), (ToolResult("c", "seen"),))
TAKES_HISTORY = Abilities(takes_history=True)


def test_a_fresh_agent_that_takes_a_history_receives_the_prior_conversation() -> None:
    turn = _turn(History((ONE, ANSWER, TWO)), TAKES_HISTORY)
    assert turn.delivery.sends == [UpstreamMessage(TWO, before=History((ONE, ANSWER)))]
    assert turn.totals.replays == 1


def test_the_first_message_is_not_a_full_transcript() -> None:
    turn = _turn(History((ONE,)), TAKES_HISTORY)
    assert (turn.delivery.sends, turn.totals.replays) == ([UpstreamMessage(ONE, before=History())], 0)


def test_trailing_results_are_sent_without_a_text() -> None:
    turn = _turn(History((ONE, CALLED)), TAKES_HISTORY)
    assert turn.delivery.sends == [UpstreamMessage(UserMessage(()), before=History((ONE, CALLED)))]


def test_a_fresh_agent_without_history_receives_a_transcript_and_the_message() -> None:
    (newest,) = _turn(History((ONE, ANSWER, TWO)), Abilities()).delivery.sends
    text = "".join(part.text for part in newest.message.parts if isinstance(part, Text))
    assert newest.before is None
    assert text.endswith("two")
    assert text.index("one") < text.index("yes")


def test_only_the_last_message_has_the_requests_settings() -> None:
    history = History((ONE, TWO))
    received, settings = ConversationDigest().then(history.entries), ModelSettings(temperature=0.0)
    request = ModelRequest("", history, session="s", settings=settings)
    found = received.outline("", (), (), {})
    turn = PoolTurn(request, found, classify(None, found), Fork(ForkPoint(0, "a", "m"), 2), Setup(), None)
    turn.begin("a", TAKES_HISTORY, TranscriptBudget())
    assert turn.delivery.sends == [UpstreamMessage(ONE), UpstreamMessage(TWO, settings=settings)]


@pytest.mark.parametrize(
    ("parts", "kept"),
    [
        ((Thinking(REBUILT_NOTE), Text("yes")), (Text("yes"),)),
        ((Thinking(REBUILT_NOTE + "hm"), Text("yes")), (Thinking("hm"), Text("yes"))),
        ((Thinking("hm"), Text("yes")), (Thinking("hm"), Text("yes"))),
        ((Text(REBUILT_NOTE),), (Text(REBUILT_NOTE),)),
        ((), ()),
    ],
)
def test_the_pools_own_note_is_not_part_of_a_conversation(
    parts: tuple[Text | Thinking, ...], kept: tuple[Text | Thinking, ...]
) -> None:
    history = History((ONE, Step(Response(parts))))
    assert without_notes(history) == History((ONE, Step(Response(kept))))


def test_keys_differ_by_agent_session_and_message() -> None:
    histories = [History((ONE,)), History((ONE, ANSWER, TWO))]
    keys = {
        _turn(history, Abilities(), nonce=nonce, session=session).key()
        for history in histories
        for nonce in ("a", "b")
        for session in ("s", "t")
    }
    assert len(keys) == 8
    assert _turn(histories[0], Abilities()).key() == _turn(histories[0], Abilities()).key()


def test_tokens_are_summed() -> None:
    turn = _turn(History((ONE,)), Abilities())
    turn.totals.count(Usage(1, 2, 3))
    turn.totals.count(None)
    assert turn.totals.count(Usage(10, 20, 30)) == Usage(11, 22, 33)


def _turn(history: History, abilities: Abilities, *, nonce: str = "a", session: str = "s") -> PoolTurn:
    received = ConversationDigest().then(history.entries)
    found = received.outline("", (), (), {})
    request = ModelRequest("", history, session=session)
    turn = PoolTurn(request, found, classify(None, found), Fresh(is_pooled=True), Setup(), None)
    turn.begin(nonce, abilities, TranscriptBudget())
    return turn


@spec("REUSE-78")
async def test_the_decision_is_reported_before_the_agent_receives_anything() -> None:
    bench = PoolBench()
    host = await bench.host()
    await host.send_messages("one")
    assert host.judged == [ReuseDecision("new", "no record", "fresh", "record", new=1)]
    await host.send_messages("two")
    assert host.judged == [ReuseDecision("continuation", "1 new at the end", "resumed", "users", 1, 1, 1)]
    host.history = host.history.then(UserMessage.of("three"))
    events = host.pool.stream(ModelRequest("", host.history, session="s"))
    assert isinstance(await anext(events), ReuseReported)
    assert len(bench.sent_texts()) == 2
    await cast("AsyncGenerator[ModelEvent, None]", events).aclose()


@spec("REUSE-78")
async def test_a_replacement_agent_is_a_second_decision_with_its_reason() -> None:
    bench = PoolBench()
    host = await bench.host()
    await host.send_messages("one")
    bench.trouble(Trouble.GONE)
    await host.send_messages("two")
    assert [(each.kind, each.way, each.rebuilt) for each in host.judged] == [
        ("continuation", "resumed", ""),
        ("continuation", "fresh", "upstream_gone"),
    ]
    assert host.report.field == "users"
    assert host.report.index == 1


@spec("REUSE-79")
@pytest.mark.parametrize("abilities", [Abilities(), TAKES_HISTORY], ids=["a text", "a history"])
def test_a_fresh_agent_is_informed_that_an_interrupted_answer_is_done(abilities: Abilities) -> None:
    cut = Step(Response((Text("half"),), Finish.INTERRUPTED))
    (message,) = _turn(History((ONE, cut, TWO)), abilities).delivery.sends
    text = words_of(message)
    assert text.index("half") < text.index(DONE) < text.rindex("two")


@spec("REUSE-79")
async def test_a_resumed_agent_is_informed_of_its_calls_in_an_interrupted_answer() -> None:
    bench = PoolBench()
    host = await bench.host()
    await host.send_messages("one")
    call = UpstreamCall("c", "shell", "{}", "receipt 77", Outcome.OK)
    cut = Step(Response((Text("half"), call), Finish.INTERRUPTED))
    host.history = History((*host.history.entries[:-1], cut))
    report = await host.send_messages("two")
    assert report.way is AgentOrigin.RESUMED
    received = bench.sent_texts()[-1]
    assert (
        received.index("half") < received.index("receipt 77") < received.index(DONE) < received.rindex("two")
    )


@spec("REUSE-14")
@pytest.mark.parametrize("can_fork", [False, True], ids=["resumes", "forks"])
async def test_a_conversation_does_not_continue_the_title_request_before_it(
    *,
    can_fork: bool,
) -> None:
    abilities = Abilities(can_reinstruct=True, can_fork=can_fork)
    bench = PoolBench(ScriptedUpstream(abilities=abilities))
    title, host = await bench.host(), await bench.host()
    title.system, host.system = "Make a title.", "Help."
    await title.send_messages("hello")
    await host.send_messages("hello")
    assert (await host.send_messages("more")).way is AgentOrigin.FRESH
    conversation = bench.upstream.memory.talks[host.report.agent]
    assert conversation.words.count("hello") == 1
    assert host.text == "answer 1"
    assert (await host.send_messages("still more")).way is AgentOrigin.RESUMED


@spec("REUSE-14")
@pytest.mark.parametrize("can_retool", [False, True])
async def test_a_conversation_that_differs_only_in_tools_from_the_title_request_takes_the_record(
    *, can_retool: bool
) -> None:
    abilities = Abilities(takes_tools=True, can_retool=can_retool)
    bench = PoolBench(ScriptedUpstream(abilities=abilities))
    title, host = await bench.host(), await bench.host()
    host.tools = (ToolSpec("read", "Read a file.", {"type": "object"}),)
    await title.send_messages("a title")
    kinds = [(await host.send_messages(text)).kind for text in ("apple", "pear", "plum", "fig")]
    assert kinds == [
        RequestRelation.SIDE_CALL,
        RequestRelation.REBASE,
        *[RequestRelation.CONTINUATION] * 2,
    ]
    assert (host.report.way, host.report.replays) == (AgentOrigin.RESUMED, 0)
    assert_sent_once(bench, host)
    assert (await title.send_messages("another title")).kind is RequestRelation.SIDE_CALL
    assert (await host.send_messages("after it")).way is AgentOrigin.RESUMED


@spec("REUSE-14")
async def test_a_title_request_in_the_middle_does_not_become_the_conversation() -> None:
    bench = PoolBench(ScriptedUpstream(abilities=Abilities(can_reinstruct=True)))
    title, host = await bench.host(), await bench.host()
    title.system, host.system = "Make a title.", "Help."
    await host.send_messages("hello")
    title.history = host.history
    await title.send_messages("more")
    assert (await host.send_messages("more")).way is AgentOrigin.FRESH
    assert (await host.send_messages("still more")).way is AgentOrigin.RESUMED


async def test_a_pool_without_a_store_has_records_as_long_as_its_process() -> None:
    bench = PoolBench()
    host = PoolApplication(Pooled(bench.upstream, world=bench.world), bench.world)
    await host.send_messages("one")
    assert (await host.send_messages("two")).way is AgentOrigin.RESUMED


@spec("REUSE-34")
async def test_the_agent_of_an_expired_record_is_deleted_when_its_session_returns() -> None:
    bench = PoolBench()
    host = await bench.host()
    await host.send_messages("one")
    await bench.world.advance(8 * 24 * 3600.0)
    assert (await host.send_messages("two")).kind is RequestRelation.NEW
    await bench.world.settle()
    assert bench.upstream.memory.forgotten == ["agent-1"]
