from __future__ import annotations

import pytest

from midstream.history.compaction import SHOWN_CHARS_MAX, next_cut
from midstream.history.messages import History, Outcome, Response, Step, ToolCall, ToolResult, UserMessage
from midstream.session.blobs import (
    BLOB_BYTES_MIN,
    EXCERPT_CHARS,
    Blob,
    blob_of,
    digests_in,
    is_digest,
    split_large_results,
    whole,
)
from midstream.session.records import CallEnded, Record, ResultArrivedLate, StepCommitted, decode, encode
from tests.spec import spec

LARGE = "é" * BLOB_BYTES_MIN


def _history(result: ToolResult) -> History:
    call = ToolCall(result.call_id, "read")
    return History((UserMessage.of("hi"), Step(Response((call,)), (result,))))


def _excerpt(content: str, outcome: Outcome = Outcome.OK) -> tuple[ToolResult, Blob]:
    (record,), (blob,) = split_large_results([CallEnded(1, 1, ToolResult("a", content, outcome), 5.0)])
    assert isinstance(record, CallEnded)
    return record.result, blob


@spec("TURN-70")
@pytest.mark.parametrize("kind", [CallEnded, ResultArrivedLate])
def test_a_large_result_is_replaced_by_its_beginning_digest_and_size(
    kind: type[CallEnded | ResultArrivedLate],
) -> None:
    records, blobs = split_large_results(
        [kind(1, 1, ToolResult("a", LARGE, Outcome.ERROR), 5.0), StepCommitted(1, 1)]
    )
    blob = blob_of(LARGE)
    content = f"{LARGE[:EXCERPT_CHARS]}\n[+{len(LARGE) - EXCERPT_CHARS} characters]"
    short = ToolResult("a", content, Outcome.ERROR, blob.digest, 2 * BLOB_BYTES_MIN)
    assert records == (kind(1, 1, short, 5.0), StepCommitted(1, 1))
    assert blobs == (blob,)
    assert blob.body == LARGE.encode()
    assert is_digest(blob.digest)
    assert split_large_results(records) == (records, ())


@pytest.mark.parametrize("size", [0, 1, BLOB_BYTES_MIN - 1])
def test_a_result_that_is_not_large_stays_unchanged(size: int) -> None:
    record: Record = CallEnded(1, 1, ToolResult("a", "x" * size), 5.0)
    (kept,), blobs = split_large_results([record])
    assert kept is record
    assert blobs == ()


@spec("TURN-70")
def test_the_model_receives_the_whole_result_and_no_trace_of_its_storage() -> None:
    short, blob = _excerpt(LARGE)
    history = _history(short)
    assert digests_in(history) == {blob.digest}
    assert whole(history, {blob.digest: blob.body}) == _history(ToolResult("a", LARGE))


def test_a_result_beyond_the_models_limit_is_cut_with_a_mark() -> None:
    short, blob = _excerpt("x" * (SHOWN_CHARS_MAX + 7))
    _, step = whole(_history(short), {blob.digest: blob.body}).entries
    assert isinstance(step, Step)
    assert step.results[0].content == "x" * SHOWN_CHARS_MAX + "\n[+7 characters]"


def test_a_history_without_large_results_is_the_same_object() -> None:
    history = _history(ToolResult("a", "short"))
    assert digests_in(history) == frozenset()
    assert whole(history, {}) is history


def test_an_excerpt_is_shown_where_the_whole_result_is_missing() -> None:
    history = _history(_excerpt(LARGE)[0])
    assert whole(history, {"e" * 64: b"other"}) == history


def test_a_record_of_an_older_version_is_decoded_unchanged() -> None:
    before = b'{"type":"call_ended","turn":1,"response":1,"result":{"call_id":"a","content":"x"},"at":5.0}'
    assert encode(decode(before)) == before


@pytest.mark.parametrize("text", ["", "a" * 63, "g" * 64, "A" * 64, "a" * 64 + "\n", "../" + "a" * 61])
def test_a_malformed_digest_is_not_a_digest(text: str) -> None:
    assert not is_digest(text)


@spec("TURN-26")
def test_a_cut_of_a_long_conversation_is_measured_by_the_content_for_the_model() -> None:
    short, _ = _excerpt(LARGE)
    old = _history(short)
    entries = (*old.entries, *_history(ToolResult("a", "x" * 4000)).entries)
    assert next_cut(History(entries)) == 2  # The large one counts completely: the rest is the lesser half.
