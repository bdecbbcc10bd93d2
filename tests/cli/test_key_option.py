"""Commands that read an encrypted store through the key endpoint of an application."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from midstream.cli.key_option import FILE_VARIABLE, TOKEN_VARIABLE
from midstream.store import RemoteKeys, SQLiteStore, encrypt_store
from tests.cli.conftest import Run, record_sessions
from tests.cli.processes import Serving
from tests.cli.processes import run as run_process
from tests.key_endpoint import TOKEN, key_endpoint
from tests.spec import spec


@pytest.fixture
def endpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Serve the keys of an application; the environment has the token."""
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    (tmp_path / "application").mkdir()
    with key_endpoint(tmp_path / "application") as url:
        yield url


@pytest.fixture
async def ciphertext(tmp_path: Path, endpoint: str) -> Path:
    """A store with two sessions, encrypted under the keys of the application."""
    path = tmp_path / "sessions.db"
    store = encrypt_store(SQLiteStore(path), RemoteKeys(endpoint, token=TOKEN))
    await record_sessions(store, {"s": ["What is in the harbour?"], "t": ["canary-7f3a"]})
    return path


@spec("SEC-63")
def test_commands_read_through_the_endpoint_and_show_no_content_without_it(
    run: Run, ciphertext: Path, endpoint: str
) -> None:
    place = ("--store", ciphertext)
    listed = run("sessions", "list", *place, "--key-file", endpoint, "--json")
    assert [json.loads(line)["title"] for line in listed.stdout.splitlines()] == [
        "canary-7f3a",
        "What is in the harbour?",
    ]
    assert "canary-7f3a" in run("sessions", "export", "t", *place, "--key-file", endpoint).stdout
    assert "harbour" in run("sessions", "show", "s", *place, "--key-file", endpoint).stdout
    assert run("doctor", ciphertext, "--key-file", endpoint).exit_code == 0

    listed = run("sessions", "list", *place, "--json")
    lines = [json.loads(line) for line in listed.stdout.splitlines()]
    assert [(line["id"], line["turns"]) for line in lines] == [("t", 1), ("s", 1)]
    assert all(line["title"].startswith("encrypted:") for line in lines)
    refused = run("sessions", "export", "t", *place)
    assert refused.exit_code == 1
    assert "--key-file" in refused.stderr
    for done in (listed, refused):
        assert "canary" not in done.stdout + done.stderr


@spec("SEC-60", "SEC-63")
def test_a_copy_of_the_ciphertext_is_decrypted_with_the_applications_keys(
    run: Run, ciphertext: Path, tmp_path: Path
) -> None:
    """The server's machine makes the copy without any key; the application needs no endpoint to read it."""
    (tmp_path / "elsewhere").mkdir()
    copy = tmp_path / "elsewhere" / "copy.db"
    assert run("backup", copy, "--store", ciphertext).exit_code == 0
    assert b"canary-7f3a" not in copy.read_bytes()
    place = ("--store", copy, "--key-file", tmp_path / "application" / "keys")
    exported = [json.loads(line) for line in run("sessions", "export", "--all", *place).stdout.splitlines()]
    assert {line["session"] for line in exported} == {"s", "t"}
    assert "canary-7f3a" in json.dumps([line for line in exported if line["session"] == "t"])
    assert "canary-7f3a" not in json.dumps([line for line in exported if line["session"] == "s"])
    assert "harbour" in run("sessions", "show", "s", *place).stdout
    verified = run("verify", copy, "--key-file", tmp_path / "application" / "keys", "--json")
    assert (verified.exit_code, verified.stdout.count('"intact"')) == (0, 2)
    for words in ((), ("s", "--all")):
        assert run("sessions", "export", *words, *place).exit_code == 2


@spec("SEC-46", "SEC-63")
def test_verify_reads_a_store_without_the_endpoint_and_checks_its_links_with_it(
    run: Run, ciphertext: Path, endpoint: str
) -> None:
    done = run("verify", ciphertext)
    assert (done.exit_code, "2 unchained" in done.stderr) == (0, True), done.output
    done = run("verify", ciphertext, "--key-file", endpoint)
    assert (done.exit_code, "2 intact" in done.stderr) == (0, True), done.output


@spec("SEC-61", "SEC-63")
def test_a_refused_token_is_an_error_of_one_line(
    run: Run, ciphertext: Path, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "token-of-another")
    commands = (
        ("sessions", "list", "--store", ciphertext),
        ("sessions", "export", "t", "--store", ciphertext),
        ("verify", ciphertext),
        ("doctor", ciphertext),
    )
    for command in commands:
        done = run(*command, "--key-file", endpoint)
        assert done.exit_code != 0, command
        assert "refused" in done.stderr, command
        assert TOKEN_VARIABLE in done.stderr, command
        assert "token-of" not in done.output, command


@spec("SEC-61", "SEC-63")
def test_the_token_can_be_in_a_file_that_only_its_owner_can_read(
    run: Run, ciphertext: Path, endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")
    file.chmod(0o600)
    monkeypatch.delenv(TOKEN_VARIABLE)
    monkeypatch.setenv(FILE_VARIABLE, str(file))
    command = ("sessions", "list", "--store", ciphertext, "--key-file", endpoint)
    assert "canary-7f3a" in run(*command).stdout
    file.chmod(0o644)
    done = run(*command)
    assert done.exit_code == 2
    assert "token" in done.stderr


@spec("SEC-62", "SEC-63")
def test_an_unreachable_endpoint_is_not_damage(run: Run, ciphertext: Path) -> None:
    away = "http://127.0.0.1:9"
    for command in (
        ("sessions", "list", "--store", ciphertext),
        ("sessions", "export", "t", "--store", ciphertext),
        ("verify", ciphertext),
        ("doctor", ciphertext),
    ):
        done = run(*command, "--key-file", away)
        assert done.exit_code == 1, (command, done.output)
        assert "did not answer" in done.stderr, command
        assert "estore" not in done.stderr, command


@spec("SEC-60", "SEC-63")
@pytest.mark.slow
def test_two_servers_in_sequence_store_only_ciphertext(tmp_path: Path, endpoint: str) -> None:
    options = ["--key-file", endpoint]
    with Serving(tmp_path, options=options) as server:
        done = run_process("chat", server.url, "--session", "s", typed="the word is canary-7f3a")
        assert done.returncode == 0, done.stderr
        assert server.interrupt() == (0, "")
    stored = b"".join(file.read_bytes() for file in tmp_path.glob("sessions.db*") if file.is_file())
    assert stored.startswith(b"SQLite")
    assert b"canary-7f3a" not in stored
    with Serving(tmp_path, options=options) as server:
        token = run_process("token", server.url).stdout.strip()
        with closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)) as connection:
            connection.request("GET", "/v1/sessions/s", headers={"authorization": f"Bearer {token}"})
            assert b"canary-7f3a" in connection.getresponse().read()
