"""How long a provider may take over HTTP: one set of limits for every model that is reached so."""

from __future__ import annotations

import math

from msgspec import Struct

from midstream.errors import UsageError
from midstream.timing import StallBudgets

CONNECT_S = 10.0
WRITE_S = 30.0
"""Seconds that the system may take no more of a request."""
ACQUIRE_S = 5.0


class HttpLimits(Struct, frozen=True):
    """How long a provider may take over HTTP, in seconds.

    Args:
        connect_s: To connect.
        first_byte_s: From the request to the first byte of the body. None: what the agent's `StallBudgets` allow
            for a first token (`first_token_max_s`).
        between_bytes_s: Between two pieces of an answer. None: the longest silence that these budgets allow in an
            answer (`between_tokens_max_s`, or `upstream_tool_max_s`); without an agent `between_tokens_max_s`.
        acquire_s: To get a free connection.

    Raises:
        UsageError: One is not positive and finite.
    """

    connect_s: float = CONNECT_S
    first_byte_s: float | None = None
    between_bytes_s: float | None = None
    acquire_s: float = ACQUIRE_S

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise UsageError(f"{name} is a positive, finite number of seconds, not {value!r}")

    def silences(self, stalls: StallBudgets | None) -> tuple[float, float]:
        """Return the limits before the first byte and between bytes.

        Args:
            stalls: The budgets of the agent that sends the request; None where there is none.
        """
        budgets = stalls or StallBudgets()
        between_s = budgets.between_tokens_max_s
        # Its watchdog cuts the shorter ones; a tool of the provider may be silent for longer.
        if stalls is not None:
            between_s = max(between_s, stalls.upstream_tool_max_s)
        first_s = budgets.first_token_max_s if self.first_byte_s is None else self.first_byte_s
        return first_s, between_s if self.between_bytes_s is None else self.between_bytes_s
