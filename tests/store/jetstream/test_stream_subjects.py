"""Subjects: any name can be encoded, and none is readable."""

from __future__ import annotations

from midstream.store.contract import PRINCIPAL_OF
from midstream.store.jetstream.stream_subjects import StreamSubjects
from midstream.testing.store_fakes import ODD_NAMES

SUBJECTS = StreamSubjects("app", 16)


def test_any_name_is_one_subject_in_one_stream() -> None:
    places = [SUBJECTS.session(name) for name in ODD_NAMES]
    assert len({place.subject for place in places}) == len(ODD_NAMES)
    patterns = SUBJECTS.patterns()
    for place in places:
        assert place.journal.startswith(patterns[place.stream].removesuffix(">"))
        assert len(place.journal.split(".")) == 5
        assert place.journal.isascii()


def test_a_session_and_its_parts_are_in_one_stream_separate_from_entries() -> None:
    whole, part = SUBJECTS.session("s"), SUBJECTS.session("s::1.1.0::2.1.0")
    assert whole.stream == part.stream
    assert whole.family == part.family
    assert whole.subject != part.subject
    stream, subject = SUBJECTS.entry(PRINCIPAL_OF, "s::1.1.0::2.1.0")
    assert (stream, subject.startswith(f"{part.subject}.e.")) == (part.stream, True)
    assert SUBJECTS.entry("pool", "s")[0] == "app-kv"


def test_sessions_are_spread_over_all_streams() -> None:
    assert {SUBJECTS.session(f"s{number}").stream for number in range(400)} == {*SUBJECTS.shards}
