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
    classify,
)
from midstream.agents.upstream_abilities import Abilities
from midstream.history.messages import Entry, File, ToolSpec, UserMessage
from midstream.models.fingerprint import Outline, common_users
from midstream.tools.forwarded_servers import ForwardedMcpServer
from tests.agents.sayings import known, pending, responded, said, sent, talk
from tests.spec import spec

PLAIN = Abilities()
FORKS = Abilities(can_fork=True)
FOLLOWS = Abilities(can_reinstruct=True, can_retool=True)
TITLE = "Make a title."
TOOLS = (ToolSpec("read"),)


def kind_of(record: PoolRecord | None, outline: Outline) -> RequestRelation:
    return classify(record, outline).kind


def done(record: PoolRecord | None, outline: Outline, abilities: Abilities = PLAIN) -> Action:
    return action(classify(record, outline), outline, record, abilities)


def marked(*texts: str) -> PoolRecord:
    """The record of an agent that was asked one after the other and gave a mark each time."""
    record = known(sent(said(texts[0])))
    for count in range(2, len(texts) + 1):
        asked = create_resumed(record, sent(*talk(*texts[:count])), now=4.0)
        record = with_answer(asked, agent="agent-1", mark=f"mark-{count}", open_calls=(), now=5.0)
    return record


# --- the seed's table -------------------------------------------------------------------------------------------------


@spec("REUSE-8")
def test_the_first_turn_is_new() -> None:
    outline = sent(said("a"))
    assert classify(None, outline) == Classification(
        RequestRelation.NEW, Reason("record", None, "no record"), new=1
    )
    assert done(None, outline) == Fresh(is_pooled=True)


@spec("REUSE-8", "REUSE-20")
def test_a_call_that_the_host_declares_ephemeral_touches_no_record() -> None:
    for record in (None, known(sent(said("a")))):
        outline = sent(*talk("a", "b"))
        judged = classify(record, outline, is_ephemeral=True)
        assert (judged.kind, judged.reason.field, judged.delivery) == (
            RequestRelation.SIDE_CALL,
            "ephemeral",
            None,
        )
        assert action(judged, outline, record, FORKS) == Fresh(is_pooled=False)


@spec("REUSE-9")
def test_one_new_message_at_the_end_is_a_continuation() -> None:
    record, outline = known(sent(*talk("a", "b"))), sent(*talk("a", "b", "c"))
    assert classify(record, outline) == Classification(
        RequestRelation.CONTINUATION,
        Reason("users", 2, "1 new at the end"),
        common=2,
        new=1,
        delivery=Delivery(1),
    )
    assert done(record, outline) == ResumeAgent(Delivery(1))


@spec("REUSE-10")
def test_several_new_messages_with_nothing_between_them_are_delivered_one_by_one() -> None:
    record, outline = known(sent(said("a"))), sent(*talk("a", "b"), said("c"), said("d"))
    judged = classify(record, outline)
    assert (judged.kind, judged.common, judged.new) == (RequestRelation.CONTINUATION_MULTI, 1, 3)
    assert done(record, outline) == ResumeAgent(Delivery(3))


@spec("REUSE-10")
def test_a_queue_with_a_response_in_it_is_a_divergence() -> None:
    record, outline = known(sent(said("a"))), sent(*talk("a", "b", "c"))
    judged = classify(record, outline)
    assert (judged.kind, judged.common, judged.new) == (RequestRelation.DIVERGENCE, 1, 2)
    assert judged.reason == Reason("users", 1, "responses of others stand between the new messages")
    for abilities in (PLAIN, FORKS):
        assert done(record, outline, abilities) == Fresh(is_pooled=True)


@spec("REUSE-9")
def test_queued_messages_that_were_known_are_not_delivered_again() -> None:
    record = known(sent(said("a"), said("b")))
    assert done(record, sent(said("a"), said("b"), said("c"))) == ResumeAgent(Delivery(1))


@spec("REUSE-16")
@pytest.mark.parametrize(
    ("now", "common"),
    [
        (talk("a", "b", "C"), 2),
        (talk("A", "b", "c"), 0),
        (talk("a", "B", "c", "d"), 1),
        ((*talk("a", "B", "c"), said("d"), said("e")), 1),
        (talk("summary of a, b and c", "d"), 0),
        (talk("a", "b"), 2),
        (talk("a", "x"), 1),
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
def test_a_rewritten_conversation_is_a_divergence_and_says_where(now: tuple[Entry, ...], common: int) -> None:
    record, outline = known(sent(*talk("a", "b", "c"))), sent(*now)
    judged = classify(record, outline)
    assert (judged.kind, judged.common, judged.delivery) == (RequestRelation.DIVERGENCE, common, None)
    assert (judged.reason.field, judged.reason.index) == ("users", common)
    assert done(record, outline) == Fresh(is_pooled=True)


@spec("REUSE-16")
def test_a_swapped_image_is_an_edit() -> None:
    def with_image(data: str) -> Outline:
        return sent(UserMessage((File("image/png", data),)), responded(), said("and this?"))

    assert kind_of(known(with_image("AAAA")), with_image("BBBB")) == RequestRelation.DIVERGENCE


@spec("REUSE-16")
def test_a_conversation_that_ends_with_a_response_has_nothing_to_deliver() -> None:
    record = known(sent(said("a")))
    for entries in (
        (said("a"), responded()),
        (*talk("a", "b"), responded()),
        (*talk("a", "b"), responded(calls=["c1"])),
    ):
        judged = classify(record, sent(*entries))
        assert (judged.kind, judged.reason.field, judged.delivery) == (
            RequestRelation.DIVERGENCE,
            "tail",
            None,
        )


@spec("REUSE-16")
def test_an_agent_that_knows_no_user_message_is_not_continued() -> None:
    assert classify(known(sent()), sent(said("a"))).reason.field == "users"
    assert kind_of(known(sent()), sent(said("a"))) == RequestRelation.DIVERGENCE
    assert kind_of(known(sent()), sent()) == RequestRelation.DIVERGENCE
    assert kind_of(known(sent(said("a"))), sent()) == RequestRelation.DIVERGENCE


# --- the defects of the original --------------------------------------------------------------------------------------


@spec("REUSE-17")
def test_a_record_that_nobody_confirmed_is_not_continued() -> None:
    record, outline = pending(sent(said("a"))), sent(*talk("a", "b"))
    judged = classify(record, outline)
    assert (judged.kind, judged.reason.field, judged.delivery) == (RequestRelation.DIVERGENCE, "phase", None)
    for abilities in (PLAIN, FORKS, FOLLOWS):
        assert done(record, outline, abilities) == Fresh(is_pooled=True)
        assert done(record, sent(*talk("a", "b"), system="New."), abilities) == Fresh(is_pooled=True)


@spec("REUSE-17")
def test_after_an_unknown_send_an_upstream_that_can_fork_goes_on_from_what_it_surely_knew() -> None:
    record = create_resumed(known(sent(said("a"))), sent(*talk("a", "b")), now=9.0)
    fork = Fork(ForkPoint(1, "agent-1", "mark-1"), 1)
    assert done(record, sent(*talk("a", "b")), FORKS) == fork
    assert done(record, sent(*talk("a", "b", "c")), FORKS) == Fresh(is_pooled=True)
    assert done(record, sent(*talk("a", "b"), said("c")), FORKS) == replace(fork, users=2)
    assert done(record, sent(*talk("a", "b")), PLAIN) == Fresh(is_pooled=True)


@spec("REUSE-13")
def test_a_system_prompt_that_changed_for_good_is_a_rebase_once() -> None:
    record, outline = known(sent(*talk("a", "b"))), sent(*talk("a", "b", "c"), system="Today is Friday.")
    judged = classify(record, outline)
    assert (judged.kind, judged.changed, judged.common) == (RequestRelation.REBASE, ("system",), 2)
    assert done(record, outline) == Fresh(is_pooled=True, passed_over="abilities")
    assert done(record, outline, Abilities(can_retool=True)) == Fresh(is_pooled=True, passed_over="abilities")
    assert done(record, outline, FOLLOWS) == ResumeAgent(Delivery(1))
    assert (
        kind_of(known(outline), sent(*talk("a", "b", "c", "d"), system="Today is Friday."))
        == RequestRelation.CONTINUATION
    )


@spec("REUSE-13")
@pytest.mark.parametrize("texts", [("title of a",), ("a",), ("a", "b"), ("a", "x", "c"), ()])
def test_a_foreign_system_prompt_over_other_or_fewer_messages_is_a_side_call(texts: tuple[str, ...]) -> None:
    record, outline = known(sent(*talk("a", "b"))), sent(*talk(*texts), system=TITLE)
    judged = classify(record, outline)
    assert (judged.kind, judged.reason.field, judged.delivery) == (RequestRelation.SIDE_CALL, "system", None)
    assert done(record, outline, FOLLOWS) == Fresh(is_pooled=False)


@spec("REUSE-14")
def test_what_looked_like_a_side_call_and_goes_on_takes_the_record() -> None:
    """The race of 2.1: the title came first and got the record."""
    record = known(sent(said("title of a"), system=TITLE))
    first = sent(said("a"))
    assert kind_of(record, first) == RequestRelation.SIDE_CALL
    record = with_side_call(record, first)
    second = sent(*talk("a", "b"))
    assert (kind_of(record, second), done(record, second)) == (RequestRelation.REBASE, Fresh(is_pooled=True))
    assert kind_of(known(second), sent(*talk("a", "b", "c"))) == RequestRelation.CONTINUATION


@spec("REUSE-14")
def test_a_side_call_that_is_only_repeated_takes_nothing() -> None:
    record = with_side_call(known(sent(said("a"))), sent(said("t"), system=TITLE))
    assert kind_of(record, sent(said("t"), system=TITLE)) == RequestRelation.SIDE_CALL
    assert kind_of(record, sent(*talk("t", "u"), system="A third one.")) == RequestRelation.SIDE_CALL
    assert kind_of(record, sent(*talk("another", "u"), system=TITLE)) == RequestRelation.SIDE_CALL
    assert kind_of(record, sent(*talk("a", "b"))) == RequestRelation.CONTINUATION


@spec("REUSE-13")
def test_another_model_folder_or_permission_never_gets_the_old_agent() -> None:
    record, outline = known(sent(said("a"))), sent(*talk("a", "b"), identity={"model": "haiku"})
    judged = classify(record, outline)
    assert (judged.kind, judged.changed, judged.reason.field) == (
        RequestRelation.REBASE,
        ("identity",),
        "identity",
    )
    able = Abilities(can_reinstruct=True, can_retool=True, can_fork=True)
    assert done(record, outline, able) == Fresh(is_pooled=True, passed_over="abilities")
    assert kind_of(record, sent(said("t"), identity={"model": "haiku"})) == RequestRelation.SIDE_CALL


@spec("REUSE-15")
@pytest.mark.parametrize("field", ["tools", "servers"])
def test_other_tools_or_servers_force_a_fresh_agent_unless_it_can_be_given_them(field: str) -> None:
    record = known(sent(said("a")))
    outline = (
        sent(*talk("a", "b"), tools=TOOLS)
        if field == "tools"
        else sent(*talk("a", "b"), servers=[ForwardedMcpServer("files", command="serve")])
    )
    judged = classify(record, outline)
    assert (judged.kind, judged.changed, judged.reason.field) == (
        RequestRelation.TOOLS_CHANGED,
        (field,),
        field,
    )
    assert done(record, outline) == Fresh(is_pooled=True, passed_over="abilities")
    assert done(record, outline, FOLLOWS) == ResumeAgent(Delivery(1))


@spec("REUSE-15")
def test_other_tools_over_a_rewritten_conversation_are_no_resume_either() -> None:
    record, outline = marked("a", "b"), sent(*talk("a", "B"), tools=TOOLS)
    assert (kind_of(record, outline), done(record, outline, FOLLOWS)) == (
        RequestRelation.TOOLS_CHANGED,
        Fresh(is_pooled=True),
    )
    able = Abilities(can_retool=True, can_fork=True)
    assert done(record, outline, able) == Fork(ForkPoint(1, "agent-1", "mark-1"), 1)
    assert kind_of(record, sent(said("t"), tools=TOOLS)) == RequestRelation.SIDE_CALL


@spec("REUSE-12")
def test_a_repeated_request_is_never_sent_to_the_agent_that_has_it() -> None:
    record, outline = marked("a", "b"), sent(*talk("a", "b"))
    judged = classify(record, outline)
    assert (judged.kind, judged.reason.index, judged.common, judged.new) == (RequestRelation.REPEAT, 1, 2, 0)
    assert done(record, outline) == Fresh(is_pooled=True)
    assert done(record, outline, FORKS) == Fork(ForkPoint(1, "agent-1", "mark-1"), 1)
    first = sent(said("a"))
    assert (kind_of(known(first), first), done(known(first), first, FORKS)) == (
        RequestRelation.REPEAT,
        Fresh(is_pooled=True),
    )
    assert kind_of(pending(first), first) == RequestRelation.REPEAT


# --- results ----------------------------------------------------------------------------------------------------------


@spec("REUSE-11")
def test_the_results_that_the_agent_waits_for_are_a_continuation() -> None:
    record = known(sent(said("a")), calls=["c1", "c2"])
    outline = sent(said("a"), responded(calls=["c2", "c1"]))
    judged = classify(record, outline)
    assert (judged.kind, judged.reason.field, judged.new) == (RequestRelation.CONTINUATION, "results", 0)
    assert done(record, outline) == ResumeAgent(Delivery(0, ("c2", "c1")))


@spec("REUSE-11")
def test_results_and_new_words_go_together() -> None:
    record = known(sent(said("a")), calls=["c1"])
    outline = sent(said("a"), responded(calls=["c1"]), said("b"), said("c"))
    assert kind_of(record, outline) == RequestRelation.CONTINUATION_MULTI
    assert done(record, outline) == ResumeAgent(Delivery(2, ("c1",)))


@spec("REUSE-11")
@pytest.mark.parametrize(
    "entries",
    [
        (said("a"), responded(), said("b")),
        (said("a"), said("b")),
        (said("a"), responded(calls=["c1"]), said("b")),
        (said("a"), responded(calls=["c1", "x"]), said("b")),
        (said("a"), responded(calls=["c1", "c2", "x"]), said("b")),
        (said("a"), responded(calls=["x"]), responded(calls=["c1", "c2"]), said("b")),
        (said("a"), responded(calls=["c1", "c2"]), responded(), said("b")),
        (said("a"), responded(calls=["c1"])),
    ],
)
def test_an_agent_is_given_all_results_it_waits_for_and_no_others(entries: tuple[Entry, ...]) -> None:
    judged = classify(known(sent(said("a")), calls=["c1", "c2"]), sent(*entries))
    assert (judged.kind, judged.delivery) == (RequestRelation.DIVERGENCE, None)


@spec("REUSE-11")
def test_results_of_calls_that_the_agent_never_made_are_a_divergence() -> None:
    outline = sent(said("a"), responded(calls=["x"]), said("b"))
    assert classify(known(sent(said("a"))), outline).reason.field == "results"
    assert (
        kind_of(known(sent(said("a"))), sent(said("a"), responded(calls=["x"]))) == RequestRelation.DIVERGENCE
    )


@spec("REUSE-11", "REUSE-12")
def test_ids_that_are_used_again_do_not_make_old_results_new_ones() -> None:
    once = sent(said("a"), responded(calls=["c1"]))
    record = with_answer(
        create_resumed(known(sent(said("a")), calls=["c1"]), once, now=4.0),
        agent="agent-1",
        mark="",
        open_calls=["c1"],
        now=5.0,
    )
    assert kind_of(record, once) == RequestRelation.REPEAT
    assert done(record, once) == Fresh(is_pooled=True)
    assert kind_of(record, sent(said("a"), responded(calls=["c1"]), said("b"))) == RequestRelation.DIVERGENCE
    twice = sent(said("a"), responded(calls=["c1"]), responded(calls=["c1"]))
    assert done(record, twice) == ResumeAgent(Delivery(0, ("c1",)))


@spec("REUSE-11")
def test_a_host_that_leaves_out_what_tools_said_is_still_a_continuation() -> None:
    given_results = sent(said("a"), responded(calls=["c1"]))
    record = create_resumed(known(sent(said("a")), calls=["c1"]), given_results, now=4.0)
    record = with_answer(record, agent="agent-1", mark="m", open_calls=(), now=5.0)
    for entries in (talk("a", "b"), (said("a"), responded(calls=["c1"]), responded(), said("b"))):
        assert done(record, sent(*entries)) == ResumeAgent(Delivery(1))
    assert done(record, sent(said("a"), responded(calls=["c1"]), said("b"))) == ResumeAgent(Delivery(1))


@spec("REUSE-11", "REUSE-13")
def test_results_under_a_new_system_prompt_are_a_rebase() -> None:
    record = known(sent(said("a")), calls=["c1"])
    outline = sent(said("a"), responded(calls=["c1"]), system="New.")
    assert kind_of(record, outline) == RequestRelation.REBASE
    assert done(record, outline, FOLLOWS) == ResumeAgent(Delivery(0, ("c1",)))


@spec("REUSE-11")
def test_results_before_messages_that_are_known_are_no_news() -> None:
    seen = (said("a"), responded(calls=["c1"]), said("b"))
    after = sent(*seen, said("c"))
    assert done(known(sent(*seen)), after) == ResumeAgent(Delivery(1))
    assert kind_of(known(sent(*seen), calls=["c1"]), after) == RequestRelation.DIVERGENCE


# --- forks and age ----------------------------------------------------------------------------------------------------


@spec("REUSE-19")
@pytest.mark.parametrize(
    ("entries", "fork"),
    [
        (talk("a", "b", "C"), (2, 1)),
        ((*talk("a", "b", "C"), said("d")), (2, 2)),
        (talk("a", "B"), (1, 1)),
        (talk("a", "b"), (1, 1)),
        (talk("a", "b", "c"), (2, 1)),
        ((said("a"), responded(), said("b"), said("c"), said("d")), None),
        (talk("a", "B", "c"), None),
        (talk("A", "b"), None),
        (said("a"), None),
        ((said("a"), responded(), responded(calls=["x"]), said("B")), None),
    ],
)
def test_a_fork_starts_at_the_last_mark_with_only_users_behind_it(
    entries: tuple[Entry, ...] | Entry, fork: tuple[int, int] | None
) -> None:
    entries = entries if isinstance(entries, tuple) else (entries,)
    record = marked("a", "b", "c")
    expected: Action = Fresh(is_pooled=True)
    if fork is not None:
        expected = Fork(ForkPoint(fork[0], "agent-1", f"mark-{fork[0]}"), fork[1])
    elif entries == (said("a"), responded(), said("b"), said("c"), said("d")):
        expected = ResumeAgent(Delivery(1))
    assert done(record, sent(*entries), FORKS) == expected


@spec("REUSE-26")
def test_a_resume_at_an_age_that_was_seen_to_die_is_not_tried() -> None:
    record, outline = marked("a", "b"), sent(*talk("a", "b", "c"))
    judged = classify(record, outline)
    assert judged.kind == RequestRelation.CONTINUATION
    assert action(judged, outline, record, FORKS, age_s=99.0, limit_s=100.0) == ResumeAgent(Delivery(1))
    old = action(judged, outline, record, FORKS, age_s=100.0, limit_s=100.0)
    assert old == Fresh(is_pooled=True, passed_over="stale")


# --- properties -------------------------------------------------------------------------------------------------------

_entries = st.lists(
    st.one_of(
        st.builds(said, st.sampled_from("ab")),
        st.just(responded()),
        st.just(responded(calls=["c1"])),
        st.just(responded(calls=["c1", "c2"])),
    ),
    max_size=6,
)
_outlines = st.builds(
    lambda entries, system, tools, model: sent(
        *entries, system=system, tools=tools, identity={"model": model}
    ),
    _entries,
    st.sampled_from(["", "s"]),
    st.sampled_from([(), TOOLS]),
    st.sampled_from(["", "m"]),
)
_records = st.builds(
    lambda outline, calls, aside, is_confirmed: with_side_call(
        known(outline, calls=calls) if is_confirmed else pending(outline), aside
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
def test_every_request_is_of_one_kind_and_always_the_same(
    record: PoolRecord | None, outline: Outline, is_ephemeral: object
) -> None:
    judged = classify(record, outline, is_ephemeral=bool(is_ephemeral))
    assert judged == classify(record, outline, is_ephemeral=bool(is_ephemeral))
    assert judged.common + judged.new == outline.fingerprint.count
    assert judged.reason.words


@spec("REUSE-9", "REUSE-17")
@given(_records, _outlines)
def test_a_continuation_begins_with_exactly_what_a_confirmed_agent_knows(
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
def test_nobody_is_told_less_than_what_is_lacking_nor_anything_twice(
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
def test_no_agent_is_kept_that_does_not_go_by_what_changed(
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
def test_only_side_calls_leave_the_record_alone(
    record: PoolRecord | None, outline: Outline, abilities: Abilities
) -> None:
    judged = classify(record, outline)
    chosen = action(judged, outline, record, abilities)
    is_left = isinstance(chosen, Fresh) and not chosen.is_pooled
    assert is_left == (judged.kind is RequestRelation.SIDE_CALL)


def test_all_kinds_occur_in_the_examples_of_the_properties() -> None:
    outlines = [
        sent(*entries, system=system) for entries in (talk("a"), talk("a", "b"), talk("b")) for system in "st"
    ]
    outlines += [sent(*talk("a", "b"), tools=TOOLS, system="s"), sent(*talk("a", "b"), said("c"), system="s")]
    records = [None, *(known(outline) for outline in outlines)]
    kinds = {kind_of(record, outline) for record, outline in itertools.product(records, outlines)}
    assert kinds == set(RequestRelation)


def test_an_agent_without_a_name_is_nobody_to_resume() -> None:
    record = confirm(pending(sent(said("a"))), "", now=2.0)
    assert done(record, sent(*talk("a", "b"))) == Fresh(is_pooled=True)
