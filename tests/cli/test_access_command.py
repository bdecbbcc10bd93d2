"""`midstream access`: token files without plain tokens, and credentials to list and revoke."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from midstream.server.auth.token_file import parse_line
from tests.cli.conftest import Run
from tests.cli.processes import Serving
from tests.spec import spec


@spec("SEC-20")
def test_a_token_is_printed_once_and_only_its_digest_is_stored(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    done = run(
        "access",
        "add",
        file,
        "ada",
        "--scope",
        "read",
        "--scope",
        "approve",
        "--days",
        "2",
        "--comment",
        "a #1",
    )
    report = json.loads(run("access", "add", file, "bob", "--role", "operator", "--json").stdout)
    token, text = done.stdout.strip(), file.read_text()
    assert (token in text, report["token"] in text, file.stat().st_mode & 0o777) == (False, False, 0o600)
    ada, bob = (found for line in text.splitlines() if (found := parse_line(line)))
    assert (ada.principal.scope.actions, bob.principal.is_operator) == (("read", "approve"), True)
    assert ada.principal.expires_at is not None
    assert "# a #1" in text


@pytest.mark.parametrize("subject", ["two words", "#ada", ""])
def test_an_invalid_subject_is_refused_and_nothing_is_written(run: Run, tmp_path: Path, subject: str) -> None:
    done = run("access", "add", tmp_path / "tokens", subject)
    assert (done.exit_code, done.stdout, (tmp_path / "tokens").exists()) == (2, "", False)


@spec("SEC-3", "SEC-20")
def test_tokens_are_replaced_by_their_digests_and_stay_valid(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text("# people\na-token-of-ada-0001 ada acme # hers\n\na-token-of-bob-0001 bob acme\n")
    file.chmod(0o600)
    before = [found for line in file.read_text().splitlines() if (found := parse_line(line))]
    assert "2 tokens" in run("access", "hash", file).stdout
    after = [found for line in file.read_text().splitlines() if (found := parse_line(line))]
    assert [(each.digest, each.principal) for each in after] == [
        (each.digest, each.principal) for each in before
    ]
    assert "a-token" not in file.read_text()
    assert file.read_text().startswith("# people\nsha256:")
    assert json.loads(run("access", "hash", file, "--json").stdout) == {"replaced": 0}


@spec("SEC-5", "SEC-8")
def test_credentials_are_listed_and_revoked(run: Run, tmp_path: Path) -> None:
    with Serving(tmp_path) as server:
        for _ in range(2):
            assert run("login", server.url).exit_code == 0
        lines = [
            json.loads(line)
            for line in run("access", "list", "--url", server.url, "--json").stdout.splitlines()
        ]
        assert [(line["kind"], line["issued_by"]) for line in lines] == 3 * [("login", "operator")]
        rows = run("access", "list", "--url", server.url).stdout.splitlines()
        assert rows[0].split("\t")[:2] == [lines[0]["id"], "login"]
        assert (
            run("access", "revoke", lines[0]["id"], "--url", server.url).stdout
            == "1 credentials were revoked.\n"
        )
        gone = run("access", "revoke", lines[0]["id"], "--url", server.url)
        assert (gone.exit_code, "[not_found]" in gone.stderr) == (3, True)
        done = run("access", "revoke-all", "--url", server.url, "--json")
        assert json.loads(done.stdout) == {"revoked": 2}
        assert "No credentials" in run("access", "list", "--url", server.url).stderr


def test_a_server_without_authentication_is_named(run: Run, tmp_path: Path) -> None:
    with Serving(tmp_path, options=["--no-auth"]) as server:
        for arguments in (["list"], ["revoke", "c1"], ["revoke-all"]):
            refused = run("access", *arguments, "--url", server.url)
            assert (refused.exit_code, "runs without authentication" in refused.stderr) == (3, True)
