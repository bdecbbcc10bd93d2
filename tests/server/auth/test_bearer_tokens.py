"""The bearer token of a request: one or none."""

from __future__ import annotations

import pytest

from midstream.server.auth.bearer_tokens import bearer_token
from tests.server.auth.test_access import TOKEN, request_with


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ([("authorization", f"Bearer {TOKEN}")], TOKEN),
        ([("authorization", f"bEaReR  {TOKEN} ")], TOKEN),
        ([("authorization", f"Basic {TOKEN}")], ""),
        ([("authorization", f"Bearer {TOKEN}"), ("authorization", "Bearer other")], ""),
        ([("authorization", f"Bearer {'x' * 9000}")], ""),
        ([], ""),
    ],
)
def test_a_request_has_one_bearer_token_or_none(headers: list[tuple[str, str]], expected: str) -> None:
    assert bearer_token(request_with(*headers)) == expected
