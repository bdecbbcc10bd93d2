"""The choice of MCP servers that an upstream can use; omitted servers are logged once."""

from __future__ import annotations

import pytest

from midstream.agents.mcp_forwarding import Forwarding
from midstream.agents.upstream_abilities import Abilities
from midstream.tools.forwarded_servers import ForwardedMcpServer, Transport

FILES = ForwardedMcpServer("files", command="files-server")
SHOP = ForwardedMcpServer("shop", "http", url="http://127.0.0.1/mcp", client_id="c", client_secret="s")
WEB = ForwardedMcpServer("web", "sse", url="http://127.0.0.1/sse")


LOCAL: tuple[Transport, ...] = ("stdio",)


def test_each_omitted_server_is_logged_once_for_each_reason(caplog: pytest.LogCaptureFixture) -> None:
    forwarding = Forwarding("some-agent", Abilities())
    for _ in range(2):
        assert forwarding.select((WEB, SHOP, FILES)) == (FILES, WEB)
    assert forwarding.select((WEB, SHOP, FILES), LOCAL) == (FILES,)
    logged = [record.message.split(" is left out")[0] for record in caplog.records]
    assert logged == [f"some-agent: the MCP server {name!r}" for name in ("shop", "shop", "web")]


def test_the_abilities_of_the_upstream_decide() -> None:
    assert Forwarding("a", Abilities(can_oauth=True, can_secret=True)).select((SHOP,)) == (SHOP,)
    assert Forwarding("a", Abilities(can_oauth=True)).select((SHOP,)) == ()
