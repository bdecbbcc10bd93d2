"""`midstream gateway usage`: sums of the usage in a store."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from midstream.cli.store_option import encrypted_store
from midstream.dialects.usage_ledger import UsageLedger
from midstream.dialects.usage_totals import Prices
from midstream.environment import World
from midstream.history.messages import Usage
from midstream.store.sqlite import SQLiteStore
from tests.cli.conftest import Run

NOON = 1_795_780_800.0
DAY_S = 24 * 3600.0


class UsageClock(World):
    time = NOON

    def now(self) -> float:
        return self.time


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Return a store with usage of two days."""
    path = tmp_path / "gateway.db"

    async def fill() -> None:
        clock = UsageClock()
        kept = SQLiteStore(str(path))
        await kept.open()
        ledger = UsageLedger(kept, {"priced": Prices(1, 2)}, clock)
        for day, user, model in (
            (0, "ada", "priced"),
            (0, "", "free"),
            (1, "ada", "free"),
            (1, "eve", "priced"),
        ):
            clock.time = NOON + day * DAY_S
            name = await ledger.begin(user, model, "")
            await ledger.end(name, Usage(1000, 500, 300, 0, 50), at=clock.time)
        clock.time = NOON + DAY_S / 2  # the first day is folded, the second is not
        await ledger.fold(await ledger.refresh())
        await kept.close()

    asyncio.run(fill())
    return path


def test_all_columns_are_shown_by_default(run: Run, store: Path) -> None:
    rows = [line.split("\t") for line in run("gateway", "--store", store, "usage").stdout.splitlines()]
    assert rows == [
        ["2026-11-27", "(gateway's key)", "free", "1", "1000", "300", "500", "50", "-"],
        ["2026-11-27", "ada", "priced", "1", "1000", "300", "500", "50", "0.0020"],
        ["2026-11-28", "ada", "free", "1", "1000", "300", "500", "50", "-"],
        ["2026-11-28", "eve", "priced", "1", "1000", "300", "500", "50", "0.0020"],
    ]


def test_sums_are_by_the_given_columns_from_a_given_day_on(run: Run, store: Path) -> None:
    def report(*words: str) -> list[dict[str, object]]:
        done = run("gateway", "--store", store, "usage", "--json", *words)
        return [json.loads(line) for line in done.stdout.splitlines()]

    ada = next(line for line in report("--by", "user") if line["user"] == "ada")
    assert ada == {
        "day": None,
        "user": "ada",
        "model": None,
        "requests": 2,
        "input_tokens": 2000,
        "output_tokens": 1000,
        "cached_tokens": 600,
        "reasoning_tokens": 100,
        "cost": 0.002,
        "unpriced_requests": 1,
    }
    assert [line["requests"] for line in report("--by", "day")] == [2, 2]
    assert [line["user"] for line in report("--by", "user", "--since", "2026-11-28")] == ["ada", "eve"]
    assert [line["model"] for line in report("--by", "model", "--since", "2026-11")] == ["free", "priced"]
    assert report("--since", "2026-12") == []


def test_an_encrypted_store_is_read_with_its_keys_and_refused_without(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    path, keys = tmp_path / "gateway.db", tmp_path / "keys"

    async def fill() -> None:
        kept = encrypted_store(str(path), keys, is_escrowed=False)
        await kept.open()
        ledger = UsageLedger(kept, {}, World())
        await ledger.end(await ledger.begin("ada", "m", ""), None, at=1.0)
        await kept.close()

    asyncio.run(fill())
    of_store = ("gateway", "--store", path)
    assert run(*of_store, "--key-file", keys, "usage", "--by", "user").stdout.startswith("ada\t1\t")
    refused = run(*of_store, "usage")
    assert (refused.exit_code, "is encrypted; give --key-file" in refused.stderr) == (2, True)


def test_an_options_file_gives_the_store_and_an_invalid_day_is_refused(
    run: Run, store: Path, tmp_path: Path
) -> None:
    config = tmp_path / "gateway.toml"
    config.write_text('upstream = "scripted"\nstore = "gateway.db"\n')
    assert len(run("gateway", "--config", config, "usage").stdout.splitlines()) == 4
    assert run("gateway", "--store", store, "usage", "--since", "yesterday").exit_code == 2
