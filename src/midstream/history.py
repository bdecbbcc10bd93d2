"""Histories of other people's agents: check them, repair them, convert them.

Needs nothing else of midstream: plain dicts of one provider in, plain dicts out, no I/O.
"""

from __future__ import annotations

from midstream.core.formats.named import format_named
from midstream.core.formats.parts import Value
from midstream.core.profiles import profile_for
from midstream.core.repair.engine import repaired
from midstream.core.repair.report import Advice, Edit, Finding, Repaired
from midstream.errors import InvalidHistoryError

__all__ = ["Advice", "Edit", "Finding", "Repaired", "repair"]


def repair(
    messages: list[Value],
    *,
    format: str = "anthropic",  # noqa: A002 - the word every caller will look for
    profile: str | None = None,
    model: str | None = None,
    thinking: bool | None = None,
    system: Value = None,
    live_tail: bool = False,
) -> Repaired:
    """Make a history acceptable to its provider, losing nothing; the same list comes back if it already is."""
    if not isinstance(messages, list):
        raise InvalidHistoryError(f"a history is a list of messages, not {type(messages).__name__}")
    form = format_named(format)
    return repaired(
        messages,
        form,
        profile_for(form, profile),
        system=system,
        model=model,
        thinking=thinking,
        live_tail=live_tail,
    )
