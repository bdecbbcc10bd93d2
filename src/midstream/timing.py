"""Deadlines and limits of silence, as values. Time is an argument."""

from __future__ import annotations

import math
from enum import StrEnum

from msgspec import Struct

from midstream.number_checks import WAIT_S_MAX, require_seconds


class StalledOn(StrEnum):
    """The thing that is awaited during a silence."""

    FIRST_TOKEN = "first_token"  # noqa: S105 - no secret
    BETWEEN_TOKENS = "between_tokens"
    TOOL = "tool"


class Deadline(Struct, frozen=True, gc=False, order=True):
    """The time at which something is due, with its name for the log."""

    at: float
    reason: str


class StallBudgets(Struct, frozen=True, gc=False):
    """Limits of silence in seconds, for reports and for cuts. A silence with an infinite budget is never reported.

    Args:
        first_token_s: After this time, and each doubling of it, a silence is reported to readers, log and callback.
        between_tokens_s, tool_s: After these times it is reported, once for each silence.
        first_token_max_s, between_tokens_max_s: After these times a model call is cut and retried. A model that thinks
            long in silence needs more; a tool has its own timeout.
        upstream_tool_max_s: After this time a model call is cut while its upstream runs a tool.

    Raises:
        UsageError: A budget is not positive, or a limit is longer than 366 days: a turn must not wait for ever.
    """

    first_token_s: float = 30.0
    between_tokens_s: float = 15.0
    tool_s: float = 60.0
    first_token_max_s: float = 120.0
    between_tokens_max_s: float = 120.0
    upstream_tool_max_s: float = 600.0

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            most = WAIT_S_MAX if name.endswith("_max_s") else math.inf
            require_seconds(name, getattr(self, name), is_positive=True, most=most)

    def of(self, waiting_for: StalledOn) -> tuple[float, float | None]:
        """Return the seconds until a silence is reported, and until it is cut (None: not by the watchdog)."""
        match waiting_for:
            case StalledOn.FIRST_TOKEN:
                return self.first_token_s, self.first_token_max_s
            case StalledOn.BETWEEN_TOKENS:
                return self.between_tokens_s, self.between_tokens_max_s
            case StalledOn.TOOL:
                return self.tool_s, None
