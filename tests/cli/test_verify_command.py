from __future__ import annotations

import asyncio
import json
from pathlib import Path

from midstream.engine.agent import Agent
from midstream.engine.host import Host
from midstream.store.contract import Store
from midstream.store.encryption.ciphers import FileKeys
from midstream.store.encryption.encrypted_store import encrypt_store
from midstream.store.sqlite import SQLiteStore
from midstream.testing import ScriptedModel, run_turn, text
from tests.cli.conftest import Run
from tests.spec import spec
from tests.store.encryption.test_tampering import _tamper


def run_sessions(store: Store, *sessions: str) -> None:
    async def turns() -> None:
        async with Host(Agent(ScriptedModel([text("hello") for _ in sessions])), store) as host:
            for session in sessions:
                await run_turn(host, session, "hi")

    asyncio.run(turns())


@spec("SEC-46", "SEC-47")
def test_a_store_is_verified_and_compared_with_a_checkpoint(run: Run, tmp_path: Path) -> None:
    path, heads = tmp_path / "x.db", tmp_path / "heads"
    run_sessions(SQLiteStore(path), "a", "b")
    done = run("verify", path, "--checkpoint", heads)
    assert (done.exit_code, done.stdout, done.stderr) == (0, "", "2 intact\n")
    again = run("verify", path, "--checkpoint", heads)
    assert (again.exit_code, "choose another name" in again.stderr) == (2, True)
    assert run("verify", path, "--against", heads).exit_code == 0
    older = path.read_bytes()
    run_sessions(SQLiteStore(path), "a")
    newer = tmp_path / "newer"
    assert run("verify", path, "--against", heads, "--checkpoint", newer).stderr == "2 intact\n"
    path.write_bytes(older)
    assert run("verify", path).exit_code == 0
    found = run("verify", path, "--against", newer, "--json")
    assert found.exit_code == 6
    assert [json.loads(line)["verdict"] for line in found.stdout.splitlines()] == ["intact", "set_back"]
    one = run("verify", path, "a", "--against", newer)
    assert (one.exit_code, one.stdout.startswith("a: set_back: it ends with record ")) == (6, True)
    assert run("verify", path, "none").exit_code == 3


@spec("SEC-46")
def test_a_changed_record_is_reported(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "x.db"
    run_sessions(SQLiteStore(path), "a", "b")
    _tamper(path, "update record set body = cast('{}' as blob) where session_id = 1 and position = 2")
    found = run("verify", path)
    assert (found.exit_code, found.stderr) == (6, "1 damaged, 1 intact\n")
    assert found.stdout.startswith("a: damaged: the append of records 1 to 3 of session 'a' was changed")
    (tmp_path / "x.db.store-key").unlink()
    blind = run("verify", path)
    assert (blind.exit_code, "The key file" in blind.stderr) == (0, True)
    assert blind.stdout.count("unchained") == 2


@spec("SEC-46")
def test_an_encrypted_store_needs_the_operators_keys(run: Run, tmp_path: Path) -> None:
    path, keys = tmp_path / "x.db", tmp_path / "keys"
    FileKeys.make(keys)
    run_sessions(encrypt_store(SQLiteStore(path), FileKeys(keys)), "a")
    assert run("verify", path, "--key-file", keys).stderr == "1 intact\n"
    blind = run("verify", path)
    assert (blind.exit_code, "--key-file" in blind.stderr) == (0, True)
    _tamper(path, "update record set epoch = 2 where position = 1")
    found = run("verify", path, "--key-file", keys)
    assert (found.exit_code, found.stdout.startswith("a: damaged: the append of records 1 to ")) == (6, True)


def test_an_invalid_store_or_checkpoint_is_refused(run: Run, tmp_path: Path) -> None:
    assert run("verify", tmp_path / "none.db").exit_code == 3
    path = tmp_path / "x.db"
    run_sessions(SQLiteStore(path), "a")
    (tmp_path / "heads").write_text("no checkpoint\n")
    for name, code in (("heads", 2), ("nothing", 3)):
        assert run("verify", path, "--against", tmp_path / name).exit_code == code
