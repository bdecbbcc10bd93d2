"""Classification of a request by its relation to a recorded conversation, and the resulting action.

Both functions are total and pure. The table is in `docs/spec/reuse.md`. In doubt, a fresh agent gets the whole
transcript: that costs tokens and is never wrong.
"""

from __future__ import annotations

from collections import Counter
from enum import StrEnum
from typing import Literal

from msgspec import Struct

from midstream.agents.pool_records import Aside, ForkPoint, PoolRecord, with_aside
from midstream.agents.upstream_abilities import Abilities
from midstream.models.fingerprint import LINK_BYTES, Fingerprint, Outline, common_users


class RequestRelation(StrEnum):
    """Relation of a request to a record."""

    NEW = "new"
    """There is no record."""
    CONTINUATION = "continuation"
    """The agent lacks only the end: one user message, or the results it waits for."""
    CONTINUATION_MULTI = "continuation-multi"
    """The agent lacks only the end: several successive user messages."""
    REPEAT = "repeat"
    """The agent got exactly this request: a retry, or a request for another answer."""
    SIDE_CALL = "side-call"
    """Another conversation under the same key, such as one that makes a title."""
    REBASE = "rebase"
    """The same conversation continues under another system prompt or identity, or a noted side call continues."""
    TOOLS_CHANGED = "tools-changed"
    """The same conversation has other tools or servers."""
    DIVERGENCE = "divergence"
    """The conversation differs from the agent's: edited, reverted, compacted, answered elsewhere."""


Field = Literal[
    "ephemeral", "record", "identity", "system", "tools", "servers", "users", "results", "tail", "phase"
]


class Reason(Struct, frozen=True):
    """The reason for a classification.

    Args:
        field: The first difference, or the beginning of the new part.
        index: Number of the user message from 0; None if it concerns none.
        words: A text for people, without content.
    """

    field: Field
    index: int | None
    words: str


class Delivery(Struct, frozen=True):
    """Messages that are new to the agent: the results of these calls, and then so many user messages at the end."""

    users: int
    results: tuple[str, ...] = ()


class Classification(Struct, frozen=True):
    """Relation of a request to a record, with its details.

    Args:
        common: Number of common user messages at the beginning.
        new: Number of the request's user messages after these.
        changed: Differing fields of identity, system, tools and servers.
        delivery: The messages that the agent lacks; None if unknown.
    """

    kind: RequestRelation
    reason: Reason
    common: int = 0
    new: int = 0
    changed: tuple[Field, ...] = ()
    delivery: Delivery | None = None


class ResumeAgent(Struct, frozen=True):
    """Resume the record's agent and send the new messages, one by one."""

    delivery: Delivery


class Fork(Struct, frozen=True):
    """Open a fork at `mark` and send the last `users` user messages, one by one."""

    mark: ForkPoint
    users: int


class Fresh(Struct, frozen=True):
    """Open a fresh agent and send the whole transcript.

    Args:
        is_pooled: Whether it gets the record; otherwise the record is unchanged and the agent is deleted afterwards.
        passed_over: Why the record's agent was not resumed although the relation permits it; "" if it does not.
    """

    is_pooled: bool
    passed_over: Literal["", "stale", "abilities", "unechoed"] = ""


Action = ResumeAgent | Fork | Fresh


def classify(record: PoolRecord | None, outline: Outline, *, is_ephemeral: bool = False) -> Classification:
    """Return the relation of a request to a record.

    Args:
        is_ephemeral: Whether the client application marks this as a side call.
    """
    theirs = outline.fingerprint
    if is_ephemeral:
        return Classification(
            RequestRelation.SIDE_CALL,
            Reason("ephemeral", None, "declared by the client application"),
            new=theirs.count,
        )
    if record is None:
        return Classification(RequestRelation.NEW, Reason("record", None, "no record"), new=theirs.count)
    mine = record.fingerprint
    common = common_users(mine.users, theirs.users)
    changed = _find_changes(mine, theirs)
    delivery = _delivery(record, outline, common)
    kind, reason = _judge(record, outline, common, changed, delivery)
    if not record.is_resumable or _is_of_aside(record, outline, common, changed):
        delivery = None
    return Classification(kind, reason, common, theirs.count - common, changed, delivery)


def action(
    classification: Classification,
    outline: Outline,
    record: PoolRecord | None,
    abilities: Abilities,
    *,
    age_s: float = 0.0,
    limit_s: float | None = None,
    is_verifiable: bool = True,
    uncut: Outline | None = None,
) -> Action:
    """Return the action for a classified request.

    Args:
        age_s: Silence of the record's agent, in seconds.
        limit_s: Age after which a resume is not worth a try (`LearnedRetention.limit_s`).
        is_verifiable: Whether the upstream sends the id of the resumed agent (`LearnedRetention.never_echoes`).
        uncut: The outline of the request without the cut answers at its end; None if there are none.
    """
    if classification.kind is RequestRelation.SIDE_CALL:
        return Fresh(is_pooled=False)
    if record is None:
        return Fresh(is_pooled=True)
    if limit_s is not None and age_s >= limit_s:
        return Fresh(is_pooled=True, passed_over="stale")
    if _is_of_aside(record, outline, classification.common, classification.changed):
        return Fresh(is_pooled=True)  # neither the record's agent nor its marks belong to this conversation
    if not _can_follow(classification.changed, abilities):
        return Fresh(is_pooled=True, passed_over="abilities" if classification.delivery else "")
    if classification.delivery is not None:
        if not is_verifiable:
            return Fresh(is_pooled=True, passed_over="unechoed")
        return ResumeAgent(classification.delivery)
    if abilities.can_fork:
        return _fork(classification.common, uncut or outline, record) or Fresh(is_pooled=True)
    return Fresh(is_pooled=True)


def asides_of(classification: Classification, record: PoolRecord | None) -> tuple[Aside, ...]:
    """Return the side calls for the record that replaces `record`.

    A rebase may have been a side call that began like the conversation itself; then the conversation continues. A
    request without anything in common with the record is no evidence about its side calls.
    """
    if record is None:
        return ()
    if classification.kind is RequestRelation.REBASE:
        return with_aside(record.asides, record.fingerprint)
    return () if classification.common else record.asides


_BASE: tuple[Field, ...] = ("identity", "system", "tools", "servers")
"""The fields before the first message, in the order in which a difference is reported."""


def _find_changes(mine: Fingerprint, theirs: Fingerprint) -> tuple[Field, ...]:
    return tuple(field for field in _BASE if getattr(mine, field) != getattr(theirs, field))


def _delivery(record: PoolRecord, outline: Outline, common: int) -> Delivery | None:
    """Return the messages that a confirmed agent lacks, by users and results alone; None if unknown.

    The client application must have answered exactly the calls that the agent requested; results of other calls would
    be lost. Equal ids at the end prove nothing, because some upstreams reuse ids: so all results since the last user
    message are counted, with repetitions.
    """
    known, count = record.fingerprint.count, outline.fingerprint.count
    new = count - known
    if common < known or known == 0 or outline.tail_users < new or (new == 0 and outline.tail_users):
        return None
    # Content before the tail answers another message if the tail begins with known messages.
    answered = Counter(outline.answered if outline.tail_users == new else ())
    if record.open_calls:
        is_requested = sorted(outline.tail_results) == sorted(record.open_calls)
        is_all = answered == Counter((*record.answered, *record.open_calls))
        return Delivery(new, outline.tail_results) if is_requested and is_all else None
    # Fewer results are permitted: many client applications omit results of earlier turns.
    return Delivery(new) if new and answered <= Counter(record.answered) else None


def _judge(
    record: PoolRecord, outline: Outline, common: int, changed: tuple[Field, ...], delivery: Delivery | None
) -> tuple[RequestRelation, Reason]:
    known, count = record.fingerprint.count, outline.fingerprint.count
    is_longer = delivery is not None or 0 < common == known < count
    is_foreign = _is_foreign(common, changed)
    if is_foreign and is_longer:
        return RequestRelation.REBASE, Reason(
            changed[0], None, f"the {changed[0]} changed, and the conversation continues"
        )
    if is_foreign:
        if _is_of_aside(record, outline, common, changed):
            words = "an assumed side call continues"
            return RequestRelation.REBASE, Reason(changed[0], None, words)
        words = f"the {changed[0]} changed, and the conversation does not continue"
        return RequestRelation.SIDE_CALL, Reason(changed[0], None, words)
    if changed:
        return RequestRelation.TOOLS_CHANGED, Reason(changed[0], None, f"the {changed[0]} changed")
    if delivery is None:
        return _unfit(record, outline, common)
    if not record.is_resumable:
        words = "it is uncertain whether the agent received the last message"
        return RequestRelation.DIVERGENCE, Reason("phase", None, words)
    if delivery.users == 0:
        return RequestRelation.CONTINUATION, Reason("results", None, "the results of its calls are new")
    kind = RequestRelation.CONTINUATION if delivery.users == 1 else RequestRelation.CONTINUATION_MULTI
    return kind, Reason("users", common, f"{delivery.users} new at the end")


def _unfit(record: PoolRecord, outline: Outline, common: int) -> tuple[RequestRelation, Reason]:
    """Classify a request with the same base whose messages do not continue the agent's conversation."""
    known, count = record.fingerprint.count, outline.fingerprint.count
    divergence = RequestRelation.DIVERGENCE
    if common < min(known, count):
        return divergence, Reason("users", common, f"user message {common} is another one")
    if count < known:
        return divergence, Reason("users", count, f"{known - count} user messages were removed")
    if outline.tail_users == 0 and not (outline.tail_results and count == known):
        return divergence, Reason("tail", None, "the last message is neither a user's nor an awaited result")
    if count == known:
        if outline.tail_users:
            return RequestRelation.REPEAT, Reason(
                "users", count - 1, "the agent already received this message"
            )
        if Counter(outline.answered) <= Counter(record.answered):
            return RequestRelation.REPEAT, Reason("results", None, "the agent already received these results")
    if outline.tail_users < count - known:
        return divergence, Reason("users", known, "responses of others stand between the new messages")
    if known == 0:
        return divergence, Reason("users", 0, "the agent received no user message")
    return divergence, Reason("results", None, "the results are not those of the calls that the agent made")


def _is_foreign(common: int, changed: tuple[Field, ...]) -> bool:
    """Whether a request may be of another conversation than the record, because of its fields before the messages.

    Other tools or servers alone do not separate conversations that have a message in common.
    """
    return "identity" in changed or "system" in changed or bool(changed and not common)


def _is_of_aside(record: PoolRecord, outline: Outline, common: int, changed: tuple[Field, ...]) -> bool:
    """Whether a request continues a side call beside the record: then the record was the side call (REUSE-14)."""
    return _is_foreign(common, changed) and any(_continues(aside, outline) for aside in record.asides)


def _continues(aside: Aside, outline: Outline) -> bool:
    """Whether a request continues a presumed side call, with more user messages or with results."""
    theirs = outline.fingerprint
    is_same = aside.system == theirs.system and aside.identity == theirs.identity
    is_longer = aside.users < theirs.count or bool(outline.tail_results and not outline.tail_users)
    end = aside.users * LINK_BYTES
    return is_same and is_longer and end > 0 and theirs.users[end - LINK_BYTES : end] == aside.link


def _can_follow(changed: tuple[Field, ...], abilities: Abilities) -> bool:
    """Whether a resumed or forked agent follows these changes. Its identity never changes."""
    can: dict[Field, bool] = {
        "identity": False,
        "system": abilities.can_reinstruct,
        "tools": abilities.can_retool,
        "servers": abilities.can_retool,
    }
    return all(can[field] for field in changed)


def _fork(common: int, outline: Outline, record: PoolRecord) -> Fork | None:
    """Return the fork from the last mark that is followed only by user messages, at least one; or None.

    A mark contains its agent's own answers. Results directly before the tail may be of calls that it never made.
    """
    count = outline.fingerprint.count
    first = count - outline.tail_users + bool(outline.tail_results)
    for mark in reversed(record.marks):
        if first <= mark.users <= min(common, count - 1):
            return Fork(mark, count - mark.users)
    return None
