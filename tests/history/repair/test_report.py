from __future__ import annotations

from midstream.history.repair.report import Edit, EditLog, Repaired


def test_a_report_keeps_its_edits_in_order() -> None:
    report = EditLog()
    report.note("blank-text", 3, "dropped", part=1)
    report.note("unsigned-thinking", 4, "dropped", lost="hm")
    assert report.edits == [
        Edit("blank-text", 3, "dropped", 1),
        Edit("unsigned-thinking", 4, "dropped", lost="hm"),
    ]


def test_only_a_text_is_a_call_id_in_an_edit() -> None:
    report = EditLog()
    for odd in (7, ["a"], {"id": "a"}, None, "a"):
        report.note("dangling-call", 0, "added a result", call_id=odd)
    assert [edit.call_id for edit in report.edits] == [None, None, None, None, "a"]


def test_a_repair_is_lossy_when_an_edit_lost_content() -> None:
    assert Repaired([], edits=(Edit("unsigned-thinking", 0, "dropped", lost="hm"),)).is_lossy
    kept = Repaired([], edits=(Edit("dangling-call", 0, "added a result"),))
    assert (kept.is_changed, kept.is_lossy) == (True, False)
