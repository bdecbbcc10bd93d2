from __future__ import annotations

import pytest

from midstream.core.formats.named import format_named
from midstream.core.profiles import profile_for
from midstream.core.repair.quick import Marks
from midstream.core.repair.reading import has_surrogates
from tests.core.repair.reported import ANTHROPIC, BEDROCK, GEMINI, PYDANTIC_AI, Case


@pytest.mark.parametrize("case", [*ANTHROPIC, *BEDROCK, *GEMINI, *PYDANTIC_AI], ids=lambda case: case.name)
def test_a_broken_history_is_never_all_fine(case: Case) -> None:
    profile = profile_for(format_named(case.form), case.profile)
    if has_surrogates(case.messages):
        return  # half characters are found before anybody looks
    assert not Marks(case.messages, case.form, profile).are_all_fine()
