"""Selection of the MCP servers that can be forwarded, and of their fields."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from midstream.tools.forwarded_servers import TRANSPORTS, ForwardedMcpServer, Skipped, Why, select_forwarded

STDIO = ForwardedMcpServer("files", command="npx", args=("-y", "files"), env={"KEY": "k"})
OPEN = ForwardedMcpServer("open", "http", url="https://a.example/mcp")
HEADER = ForwardedMcpServer(
    "header", "http", url="https://a.example/mcp", headers={"authorization": "Bearer t"}
)
NEEDS = ForwardedMcpServer("needs", "http", url="https://a.example/mcp", needs_auth=True)
PUBLIC = ForwardedMcpServer("public", "http", url="https://a.example/mcp", client_id="id", scope="read")
SECRET = replace(PUBLIC, name="secret", client_secret="s")


def test_servers_without_credentials_are_forwarded_unchanged_and_sorted_by_name() -> None:
    assert select_forwarded([OPEN, HEADER, STDIO]) == ((STDIO, HEADER, OPEN), ())


@pytest.mark.parametrize(
    ("can_oauth", "can_secret", "kept", "skipped"),
    [
        (
            False,
            False,
            (),
            (("needs", Why.CREDENTIAL), ("public", Why.CREDENTIAL), ("secret", Why.CREDENTIAL)),
        ),
        (True, False, (NEEDS, PUBLIC), (("secret", Why.SECRET),)),
        (True, True, (NEEDS, PUBLIC, SECRET), ()),
    ],
)
def test_a_registration_is_forwarded_only_where_its_oauth_flow_is_supported(
    *,
    can_oauth: bool,
    can_secret: bool,
    kept: tuple[ForwardedMcpServer, ...],
    skipped: tuple[tuple[str, Why], ...],
) -> None:
    assert select_forwarded([SECRET, PUBLIC, NEEDS], can_oauth=can_oauth, can_secret=can_secret) == (
        kept,
        tuple(Skipped(name, "http", why) for name, why in skipped),
    )


def test_a_server_with_an_authorization_header_is_forwarded_without_its_registration() -> None:
    server = replace(SECRET, headers={"Authorization": "Bearer t"}, needs_auth=True)
    kept = replace(server, client_id="", client_secret="", scope="")
    assert select_forwarded([server]) == ((kept,), ())
    assert select_forwarded([server], can_oauth=True, can_secret=True) == ((kept,), ())


def test_an_empty_authorization_header_does_not_authorize() -> None:
    server = replace(NEEDS, headers={"Authorization": ""})
    assert select_forwarded([server])[1] == (Skipped("needs", "http", Why.CREDENTIAL),)


def test_a_server_with_an_unsupported_transport_is_skipped() -> None:
    assert select_forwarded([STDIO, OPEN], transports=["stdio"]) == (
        (STDIO,),
        (Skipped("open", "http", Why.TRANSPORT),),
    )


@pytest.mark.parametrize("why", Why)
def test_the_skip_message_names_the_server_and_the_reason_and_no_secret(why: Why) -> None:
    words = Skipped("shop", "sse", why).words
    assert words.startswith("the MCP server 'shop' is left out: ")
    assert "{" not in words


SERVERS = st.lists(
    st.builds(
        ForwardedMcpServer,
        name=st.text("abc", min_size=1, max_size=2),
        transport=st.sampled_from(TRANSPORTS),
        headers=st.sampled_from([{}, {"Authorization": "t"}, {"X": "y"}]),
        client_id=st.sampled_from(["", "id"]),
        client_secret=st.sampled_from(["", "kept back"]),
        needs_auth=st.booleans(),
    ),
    unique_by=lambda server: server.name,
)


@given(SERVERS, st.booleans(), st.booleans())
def test_each_server_is_forwarded_or_reported_and_secrets_are_forwarded_only_where_accepted(
    servers: list[ForwardedMcpServer],
    can_oauth: bool,  # noqa: FBT001 - given by position
    can_secret: bool,  # noqa: FBT001 - given by position
) -> None:
    kept, skipped = select_forwarded(servers, can_oauth=can_oauth, can_secret=can_secret)
    assert sorted([server.name for server in kept] + [left.name for left in skipped]) == sorted(
        server.name for server in servers
    )
    if not (can_oauth and can_secret):
        assert {server.client_secret for server in kept} <= {""}
    assert select_forwarded(kept, can_oauth=can_oauth, can_secret=can_secret) == (kept, ())
