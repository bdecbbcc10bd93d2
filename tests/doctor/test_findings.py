"""What findings amount to, and that every code of the repair has its rule in words."""

from __future__ import annotations

import re
from pathlib import Path

from midstream.core.repair import engine
from midstream.core.repair.report import Edit
from midstream.doctor.findings import RULES, Status, finding, finding_of, status_of

CODE = re.compile(r"\"([a-z]+(?:-[a-z]+)+)\"")
# Words of the formats and outcomes, which look like codes.
OTHERS = {"call-later", "not-started", "openai-chat", "openai-responses", "pydantic-ai", "tool-call"}
OTHERS |= {"tool-return", "user-prompt", "system-prompt", "retry-prompt"}


def test_every_code_the_repair_writes_out_has_its_rule() -> None:
    sources = Path(engine.__file__).parent.glob("*.py")
    codes = {code for source in sources for code in CODE.findall(source.read_text(encoding="utf-8"))}
    assert len(codes) > 10, "nothing was looked at"
    assert sorted(codes - set(RULES) - OTHERS) == []


def test_a_code_without_a_rule_explains_itself() -> None:
    assert finding_of(Edit("a-new-code", 3, "did it")).rule == "a new code"


def test_one_loss_makes_the_whole_lossy_and_white_space_is_none() -> None:
    kept, blank = finding("broken-chain", "mended"), finding("broken-line", "left out", lost=" \n")
    lost = finding("broken-line", "left out", lost="a line")
    assert [status_of(each) for each in ([], [kept, blank], [kept, lost])] == [
        Status.CLEAN,
        Status.FINDINGS,
        Status.LOSSY,
    ]
