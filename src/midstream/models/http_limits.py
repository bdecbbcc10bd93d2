"""Time limits for providers over HTTP, the same for all models."""

from __future__ import annotations

from msgspec import Struct

from midstream.number_checks import require_seconds
from midstream.timing import StallBudgets

CONNECT_S = 10.0
WRITE_S = 30.0
"""Seconds for which the system may accept no more of a request."""
ACQUIRE_S = 5.0


class HttpLimits(Struct, frozen=True):
    """Time limits for a provider over HTTP, in seconds.

    Args:
        connect_s: For connecting.
        first_byte_s: From the request to the first byte of the body. None: the agent's limit for a first token
            (`StallBudgets.first_token_max_s`).
        between_bytes_s: Between two pieces of an answer. None: the longest of the agent's limits for silence in an
            answer (`between_tokens_max_s` or `upstream_tool_max_s`); without an agent `between_tokens_max_s`.
        acquire_s: For getting a free connection.

    Raises:
        UsageError: A limit is not positive, or longer than 366 days.
    """

    connect_s: float = CONNECT_S
    first_byte_s: float | None = None
    between_bytes_s: float | None = None
    acquire_s: float = ACQUIRE_S

    def __post_init__(self) -> None:
        for name in ("connect_s", "acquire_s"):
            require_seconds(name, getattr(self, name), is_positive=True)
        for name in ("first_byte_s", "between_bytes_s"):
            if (seconds := getattr(self, name)) is not None:
                require_seconds(name, seconds, is_positive=True)

    def silences(self, stalls: StallBudgets | None) -> tuple[float, float]:
        """Return the limits before the first byte and between bytes.

        Args:
            stalls: The budgets of the agent that sends the request; None if there is none.
        """
        budgets = stalls or StallBudgets()
        between_s = budgets.between_tokens_max_s
        # The watchdog cuts shorter silences; a provider's tool may be silent for longer.
        if stalls is not None:
            between_s = max(between_s, stalls.upstream_tool_max_s)
        first_s = budgets.first_token_max_s if self.first_byte_s is None else self.first_byte_s
        return first_s, between_s if self.between_bytes_s is None else self.between_bytes_s
