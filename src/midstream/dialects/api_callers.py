"""Callers of the gateway: principals and their limits."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

from msgspec import Struct


class Allowance(Struct, frozen=True):
    """Limits of one principal. 0 means no limit, and empty `models` means all models.

    Args:
        requests_per_minute: Answers that it may begin in a minute; a repetition that joins an answer is not counted.
        concurrent_requests: Answers in progress at the same time.
        tokens_per_day, tokens_per_month: Input and output tokens since the beginning of the day or month, in UTC. At
            the limit, new answers are refused; answers in progress continue.
        budget_per_month: Limit of the cost of its tokens, in the currency of the prices.
        models: Names of the permitted models.
    """

    requests_per_minute: int = 0
    concurrent_requests: int = 0
    tokens_per_day: int = 0
    tokens_per_month: int = 0
    budget_per_month: float = 0.0
    models: tuple[str, ...] = ()

    @property
    def limits_usage(self) -> bool:
        """Whether a limit depends on earlier usage."""
        return bool(self.tokens_per_day or self.tokens_per_month or self.budget_per_month)


UNLIMITED = Allowance()


class ApiCaller(Struct, frozen=True):
    """Sender of a request.

    Args:
        principal: Name of the key's user; "" for the gateway's own key, or if no key is required. Principals cannot
            access each other's conversations and responses.
        allowance: Limits of the user.
    """

    principal: str = ""
    allowance: Allowance = UNLIMITED


ANYONE = ApiCaller()
"""The caller with the gateway's own key, or without a key if none is required."""


class Admission(Protocol):
    """Decides whether a caller may begin another answer."""

    def admit(self, caller: ApiCaller) -> AbstractContextManager[None]:
        """Admit an answer, and count it as open until the end of the block.

        Raises:
            RefusedError: A limit of the caller is reached. Nothing was counted.
        """
