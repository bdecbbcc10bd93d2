"""Sessions that only their clients can open, on the command line."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from midstream.cli.session_secret import delete_secret, read_env_secret, read_secrets
from midstream.client.secret_store import SecretStore
from midstream.client.session_secrets import SecretsToShow, SessionSecrets
from midstream.environment import World
from midstream.errors import UsageError
from midstream.paths import Paths
from midstream.store.contract import ESCROW
from midstream.store.encryption.ciphers import FileKeys
from midstream.store.sqlite.reads import reading
from tests.cli.conftest import Run
from tests.cli.processes import Serving
from tests.cli.processes import run as run_process
from tests.spec import spec

SECRET = "s" * 43


def test_a_secret_comes_from_a_file_or_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert read_env_secret() == ""
    monkeypatch.setenv("MIDSTREAM_SECRET", SECRET)
    assert read_env_secret() == SECRET
    file = tmp_path / "secret"
    file.write_text("f" * 43 + "\n")
    file.chmod(0o600)
    monkeypatch.setenv("MIDSTREAM_SECRET_FILE", str(file))
    assert read_env_secret() == "f" * 43
    assert read_secrets("http://127.0.0.1:1", "s", None) == SecretsToShow("f" * 43)
    file.chmod(0o644)
    with pytest.raises(UsageError, match="readable by other users"):
        read_env_secret()
    file.unlink()
    with pytest.raises(UsageError, match="cannot be read"):
        read_env_secret()


async def _store_secret(path: Path) -> None:
    store = SecretStore(path, world=World())
    await SessionSecrets(store, server="http://127.0.0.1:1", world=World()).keep("s", SECRET)
    await store.close()


def test_otherwise_the_secret_stored_by_chat_is_sent(tmp_path: Path) -> None:
    places = Paths.find(tmp_path)
    assert read_secrets("http://127.0.0.1:1", "s", places) == SecretsToShow()
    asyncio.run(_store_secret(places.secrets))
    assert read_secrets("http://127.0.0.1:1/", "s::child", places) == SecretsToShow(SECRET)
    assert read_secrets("http://127.0.0.1:1", "other", places) == SecretsToShow()
    delete_secret(
        "http://127.0.0.1:1", "s::child", places
    )  # a part was deleted, and the whole session's secret is still there
    assert read_secrets("http://127.0.0.1:1", "s", places) == SecretsToShow(SECRET)
    delete_secret("http://127.0.0.1:1/", "s", places)
    assert read_secrets("http://127.0.0.1:1", "s", places) == SecretsToShow()


@spec("STREAM-84", "STREAM-95")
def test_chat_and_sessions_send_the_secret_and_a_file_is_not_read_without_it(
    tmp_path: Path, port: int, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Serving(tmp_path, port=port, options=["--encrypt", "client"]) as server:
        for words in ("the word is canary-7f3a", "again"):
            ended = run_process("chat", server.url, "--session", "s", typed=words)
            assert ended.returncode == 0, ended.stderr
        shown = run("sessions", "show", "s", "--url", server.url)
        assert shown.exit_code == 0, shown.stderr
        assert "canary-7f3a" in shown.stdout
        listed = run("sessions", "list", "--url", server.url)
        assert "canary-7f3a" not in listed.stdout
        monkeypatch.setenv("MIDSTREAM_SECRET", "w" * 43)
        refused = run("sessions", "show", "s", "--url", server.url)
        assert refused.exit_code != 0
        assert "MIDSTREAM_SECRET_FILE" in refused.stderr
        monkeypatch.delenv("MIDSTREAM_SECRET")
        assert server.interrupt() == (0, "")
    keys = tmp_path / "sessions.db.keys"
    assert keys.stat().st_mode & 0o777 == 0o600
    stored = b"".join(file.read_bytes() for file in tmp_path.glob("sessions.db*") if file.is_file())
    assert b"canary-7f3a" not in stored
    for command in ("show", "export"):
        done = run("sessions", command, "s", "--store", server.store)
        assert done.exit_code != 0
        assert "encrypted under its client's secret" in done.stderr
        assert "--url" in done.stderr
    with Serving(tmp_path, port=port, options=["--encrypt", "client"]) as server:
        assert "canary-7f3a" in run("sessions", "show", "s", "--url", server.url).stdout
        assert run_process("chat", server.url, "--session", "t", typed="of another one").returncode == 0
        assert "x-idempotent-encryption-key" in read_secrets(server.url, "t", None).headers
        assert run("sessions", "delete", "t", "--yes", "--url", server.url).exit_code == 0
        assert read_secrets(server.url, "t", None) == SecretsToShow()
        assert server.interrupt() == (0, "")
    assert run("sessions", "delete", "s", "--yes", "--store", server.store).exit_code == 0
    with reading(server.store) as reader:
        assert [kept.key for kept in reader.kv_list(ESCROW)] == [""]


def test_sessions_reach_an_encrypted_session_at_a_server_that_lists_none(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Serving(tmp_path, options=["--encrypt", "client", "--no-auth"]) as server:
        at = ("s", "--url", server.url)
        assert (
            run_process("chat", server.url, "--session", "s", typed="the word is canary-7f3a").returncode == 0
        )
        assert run("sessions", "list", "--url", server.url).stdout == ""
        assert "canary-7f3a" in run("sessions", "show", *at).stdout
        monkeypatch.setenv("MIDSTREAM_SECRET", "w" * 43)
        assert "this secret opens no such session" in run("sessions", "show", *at).stderr
        monkeypatch.delenv("MIDSTREAM_SECRET")
        assert run("sessions", "delete", *at, "--yes").exit_code == 0
        assert read_secrets(server.url, "s", None) == SecretsToShow()


def test_a_server_with_lost_or_other_keys_fails_at_the_start(tmp_path: Path) -> None:
    with Serving(tmp_path, options=["--encrypt", "client"]):
        pass
    keys = tmp_path / "sessions.db.keys"
    keys.rename(tmp_path / "elsewhere")
    serving = ("serve", "told:agent", "--encrypt", "client", "--store", "sessions.db", "--port", "0")
    lost = run_process(*serving, cwd=tmp_path)
    assert (lost.returncode, "cannot be read" in lost.stderr) == (2, True), lost.stderr
    FileKeys.make(keys)
    others = run_process(*serving, cwd=tmp_path)
    assert (others.returncode != 0, "another key" in others.stderr) == (True, True), others.stderr
