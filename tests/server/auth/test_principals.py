"""Names of principals have a form that excludes confusion with another's."""

from __future__ import annotations

import pytest

from midstream.errors import UsageError
from midstream.server.auth.principals import Principal


@pytest.mark.parametrize(
    ("name", "tenant"), [("", ""), ("x" * 257, ""), ("a", "t" * 65), ("a", "a:b"), ("a", "ä")]
)
def test_an_invalid_principal_name_is_refused(name: str, tenant: str) -> None:
    with pytest.raises(UsageError):
        Principal(name, tenant=tenant)


def test_the_tenant_comes_first_and_ends_at_the_first_colon() -> None:
    keys = {Principal("b:c", tenant="a").key, Principal("c", tenant="a").key, Principal("a:b:c").key}
    assert keys == {"a:b:c", "a:c", ":a:b:c"}
