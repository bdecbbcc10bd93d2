"""Login into a server of this machine: a link for a browser, a token for a script."""

from __future__ import annotations

import http.client
import json
from pathlib import Path

from tests.cli.conftest import Run
from tests.cli.processes import Serving


def _ask(server: Serving, path: str, headers: dict[str, str], body: object = None) -> tuple[int, str]:
    """Return the status of an answer and the cookie that it sets."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    method = "GET" if body is None else "POST"
    headers = {"connection": "close", "content-type": "application/json", **headers}
    connection.request(method, path, body=None if body is None else json.dumps(body), headers=headers)
    answer = connection.getresponse()
    cookie = (answer.getheader("set-cookie") or "").partition(";")[0]
    answer.read()
    connection.close()
    return answer.status, cookie


def test_a_link_and_a_token_give_access_to_a_closed_server(run: Run, tmp_path: Path) -> None:
    with Serving(tmp_path) as server:
        assert _ask(server, "/v1/sessions", {}) == (401, "")

        token = run("token", server.url).stdout.strip()
        assert _ask(server, "/v1/sessions", {"authorization": f"Bearer {token}"}) == (200, "")

        link = run("login", server.url).stdout.strip()
        page, _, login = link.partition("#login=")
        assert page == f"{server.url}/"
        status, cookie = _ask(server, "/v1/login", {}, {"login": login})
        assert status == 200
        assert _ask(server, "/v1/sessions", {"cookie": cookie}) == (200, "")
        assert _ask(server, "/v1/login", {}, {"login": login}) == (401, "")

        assert server.listening["page"] == f"{server.url}/"


def test_a_missing_token_is_reported(run: Run) -> None:
    done = run("token", "https://agents.example")
    assert (done.exit_code, done.stdout, "[unauthorized]" in done.stderr) == (1, "", True)


def test_a_server_without_authentication_needs_no_token(run: Run, tmp_path: Path) -> None:
    with Serving(tmp_path, options=["--no-auth"]) as server:
        for command in (["token"], ["login"], ["access", "list", "--url"]):
            done = run(*command, server.url)
            assert (done.exit_code, done.stdout) == (3, "")
            assert (
                "runs without authentication (--no-auth). Use it without a token or a login." in done.stderr
            )


def test_a_server_of_this_machine_with_a_token_file_requires_its_token(run: Run, tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text(f"{'t' * 40} alice\n")
    (tmp_path / "tokens").chmod(0o600)
    with Serving(tmp_path, options=["--token-file", str(tmp_path / "tokens")]) as server:
        done = run("token", server.url)
        assert (done.exit_code, "Set MIDSTREAM_TOKEN=" in done.stderr) == (1, True)
