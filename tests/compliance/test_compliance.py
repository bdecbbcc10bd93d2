"""The compliance suite of Open Responses passes against `midstream gateway`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.compliance.__main__ import SUITE, page_of, run_suite

TESTS = 17


@pytest.mark.slow
async def test_the_compliance_suite_passes(tmp_path: Path) -> None:
    if not (SUITE / "source.json").exists():
        pytest.skip("the suite is not installed: make compliance")
    _, output, model = await run_suite(SUITE, tmp_path, "--json")
    report = json.loads(output)
    assert report["summary"] == {"passed": TESTS, "failed": 0, "skipped": 0, "total": TESTS}
    assert model.images == 1
    transcripts = "\n\n".join(model.transcripts)
    assert "phase" not in transcripts
    page = page_of(report, json.loads((SUITE / "source.json").read_text()))
    assert f"{TESTS} of {TESTS} passed" in page
