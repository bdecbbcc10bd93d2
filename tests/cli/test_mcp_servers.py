from __future__ import annotations

import json
from pathlib import Path

import pytest

from midstream.cli.mcp_servers import read_servers
from midstream.errors import UsageError
from midstream.tools.forwarded_servers import ForwardedMcpServer


def write_file(folder: Path, content: object) -> Path:
    path = folder / "mcp.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


def test_the_mcp_file_of_other_applications_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAIL_TOKEN", "t0ken")
    path = write_file(
        tmp_path,
        {
            "mcpServers": {
                "mail": {"url": "https://a.example", "headers": {"Authorization": "Bearer ${MAIL_TOKEN}"}},
                "files": {"command": "npx", "args": ["-y", "files"], "env": {"A": "b"}},
                "old": {"type": "sse", "url": "https://a.example/sse"},
                "shop": {"url": "https://b.example", "auth": {"CLIENT_ID": "i", "scopes": ["r", "w"]}},
                "wiki": {"type": "streamable-http", "url": "https://c", "oauth": {"clientId": "w"}},
            }
        },
    )
    assert read_servers(path) == (
        ForwardedMcpServer("files", command="npx", args=("-y", "files"), env={"A": "b"}),
        ForwardedMcpServer(
            "mail", "http", url="https://a.example", headers={"Authorization": "Bearer t0ken"}
        ),
        ForwardedMcpServer("old", "sse", url="https://a.example/sse"),
        ForwardedMcpServer(
            "shop", "http", url="https://b.example", client_id="i", scope="r w", needs_auth=True
        ),
        ForwardedMcpServer("wiki", "http", url="https://c", client_id="w", needs_auth=True),
    )


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "is not valid JSON"),
        ([], "contains no servers"),
        ({"servers": {}}, "contains no servers"),
        ({"mcpServers": {"a": 1}}, "'a' has an invalid description"),
        ({"mcpServers": {"a": {"command": 1}}}, "'a' has an invalid description"),
        ({"mcpServers": {"a": {"type": "pigeon", "url": "x"}}}, "'a' has an invalid description"),
        ({"mcpServers": {"a": {"args": ["x"]}}}, "'a' has no 'command'"),
        ({"mcpServers": {"a": {"type": "http"}}}, "'a' has no 'url'"),
        ({"mcpServers": {"a": {"command": "${NO_SUCH_VARIABLE}"}}}, "NO_SUCH_VARIABLE is not set"),
    ],
)
def test_errors_in_the_file_are_reported(content: object, words: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=words):
        read_servers(write_file(tmp_path, content))
