"""What the doctor says of secrets: where they are, who may read them, and which are of no use any more."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from midstream.cli.kept_secrets import check_secrets
from midstream.client.os_keyring import OsKeyring
from midstream.client.secret_store import Keeper, SecretKey, SecretStore
from midstream.doctor.installation import Check, Verdict
from midstream.testing.worlds import FakeWorld
from midstream.world import World
from tests.cli.conftest import Run
from tests.client.keyrings import FileKeyring

WAIT_S = 20.0


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "secrets.db"


def _keep(path: Path, *keepers: Keeper) -> None:
    async def keep() -> None:
        store = SecretStore(path, world=World(), keyring=OsKeyring(put_s=WAIT_S))
        for number, keeper in enumerate(keepers):
            await store.put(SecretKey("server", "s1", f"stream-{number}"), "a-secret", keeper=keeper)
        await store.close()

    asyncio.run(keep())


def _check(path: Path) -> Check:
    return check_secrets(path, keyring=OsKeyring(put_s=WAIT_S), world=FakeWorld(at=World().now()))


def test_without_any_nothing_is_warned_of_and_nothing_is_made(path: Path) -> None:
    check = _check(path)
    assert (check.verdict, "no keyring answers here" in check.words, path.exists()) == (
        Verdict.OK,
        True,
        False,
    )


def test_a_file_that_is_used_is_warned_of(path: Path) -> None:
    _keep(path, Keeper("one", str(path)), Keeper("two", str(path)))
    check = _check(path)
    assert check.verdict is Verdict.WARNING
    assert check.words.startswith(f"2 stand in {str(path)!r}, which only this user may read; ")
    assert "a-secret" not in check.words


def test_a_keyring_that_has_them_is_well(path: Path, ring: FileKeyring) -> None:
    _keep(path, Keeper("one", str(path)))
    check = _check(path)
    expected = f"the keyring has 1; new ones go to the keyring ({ring.name})"
    assert check == Check("secrets", Verdict.OK, expected)


def test_secrets_of_a_checkpoint_that_is_gone_are_warned_of(
    path: Path, ring: FileKeyring, tmp_path: Path
) -> None:
    _keep(path, Keeper("one", str(tmp_path / "gone.db")))
    check = _check(path)
    assert (check.verdict, "1 belong to nothing any more" in check.words) == (Verdict.WARNING, True)


def test_a_file_that_others_may_read_is_a_problem_and_told_as_json_too(run: Run, path: Path) -> None:
    _keep(path, Keeper("one", str(path)))
    warned = json.loads(run("doctor", "--port", "0", "--json").stdout)
    (told,) = [check for check in warned["checks"] if check["name"] == "secrets"]
    assert (warned["is_healthy"], told["verdict"], "1 stand in" in told["words"]) == (True, "warning", True)
    path.chmod(0o644)
    done = run("doctor", "--port", "0", "--json")
    (told,) = [check for check in json.loads(done.stdout)["checks"] if check["name"] == "secrets"]
    assert (done.exit_code, told["verdict"], "chmod 600" in told["words"]) == (6, "problem", True)
