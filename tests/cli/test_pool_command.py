"""`midstream pool`: its lists of a store's records, and their removal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from midstream.agents.pool_entries import POOL_NAMESPACE, key_of
from midstream.agents.pool_records import confirm, create_fresh, encode, with_answer
from midstream.cli.terminal import width_of
from midstream.history.messages import History, UserMessage
from midstream.models.fingerprint import outline
from midstream.store.encryption.ciphers import FileKeys
from midstream.store.encryption.encrypted_store import encrypt_store
from midstream.store.sqlite import SQLiteStore
from tests.cli.conftest import Run
from tests.cli.on_terminal import OnTerminal

HISTORY = History((UserMessage.of("one"),))


@pytest.fixture
async def pooled(tmp_path: Path) -> Path:
    path = tmp_path / "sessions.db"
    store = SQLiteStore(path)
    await store.open()
    asked = create_fresh(
        outline("be brief", (), (), {}, HISTORY), upstream="claude:opus", now=1_700_000_000.0
    )
    ready = with_answer(
        confirm(asked, "agent-1", now=1_700_000_001.0),
        agent="agent-1",
        mark="",
        open_calls=(),
        now=1_700_000_002.0,
    )
    records = {"harbour": ready, "harvest": replace(asked, run="run-1")}
    for session, record in records.items():
        key = key_of("claude:opus", session)
        await store.kv_put(POOL_NAMESPACE, key, encode(record), expected=0, at=record.used_at)
    await store.kv_put(POOL_NAMESPACE, "claude:opus/torn\x1b[31m", b"\x01nothing", expected=0, at=1.0)
    await store.close()
    return path


def test_a_listing_through_a_pipe_is_one_line_of_cells_per_record(run: Run, pooled: Path) -> None:
    done = run("pool", "ls", "--store", pooled)
    rows = [line.split("\t") for line in done.stdout.splitlines()]
    assert [(row[0], row[1], row[2], row[3]) for row in rows] == [
        ("harbour", "claude:opus", "ready", "1"),
        ("harvest", "claude:opus", "pending", "1"),
        ("claude:opus/torn", "", "damaged", "0"),
    ]
    assert done.exit_code == 0


def test_json_has_one_object_per_line_with_every_field(run: Run, pooled: Path) -> None:
    first = json.loads(run("pool", "ls", "--json", "--store", pooled).stdout.splitlines()[0])
    assert first["agent"] == "agent-1"
    assert sorted(first) == sorted(
        [
            "key",
            "session",
            "upstream",
            "agent",
            "state",
            "users",
            "marks",
            "open_calls",
            "created_at",
            "used_at",
            "bytes",
            "store",
            "system",
            "tools",
            "servers",
            "identity",
        ]
    )


def test_on_a_terminal_of_80_columns_a_listing_is_a_table(on_terminal: OnTerminal, pooled: Path) -> None:
    lines = on_terminal("pool", "ls", "--store", pooled).text.splitlines()
    assert lines[0].split() == ["SESSION", "USERS", "STATE", "USED", "AGENT"]
    assert max(map(width_of, lines)) <= 80


def test_a_session_is_shown_by_a_prefix_of_its_name(run: Run, pooled: Path) -> None:
    done = run("pool", "show", "harb", "--store", pooled)
    assert "agent       agent-1" in done.stdout.splitlines()
    assert json.loads(run("pool", "show", "harb", "--json", "--store", pooled).stdout)["users"] == 1


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["show", "nobody"], 3, "no agent is recorded for session 'nobody'"),
        (["show", "har"], 2, "several sessions begin with 'har': give one of 'harbour', 'harvest'"),
        (["clear"], 2, "no sessions given; name them, or give --all"),
        (["clear", "harbour"], 2, "stdin is not a terminal; give --yes to confirm"),
    ],
)
def test_an_error_is_one_line_and_an_exit_code(
    run: Run, pooled: Path, arguments: list[str], code: int, words: str
) -> None:
    done = run("pool", *arguments, "--store", pooled)
    assert (done.exit_code, done.stdout) == (code, "")
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_cleared_session_is_removed_and_the_others_stay(run: Run, pooled: Path) -> None:
    done = run("pool", "clear", "harbour", "--yes", "--json", "--store", pooled)
    assert json.loads(done.stdout) == {"key": "claude:opus/harbour", "is_removed": True}
    assert "1 record removed." in done.stderr
    assert len(run("pool", "ls", "--store", pooled).stdout.splitlines()) == 2


def test_all_records_can_be_cleared_even_damaged_ones(run: Run, pooled: Path) -> None:
    assert "3 records removed." in run("pool", "clear", "--all", "--yes", "--store", pooled).stderr
    done = run("pool", "ls", "--store", pooled)
    assert (done.stdout, done.stderr) == ("", "There are no agents.\n")


def test_a_store_without_pool_records_has_no_agents(run: Run, tmp_path: Path) -> None:
    done = run("pool", "ls", "--json")
    assert (done.exit_code, done.stdout, done.stderr) == (0, "", "There are no agents.\n")
    assert "0 records removed." in run("pool", "clear", "--all").stderr
    assert run("pool", "show", "harbour").exit_code == 3
    named = run("pool", "ls", "--store", tmp_path / "none.db")
    assert (named.exit_code, "no database" in named.stderr) == (3, True)


def test_the_confirmation_describes_the_removed_turns(on_terminal: OnTerminal, pooled: Path) -> None:
    question = "Remove the record of 'harbour'? [y/N]"
    seen = on_terminal("pool", "clear", "harbour", "--store", pooled, answers={question: "n\r"})
    assert question in seen.text
    assert "removed" not in seen.text


@pytest.fixture
def gateway_pool(tmp_path: Path, pooled: Path) -> Path:
    return pooled.rename(tmp_path / "gateway.db")


@pytest.fixture
async def serve_and_gateway_pools(tmp_path: Path, gateway_pool: Path) -> None:
    store = SQLiteStore(tmp_path / "sessions.db")
    await store.open()
    record = create_fresh(outline("", (), (), {}, HISTORY), upstream="codex", now=1_700_000_003.0)
    for session in ("served", "h:quay"):
        key = key_of("codex", session)
        await store.kv_put(POOL_NAMESPACE, key, encode(record), expected=0, at=record.used_at)
    await store.close()


@pytest.mark.usefixtures("serve_and_gateway_pools")
def test_without_a_store_it_uses_the_defaults_of_gateway_and_serve(run: Run) -> None:
    def listed() -> list[str]:
        return [line.split("\t")[0] for line in run("pool", "ls").stdout.splitlines()]

    assert sorted(listed()[:2]) == ["h:quay", "served"]
    assert listed()[2:] == ["harbour", "harvest", "claude:opus/torn"]
    assert "3 records removed." in run("pool", "clear", "served", "harbour", "qua", "--yes").stderr
    assert listed() == ["harvest", "claude:opus/torn"]


@pytest.fixture
async def encrypted_pool(tmp_path: Path) -> tuple[Path, Path]:
    path, keys = tmp_path / "encrypted.db", tmp_path / "keys"
    FileKeys.make(keys)
    store = encrypt_store(SQLiteStore(path), FileKeys(keys))
    await store.open()
    asked = create_fresh(
        outline("be brief", (), (), {}, HISTORY), upstream="claude:opus", now=1_700_000_000.0
    )
    record = with_answer(confirm(asked, "agent-1", now=1.0), agent="agent-1", mark="", open_calls=(), now=2.0)
    await store.kv_put(POOL_NAMESPACE, key_of("claude:opus", "harbour"), encode(record), expected=0, at=2.0)
    await store.close()
    return path, keys


def test_the_records_of_an_encrypted_store_are_read_and_removed_with_its_key_file(
    run: Run, encrypted_pool: tuple[Path, Path]
) -> None:
    path, keys = encrypted_pool
    assert json.loads(run("pool", "ls", "--json", "--store", path).stdout)["state"] == "encrypted"
    opened = ("--store", path, "--key-file", keys)
    line = json.loads(run("pool", "ls", "--json", *opened).stdout)
    assert (line["session"], line["state"], line["agent"]) == ("harbour", "ready", "agent-1")
    assert "agent-1" in run("pool", "show", "harbour", *opened).stdout
    assert run("pool", "clear", "harbour", "--yes", *opened).exit_code == 0
    assert run("pool", "ls", *opened).stdout == ""


def test_another_key_file_decrypts_no_record(run: Run, encrypted_pool: tuple[Path, Path]) -> None:
    path, keys = encrypted_pool
    other = keys.with_name("other")
    FileKeys.make(other)
    done = run("pool", "ls", "--store", path, "--key-file", other)
    assert "[key_missing]" in done.stderr
    assert done.exit_code != 0
