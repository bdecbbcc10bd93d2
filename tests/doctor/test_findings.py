"""The status that findings amount to, and a rule in words for every code of the repair."""

from __future__ import annotations

from midstream.doctor.findings import RULES, Status, finding, finding_of, rule_of, status_of
from midstream.history.repair.report import Edit
from midstream.history.repair.rules import REFUSALS


def test_rules_of_messages_are_the_repairs_and_those_of_files_are_ours() -> None:
    assert RULES.keys() & REFUSALS.keys() == set()
    assert finding_of(Edit("dangling-call", 3, "did it")).rule == REFUSALS["dangling-call"].rule
    assert rule_of("broken-line") == RULES["broken-line"]


def test_a_code_without_a_rule_explains_itself() -> None:
    assert rule_of("a-new-code") == "a new code"


def test_one_loss_makes_the_whole_lossy_and_white_space_is_not_a_loss() -> None:
    kept, blank = finding("broken-chain", "mended"), finding("broken-line", "left out", lost=" \n")
    lost = finding("broken-line", "left out", lost="a line")
    assert [status_of(each) for each in ([], [kept, blank], [kept, lost])] == [
        Status.CLEAN,
        Status.FINDINGS,
        Status.LOSSY,
    ]
