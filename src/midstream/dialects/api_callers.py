"""Callers of the gateway: who they are authenticated as, and what each may use."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

from msgspec import Struct


class Allowance(Struct, frozen=True):
    """Limits of one principal. 0 is no limit, and no models are all models.

    Args:
        requests_per_minute: Answers that it may begin; a repetition that joins an answer begins none.
        concurrent_requests: Answers that are made for it at once.
        tokens_per_day, tokens_per_month: Tokens, in and out, that its models counted since the beginning of the day or
            the month, in UTC. With so many it begins no further answer; those that are being made are not stopped.
        budget_per_month: The same for the cost of its tokens, in the currency of the prices.
        models: The names of the models that it may request.
    """

    requests_per_minute: int = 0
    concurrent_requests: int = 0
    tokens_per_day: int = 0
    tokens_per_month: int = 0
    budget_per_month: float = 0.0
    models: tuple[str, ...] = ()

    @property
    def limits_usage(self) -> bool:
        """Whether it depends on what was used before."""
        return bool(self.tokens_per_day or self.tokens_per_month or self.budget_per_month)


UNLIMITED = Allowance()


class ApiCaller(Struct, frozen=True):
    """Sender of a request.

    Args:
        principal: The name of the key's user; "" for the gateway's own key, and where no key is required. Conversations
            and responses of one principal do not exist for another one.
        allowance: What that user may use.
    """

    principal: str = ""
    allowance: Allowance = UNLIMITED


ANYONE = ApiCaller()
"""The caller with the gateway's own key, or without any where none is required."""


class Admission(Protocol):
    """Decides whether a caller may begin another answer."""

    def admit(self, caller: ApiCaller) -> AbstractContextManager[None]:
        """Count an answer of a caller as open until the end of the block, where it is counted otherwise or has ended.

        Raises:
            RefusedError: A limit of the caller is reached. Nothing was counted.
        """
