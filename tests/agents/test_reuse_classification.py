from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from midstream.agents.pool_records import (
    ForkPoint,
    PoolRecord,
    confirm,
    create_resumed,
    with_answer,
    with_side_call,
)
from midstream.agents.reuse_classification import (
    Action,
    Classification,
    Delivery,
    Fork,
    Fresh,
    Reason,
    RequestRelation,
    ResumeAgent,
    action,
    asides_of,
    classify,
)
from midstream.agents.upstream_abilities import Abilities
from midstream.history.messages import Entry, File, ToolSpec, UserMessage
from midstream.models.fingerprint import Outline, common_users
from midstream.tools.forwarded_servers import ForwardedMcpServer
from tests.agents.reuse_examples import confirmed, conversation, outline_of, pending, step_of, user_message
from tests.spec import spec

PLAIN = Abilities()
FORKS = Abilities(can_fork=True)
FOLLOWS = Abilities(can_reinstruct=True, can_retool=True)
TITLE = "Make a title."
TOOLS = (ToolSpec("read"),)


def kind_of(record: PoolRecord | None, outline: Outline) -> RequestRelation:
    return classify(record, outline).kind


def action_of(record: PoolRecord | None, outline: Outline, abilities: Abilities = PLAIN) -> Action:
    return action(classify(record, outline), outline, record, abilities)


def record_with_marks(*texts: str) -> PoolRecord:
    """Return the record of an agent that received the messages one by one and gave a mark for each."""
    record = confirmed(outline_of(user_message(texts[0])))
    for count in range(2, len(texts) + 1):
        asked = create_resumed(record, outline_of(*conversation(*texts[:count])), now=4.0)
        record = with_answer(asked, agent="agent-1", mark=f"mark-{count}", open_calls=(), now=5.0)
    return record


# --- the specification's table ----------------------------------------------------------------------------------------


@spec("REUSE-8")
def test_the_first_turn_is_new() -> None:
    outline = outline_of(user_message("a"))
    assert classify(None, outline) == Classification(
        RequestRelation.NEW, Reason("record", None, "no record"), new=1
    )
    assert action_of(None, outline) == Fresh(is_pooled=True)


@spec("REUSE-8", "REUSE-20")
def test_a_call_declared_ephemeral_changes_no_record() -> None:
    for record in (None, confirmed(outline_of(user_message("a")))):
        outline = outline_of(*conversation("a", "b"))
        judged = classify(record, outline, is_ephemeral=True)
        assert (judged.kind, judged.reason.field, judged.delivery) == (
            RequestRelation.SIDE_CALL,
            "ephemeral",
            None,
        )
        assert action(judged, outline, record, FORKS) == Fresh(is_pooled=False)


@spec("REUSE-9")
def test_one_new_message_at_the_end_is_a_continuation() -> None:
    record, outline = confirmed(outline_of(*conversation("a", "b"))), outline_of(*conversation("a", "b", "c"))
    assert classify(record, outline) == Classification(
        RequestRelation.CONTINUATION,
        Reason("users", 2, "1 new at the end"),
        common=2,
        new=1,
        delivery=Delivery(1),
    )
    assert action_of(record, outline) == ResumeAgent(Delivery(1))


@spec("REUSE-10")
def test_several_new_messages_in_a_row_are_delivered_one_by_one() -> None:
    record, outline = (
        confirmed(outline_of(user_message("a"))),
        outline_of(*conversation("a", "b"), user_message("c"), user_message("d")),
    )
    judged = classify(record, outline)
    assert (judged.kind, judged.common, judged.new) == (RequestRelation.CONTINUATION_MULTI, 1, 3)
    assert action_of(record, outline) == ResumeAgent(Delivery(3))


@spec("REUSE-10")
def test_a_queue_with_a_response_in_it_is_a_divergence() -> None:
    record, outline = confirmed(outline_of(user_message("a"))), outline_of(*conversation("a", "b", "c"))
    judged = classify(record, outline)
    assert (judged.kind, judged.common, judged.new) == (RequestRelation.DIVERGENCE, 1, 2)
    assert judged.reason == Reason("users", 1, "responses of others stand between the new messages")
    for abilities in (PLAIN, FORKS):
        assert action_of(record, outline, abilities) == Fresh(is_pooled=True)


@spec("REUSE-9")
def test_known_messages_in_a_queue_are_not_delivered_again() -> None:
    record = confirmed(outline_of(user_message("a"), user_message("b")))
    assert action_of(
        record, outline_of(user_message("a"), user_message("b"), user_message("c"))
    ) == ResumeAgent(Delivery(1))


@spec("REUSE-16")
@pytest.mark.parametrize(
    ("now", "common"),
    [
        (conversation("a", "b", "C"), 2),
        (conversation("A", "b", "c"), 0),
        (conversation("a", "B", "c", "d"), 1),
        ((*conversation("a", "B", "c"), user_message("d"), user_message("e")), 1),
        (conversation("summary of a, b and c", "d"), 0),
        (conversation("a", "b"), 2),
        (conversation("a", "x"), 1),
    ],
    ids=[
        "edit",
        "edit-first",
        "edit-and-go-on",
        "edit-earlier-and-queue",
        "compaction",
        "revert",
        "revert-and-edit",
    ],
)
def test_a_rewritten_conversation_is_a_divergence_with_its_place(now: tuple[Entry, ...], common: int) -> None:
    record, outline = confirmed(outline_of(*conversation("a", "b", "c"))), outline_of(*now)
    judged = classify(record, outline)
    assert (judged.kind, judged.common, judged.delivery) == (RequestRelation.DIVERGENCE, common, None)
    assert (judged.reason.field, judged.reason.index) == ("users", common)
    assert action_of(record, outline) == Fresh(is_pooled=True)


@spec("REUSE-16")
def test_a_replaced_image_is_an_edit() -> None:
    def with_image(data: str) -> Outline:
        return outline_of(UserMessage((File("image/png", data),)), step_of(), user_message("and this?"))

    assert kind_of(confirmed(with_image("AAAA")), with_image("BBBB")) == RequestRelation.DIVERGENCE


@spec("REUSE-16")
def test_a_conversation_that_ends_with_a_response_has_nothing_to_deliver() -> None:
    record = confirmed(outline_of(user_message("a")))
    for entries in (
        (user_message("a"), step_of()),
        (*conversation("a", "b"), step_of()),
        (*conversation("a", "b"), step_of(calls=["c1"])),
    ):
        judged = classify(record, outline_of(*entries))
        assert (judged.kind, judged.reason.field, judged.delivery) == (
            RequestRelation.DIVERGENCE,
            "tail",
            None,
        )


@spec("REUSE-16")
def test_an_agent_without_a_user_message_is_not_continued() -> None:
    assert classify(confirmed(outline_of()), outline_of(user_message("a"))).reason.field == "users"
    assert kind_of(confirmed(outline_of()), outline_of(user_message("a"))) == RequestRelation.DIVERGENCE
    assert kind_of(confirmed(outline_of()), outline_of()) == RequestRelation.DIVERGENCE
    assert kind_of(confirmed(outline_of(user_message("a"))), outline_of()) == RequestRelation.DIVERGENCE


# --- the defects of the original --------------------------------------------------------------------------------------


@spec("REUSE-17")
def test_an_unconfirmed_record_is_not_continued() -> None:
    record, outline = pending(outline_of(user_message("a"))), outline_of(*conversation("a", "b"))
    judged = classify(record, outline)
    assert (judged.kind, judged.reason.field, judged.delivery) == (RequestRelation.DIVERGENCE, "phase", None)
    for abilities in (PLAIN, FORKS, FOLLOWS):
        assert action_of(record, outline, abilities) == Fresh(is_pooled=True)
        assert action_of(record, outline_of(*conversation("a", "b"), system="New."), abilities) == Fresh(
            is_pooled=True
        )


@spec("REUSE-17")
def test_after_an_unknown_send_a_fork_continues_from_the_last_confirmed_point() -> None:
    record = create_resumed(
        confirmed(outline_of(user_message("a"))), outline_of(*conversation("a", "b")), now=9.0
    )
    fork = Fork(ForkPoint(1, "agent-1", "mark-1"), 1)
    assert action_of(record, outline_of(*conversation("a", "b")), FORKS) == fork
    assert action_of(record, outline_of(*conversation("a", "b", "c")), FORKS) == Fresh(is_pooled=True)
    assert action_of(record, outline_of(*conversation("a", "b"), user_message("c")), FORKS) == replace(
        fork, users=2
    )
    assert action_of(record, outline_of(*conversation("a", "b")), PLAIN) == Fresh(is_pooled=True)


@spec("REUSE-13")
def test_a_permanently_changed_system_prompt_is_a_rebase_once() -> None:
    record, outline = (
        confirmed(outline_of(*conversation("a", "b"))),
        outline_of(*conversation("a", "b", "c"), system="Today is Friday."),
    )
    judged = classify(record, outline)
    assert (judged.kind, judged.changed, judged.common) == (RequestRelation.REBASE, ("system",), 2)
    assert action_of(record, outline) == Fresh(is_pooled=True, passed_over="abilities")
    assert action_of(record, outline, Abilities(can_retool=True)) == Fresh(
        is_pooled=True, passed_over="abilities"
    )
    assert action_of(record, outline, FOLLOWS) == ResumeAgent(Delivery(1))
    assert (
        kind_of(confirmed(outline), outline_of(*conversation("a", "b", "c", "d"), system="Today is Friday."))
        == RequestRelation.CONTINUATION
    )


@spec("REUSE-13")
@pytest.mark.parametrize("texts", [("title of a",), ("a",), ("a", "b"), ("a", "x", "c"), ()])
def test_a_foreign_system_prompt_over_other_or_fewer_messages_is_a_side_call(texts: tuple[str, ...]) -> None:
    record, outline = (
        confirmed(outline_of(*conversation("a", "b"))),
        outline_of(*conversation(*texts), system=TITLE),
    )
    judged = classify(record, outline)
    assert (judged.kind, judged.reason.field, judged.delivery) == (RequestRelation.SIDE_CALL, "system", None)
    assert action_of(record, outline, FOLLOWS) == Fresh(is_pooled=False)


@spec("REUSE-14")
def test_an_apparent_side_call_that_continues_takes_the_record() -> None:
    """The race of 2.1: the title request came first and got the record."""
    record = confirmed(outline_of(user_message("title of a"), system=TITLE))
    first = outline_of(user_message("a"))
    assert kind_of(record, first) == RequestRelation.SIDE_CALL
    record = with_side_call(record, first)
    second = outline_of(*conversation("a", "b"))
    assert (kind_of(record, second), action_of(record, second)) == (
        RequestRelation.REBASE,
        Fresh(is_pooled=True),
    )
    assert (
        kind_of(confirmed(second), outline_of(*conversation("a", "b", "c"))) == RequestRelation.CONTINUATION
    )


@spec("REUSE-14", "REUSE-15")
@pytest.mark.parametrize("abilities", [PLAIN, FORKS, FOLLOWS])
@pytest.mark.parametrize("field", ["tools", "servers"])
@pytest.mark.parametrize("has_results", [False, True])
def test_an_apparent_side_call_with_only_other_tools_takes_the_record(
    field: str, abilities: Abilities, *, has_results: bool
) -> None:
    def asked(*entries: Entry) -> Outline:
        if field == "tools":
            return outline_of(*entries, tools=TOOLS)
        return outline_of(*entries, servers=[ForwardedMcpServer("files", command="serve")])

    title = confirmed(outline_of(user_message("title of a")))
    assert kind_of(title, asked(user_message("a"))) == RequestRelation.SIDE_CALL
    record = with_side_call(title, asked(user_message("a")))
    assert kind_of(record, asked(user_message("a"))) == RequestRelation.SIDE_CALL  # a retry
    assert kind_of(record, asked(*conversation("b", "c"))) == RequestRelation.SIDE_CALL
    entries = (user_message("a"), step_of(calls=["c1"])) if has_results else conversation("a", "b")
    second = asked(*entries)
    judged = classify(record, second)
    assert (judged.kind, judged.changed, judged.delivery) == (RequestRelation.REBASE, (field,), None)
    assert (judged.reason.field, judged.reason.words) == (field, "an assumed side call continues")
    assert action_of(record, second, abilities) == Fresh(is_pooled=True)
    third = asked(*entries, step_of(), user_message("c"))
    again = replace(confirmed(second), asides=asides_of(judged, record))
    assert kind_of(again, third) == RequestRelation.CONTINUATION
    another_title = outline_of(user_message("title of b"))
    assert kind_of(again, another_title) == RequestRelation.SIDE_CALL
    assert kind_of(with_side_call(again, another_title), third) == RequestRelation.CONTINUATION


@spec("REUSE-14")
def test_a_repeated_side_call_does_not_take_the_record() -> None:
    record = with_side_call(
        confirmed(outline_of(user_message("a"))), outline_of(user_message("t"), system=TITLE)
    )
    assert kind_of(record, outline_of(user_message("t"), system=TITLE)) == RequestRelation.SIDE_CALL
    assert (
        kind_of(record, outline_of(*conversation("t", "u"), system="A third one."))
        == RequestRelation.SIDE_CALL
    )
    assert (
        kind_of(record, outline_of(*conversation("another", "u"), system=TITLE)) == RequestRelation.SIDE_CALL
    )
    assert kind_of(record, outline_of(*conversation("a", "b"))) == RequestRelation.CONTINUATION


@spec("REUSE-13")
def test_another_model_folder_or_permission_never_reuses_the_old_agent() -> None:
    record, outline = (
        confirmed(outline_of(user_message("a"))),
        outline_of(*conversation("a", "b"), identity={"model": "haiku"}),
    )
    judged = classify(record, outline)
    assert (judged.kind, judged.changed, judged.reason.field) == (
        RequestRelation.REBASE,
        ("identity",),
        "identity",
    )
    able = Abilities(can_reinstruct=True, can_retool=True, can_fork=True)
    assert action_of(record, outline, able) == Fresh(is_pooled=True, passed_over="abilities")
    assert (
        kind_of(record, outline_of(user_message("t"), identity={"model": "haiku"}))
        == RequestRelation.SIDE_CALL
    )


@spec("REUSE-15")
@pytest.mark.parametrize("field", ["tools", "servers"])
def test_other_tools_or_servers_need_a_fresh_agent_unless_the_agent_can_receive_them(field: str) -> None:
    record = confirmed(outline_of(user_message("a")))
    outline = (
        outline_of(*conversation("a", "b"), tools=TOOLS)
        if field == "tools"
        else outline_of(*conversation("a", "b"), servers=[ForwardedMcpServer("files", command="serve")])
    )
    judged = classify(record, outline)
    assert (judged.kind, judged.changed, judged.reason.field) == (
        RequestRelation.TOOLS_CHANGED,
        (field,),
        field,
    )
    assert action_of(record, outline) == Fresh(is_pooled=True, passed_over="abilities")
    assert action_of(record, outline, FOLLOWS) == ResumeAgent(Delivery(1))


@spec("REUSE-15")
def test_other_tools_over_a_rewritten_conversation_are_no_resume_either() -> None:
    record, outline = record_with_marks("a", "b"), outline_of(*conversation("a", "B"), tools=TOOLS)
    assert (kind_of(record, outline), action_of(record, outline, FOLLOWS)) == (
        RequestRelation.TOOLS_CHANGED,
        Fresh(is_pooled=True),
    )
    able = Abilities(can_retool=True, can_fork=True)
    assert action_of(record, outline, able) == Fork(ForkPoint(1, "agent-1", "mark-1"), 1)
    assert kind_of(record, outline_of(user_message("t"), tools=TOOLS)) == RequestRelation.SIDE_CALL


@spec("REUSE-12")
def test_a_repeated_request_is_never_sent_to_the_agent_that_has_it() -> None:
    record, outline = record_with_marks("a", "b"), outline_of(*conversation("a", "b"))
    judged = classify(record, outline)
    assert (judged.kind, judged.reason.index, judged.common, judged.new) == (RequestRelation.REPEAT, 1, 2, 0)
    assert action_of(record, outline) == Fresh(is_pooled=True)
    assert action_of(record, outline, FORKS) == Fork(ForkPoint(1, "agent-1", "mark-1"), 1)
    first = outline_of(user_message("a"))
    assert (kind_of(confirmed(first), first), action_of(confirmed(first), first, FORKS)) == (
        RequestRelation.REPEAT,
        Fresh(is_pooled=True),
    )
    assert kind_of(pending(first), first) == RequestRelation.REPEAT


# --- results ----------------------------------------------------------------------------------------------------------


@spec("REUSE-11")
def test_the_results_that_the_agent_waits_for_are_a_continuation() -> None:
    record = confirmed(outline_of(user_message("a")), calls=["c1", "c2"])
    outline = outline_of(user_message("a"), step_of(calls=["c2", "c1"]))
    judged = classify(record, outline)
    assert (judged.kind, judged.reason.field, judged.new) == (RequestRelation.CONTINUATION, "results", 0)
    assert action_of(record, outline) == ResumeAgent(Delivery(0, ("c2", "c1")))


@spec("REUSE-11")
def test_results_and_a_new_message_are_delivered_together() -> None:
    record = confirmed(outline_of(user_message("a")), calls=["c1"])
    outline = outline_of(user_message("a"), step_of(calls=["c1"]), user_message("b"), user_message("c"))
    assert kind_of(record, outline) == RequestRelation.CONTINUATION_MULTI
    assert action_of(record, outline) == ResumeAgent(Delivery(2, ("c1",)))


@spec("REUSE-11")
@pytest.mark.parametrize(
    "entries",
    [
        (user_message("a"), step_of(), user_message("b")),
        (user_message("a"), user_message("b")),
        (user_message("a"), step_of(calls=["c1"]), user_message("b")),
        (user_message("a"), step_of(calls=["c1", "x"]), user_message("b")),
        (user_message("a"), step_of(calls=["c1", "c2", "x"]), user_message("b")),
        (user_message("a"), step_of(calls=["x"]), step_of(calls=["c1", "c2"]), user_message("b")),
        (user_message("a"), step_of(calls=["c1", "c2"]), step_of(), user_message("b")),
        (user_message("a"), step_of(calls=["c1"])),
    ],
)
def test_an_agent_receives_all_results_it_waits_for_and_no_others(entries: tuple[Entry, ...]) -> None:
    judged = classify(confirmed(outline_of(user_message("a")), calls=["c1", "c2"]), outline_of(*entries))
    assert (judged.kind, judged.delivery) == (RequestRelation.DIVERGENCE, None)


@spec("REUSE-11")
def test_results_of_calls_that_the_agent_never_made_are_a_divergence() -> None:
    outline = outline_of(user_message("a"), step_of(calls=["x"]), user_message("b"))
    assert classify(confirmed(outline_of(user_message("a"))), outline).reason.field == "results"
    assert (
        kind_of(confirmed(outline_of(user_message("a"))), outline_of(user_message("a"), step_of(calls=["x"])))
        == RequestRelation.DIVERGENCE
    )


@spec("REUSE-11", "REUSE-12")
def test_reused_call_ids_do_not_make_old_results_new() -> None:
    once = outline_of(user_message("a"), step_of(calls=["c1"]))
    record = with_answer(
        create_resumed(confirmed(outline_of(user_message("a")), calls=["c1"]), once, now=4.0),
        agent="agent-1",
        mark="",
        open_calls=["c1"],
        now=5.0,
    )
    assert kind_of(record, once) == RequestRelation.REPEAT
    assert action_of(record, once) == Fresh(is_pooled=True)
    assert (
        kind_of(record, outline_of(user_message("a"), step_of(calls=["c1"]), user_message("b")))
        == RequestRelation.DIVERGENCE
    )
    twice = outline_of(user_message("a"), step_of(calls=["c1"]), step_of(calls=["c1"]))
    assert action_of(record, twice) == ResumeAgent(Delivery(0, ("c1",)))


@spec("REUSE-11")
def test_a_client_application_that_omits_tool_results_is_still_a_continuation() -> None:
    given_results = outline_of(user_message("a"), step_of(calls=["c1"]))
    record = create_resumed(confirmed(outline_of(user_message("a")), calls=["c1"]), given_results, now=4.0)
    record = with_answer(record, agent="agent-1", mark="m", open_calls=(), now=5.0)
    for entries in (
        conversation("a", "b"),
        (user_message("a"), step_of(calls=["c1"]), step_of(), user_message("b")),
    ):
        assert action_of(record, outline_of(*entries)) == ResumeAgent(Delivery(1))
    assert action_of(
        record, outline_of(user_message("a"), step_of(calls=["c1"]), user_message("b"))
    ) == ResumeAgent(Delivery(1))


@spec("REUSE-11", "REUSE-13")
def test_results_under_a_new_system_prompt_are_a_rebase() -> None:
    record = confirmed(outline_of(user_message("a")), calls=["c1"])
    outline = outline_of(user_message("a"), step_of(calls=["c1"]), system="New.")
    assert kind_of(record, outline) == RequestRelation.REBASE
    assert action_of(record, outline, FOLLOWS) == ResumeAgent(Delivery(0, ("c1",)))


@spec("REUSE-11")
def test_results_before_known_messages_are_not_new() -> None:
    seen = (user_message("a"), step_of(calls=["c1"]), user_message("b"))
    after = outline_of(*seen, user_message("c"))
    assert action_of(confirmed(outline_of(*seen)), after) == ResumeAgent(Delivery(1))
    assert kind_of(confirmed(outline_of(*seen), calls=["c1"]), after) == RequestRelation.DIVERGENCE


# --- forks and age ----------------------------------------------------------------------------------------------------


@spec("REUSE-19")
@pytest.mark.parametrize(
    ("entries", "fork"),
    [
        (conversation("a", "b", "C"), (2, 1)),
        ((*conversation("a", "b", "C"), user_message("d")), (2, 2)),
        (conversation("a", "B"), (1, 1)),
        (conversation("a", "b"), (1, 1)),
        (conversation("a", "b", "c"), (2, 1)),
        ((user_message("a"), step_of(), user_message("b"), user_message("c"), user_message("d")), None),
        (conversation("a", "B", "c"), None),
        (conversation("A", "b"), None),
        (user_message("a"), None),
        ((user_message("a"), step_of(), step_of(calls=["x"]), user_message("B")), None),
    ],
)
def test_a_fork_starts_at_the_last_mark_with_only_user_messages_after_it(
    entries: tuple[Entry, ...] | Entry, fork: tuple[int, int] | None
) -> None:
    entries = entries if isinstance(entries, tuple) else (entries,)
    record = record_with_marks("a", "b", "c")
    expected: Action = Fresh(is_pooled=True)
    if fork is not None:
        expected = Fork(ForkPoint(fork[0], "agent-1", f"mark-{fork[0]}"), fork[1])
    elif entries == (user_message("a"), step_of(), user_message("b"), user_message("c"), user_message("d")):
        expected = ResumeAgent(Delivery(1))
    assert action_of(record, outline_of(*entries), FORKS) == expected


@spec("REUSE-26")
def test_a_resume_at_an_age_with_observed_failures_is_not_tried() -> None:
    record, outline = record_with_marks("a", "b"), outline_of(*conversation("a", "b", "c"))
    judged = classify(record, outline)
    assert judged.kind == RequestRelation.CONTINUATION
    assert action(judged, outline, record, FORKS, age_s=99.0, limit_s=100.0) == ResumeAgent(Delivery(1))
    old = action(judged, outline, record, FORKS, age_s=100.0, limit_s=100.0)
    assert old == Fresh(is_pooled=True, passed_over="stale")


# --- properties -------------------------------------------------------------------------------------------------------

_entries = st.lists(
    st.one_of(
        st.builds(user_message, st.sampled_from("ab")),
        st.just(step_of()),
        st.just(step_of(calls=["c1"])),
        st.just(step_of(calls=["c1", "c2"])),
    ),
    max_size=6,
)
_outlines = st.builds(
    lambda entries, system, tools, model: outline_of(
        *entries, system=system, tools=tools, identity={"model": model}
    ),
    _entries,
    st.sampled_from(["", "s"]),
    st.sampled_from([(), TOOLS]),
    st.sampled_from(["", "m"]),
)
_records = st.builds(
    lambda outline, calls, aside, is_confirmed: with_side_call(
        confirmed(outline, calls=calls) if is_confirmed else pending(outline), aside
    ),
    _outlines,
    st.sampled_from([(), ("c1",), ("c1", "c2")]),
    _outlines,
    st.booleans(),
)
_abilities = st.builds(
    Abilities, can_reinstruct=st.booleans(), can_retool=st.booleans(), can_fork=st.booleans()
)
CONTINUATIONS = (RequestRelation.CONTINUATION, RequestRelation.CONTINUATION_MULTI)


@spec("REUSE-7")
@given(st.none() | _records, _outlines, st.sampled_from([False, True]))
def test_every_request_has_one_kind_deterministically(
    record: PoolRecord | None, outline: Outline, is_ephemeral: object
) -> None:
    judged = classify(record, outline, is_ephemeral=bool(is_ephemeral))
    assert judged == classify(record, outline, is_ephemeral=bool(is_ephemeral))
    assert judged.common + judged.new == outline.fingerprint.count
    assert judged.reason.words


@spec("REUSE-9", "REUSE-17")
@given(_records, _outlines)
def test_a_continuation_starts_with_exactly_the_confirmed_conversation(
    record: PoolRecord, outline: Outline
) -> None:
    judged = classify(record, outline)
    if judged.kind not in CONTINUATIONS:
        return
    mine, theirs = record.fingerprint, outline.fingerprint
    assert record.is_resumable
    assert theirs.users.startswith(mine.users)
    assert replace(theirs, users=mine.users) == mine
    assert judged.delivery is not None
    assert theirs.count - mine.count == judged.delivery.users <= outline.tail_users
    assert sorted(judged.delivery.results) == sorted(record.open_calls)


@spec("REUSE-18", "REUSE-19", "REUSE-21")
@given(_records, _outlines, _abilities)
def test_an_agent_receives_exactly_the_missing_messages(
    record: PoolRecord, outline: Outline, abilities: Abilities
) -> None:
    count = outline.fingerprint.count
    match action(classify(record, outline), outline, record, abilities):
        case ResumeAgent(delivery):
            assert record.is_resumable
            assert record.fingerprint.count + delivery.users == count
            assert (
                common_users(record.fingerprint.users, outline.fingerprint.users) == record.fingerprint.count
            )
            assert delivery.users or delivery.results
        case Fork(mark, users):
            assert mark in record.marks
            assert abilities.can_fork
            assert mark.users + users == count
            assert 1 <= users <= outline.tail_users
            assert common_users(record.fingerprint.users, outline.fingerprint.users) >= mark.users
        case Fresh():
            pass


@spec("REUSE-18")
@given(_records, _outlines, _abilities)
def test_no_agent_is_reused_that_cannot_apply_a_change(
    record: PoolRecord, outline: Outline, abilities: Abilities
) -> None:
    judged = classify(record, outline)
    if isinstance(action(judged, outline, record, abilities), Fresh):
        return
    assert "identity" not in judged.changed
    assert abilities.can_reinstruct or "system" not in judged.changed
    assert abilities.can_retool or not {"tools", "servers"} & set(judged.changed)


@spec("REUSE-20", "REUSE-21")
@given(st.none() | _records, _outlines, _abilities)
def test_only_side_calls_leave_the_record_unchanged(
    record: PoolRecord | None, outline: Outline, abilities: Abilities
) -> None:
    judged = classify(record, outline)
    chosen = action(judged, outline, record, abilities)
    is_left = isinstance(chosen, Fresh) and not chosen.is_pooled
    assert is_left == (judged.kind is RequestRelation.SIDE_CALL)


def test_the_examples_of_the_properties_contain_all_kinds() -> None:
    outlines = [
        outline_of(*entries, system=system)
        for entries in (conversation("a"), conversation("a", "b"), conversation("b"))
        for system in "st"
    ]
    outlines += [
        outline_of(*conversation("a", "b"), tools=TOOLS, system="s"),
        outline_of(*conversation("a", "b"), user_message("c"), system="s"),
    ]
    records = [None, *(confirmed(outline) for outline in outlines)]
    kinds = {kind_of(record, outline) for record, outline in itertools.product(records, outlines)}
    assert kinds == set(RequestRelation)


def test_an_agent_without_an_id_is_not_resumed() -> None:
    record = confirm(pending(outline_of(user_message("a"))), "", now=2.0)
    assert action_of(record, outline_of(*conversation("a", "b"))) == Fresh(is_pooled=True)
