"""The doctor's check of secrets: where they are, who may read them, and which are no longer used."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from midstream.cli.kept_secrets import check_secrets
from midstream.client.os_keyring import OsKeyring
from midstream.client.secret_store import SecretKey, SecretStore, StateFileRef
from midstream.doctor.installation import Check, CheckResult
from midstream.environment import World
from tests.cli.conftest import Run
from tests.client.keyrings import FileKeyring

WAIT_S = 60.0


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "secrets.db"


def _keep(path: Path, *keepers: StateFileRef, keyring: OsKeyring | None = None) -> None:
    async def keep() -> None:
        store = SecretStore(path, world=World(), keyring=keyring)
        for number, keeper in enumerate(keepers):
            await store.put(SecretKey("server", "s1", f"stream-{number}"), "a-secret", keeper=keeper)
        await store.close()

    asyncio.run(keep())


def test_without_secrets_there_is_no_warning_and_no_file_is_created(path: Path) -> None:
    check = check_secrets(path)
    assert (check.verdict, path.exists()) == (CheckResult.OK, False)


def test_a_check_has_the_counts_in_the_file_and_in_the_keyring(path: Path, ring: FileKeyring) -> None:
    _keep(path, StateFileRef("one", str(path)), StateFileRef("two", str(path)))
    words = f"2 are stored in {str(path)!r}, which only this user can read"
    assert check_secrets(path) == Check("secrets", CheckResult.OK, words)
    _keep(path, *[StateFileRef("one", str(path))] * 3, keyring=OsKeyring(answer_s=WAIT_S))
    assert check_secrets(path) == Check("secrets", CheckResult.OK, f"{words}; the keyring has 1")
    assert ring.stored() == ["a-secret"]


def test_secrets_of_a_missing_checkpoint_are_a_warning(path: Path, tmp_path: Path) -> None:
    _keep(path, StateFileRef("one", str(tmp_path / "gone.db")))
    check = check_secrets(path)
    assert (check.verdict, "1 are no longer used" in check.words) == (CheckResult.WARNING, True)


def test_a_file_that_others_may_read_is_a_problem_also_in_json(run: Run, path: Path) -> None:
    _keep(path, StateFileRef("one", str(path)))
    well = json.loads(run("doctor", "--port", "0", "--json").stdout)
    (checks,) = [check for check in well["checks"] if check["name"] == "secrets"]
    assert (well["is_healthy"], checks["verdict"], "1 are stored in" in checks["words"]) == (True, "ok", True)
    path.chmod(0o644)
    done = run("doctor", "--port", "0", "--json")
    (checks,) = [check for check in json.loads(done.stdout)["checks"] if check["name"] == "secrets"]
    assert (done.exit_code, checks["verdict"], "chmod 600" in checks["words"]) == (6, "problem", True)
