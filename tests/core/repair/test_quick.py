from __future__ import annotations

from random import Random

import pytest

from midstream.core.formats.named import format_named
from midstream.core.profiles import profile_for
from midstream.core.repair.quick import DOUBT, Marks
from tests.core.repair.histories import FORMATS, broken, valid
from tests.core.repair.rules import refusals


@pytest.mark.parametrize("form", FORMATS)
def test_what_is_marked_fine_is_fine(form: str) -> None:
    profile = profile_for(format_named(form), None)
    for seed in range(150):
        messages = broken(form, Random(seed))
        if Marks(messages, form, profile).are_all_fine(profile):
            # Half characters are looked for before.
            assert set(refusals(form, messages)) <= {"X-UTF8"}


@pytest.mark.parametrize("form", FORMATS)
def test_ordinary_messages_are_not_doubted(form: str) -> None:
    profile = profile_for(format_named(form), None)
    marks = Marks(valid(form, Random(3), turns=30), form, profile)
    assert marks.are_all_fine(profile)
    assert DOUBT not in marks.marks
