"""The example of `docs/guides/transactions.md` runs, and its limits are correct."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from midstream.engine.agent import Agent
from midstream.engine.host import Host
from midstream.history.compaction import SHOWN_CHARS_MAX
from midstream.session.blobs import BLOB_BYTES_MIN, EXCERPT_CHARS
from midstream.session.records import CallEnded
from midstream.store.sqlite import SQLiteStore
from midstream.store.sqlite.effects import SLOW_S
from midstream.testing import ScriptedModel, calls, run_turn, text
from midstream.tools.function_tools import RESULT_CHARS_MAX, TRANSACTION_S

GUIDE = (Path(__file__).parents[2] / "docs" / "guides" / "transactions.md").read_text(encoding="utf-8")


async def test_the_example_orders(tmp_path: Path) -> None:
    (example,) = re.findall(r"^```python\n(.*?)^```", GUIDE, re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(example, "transactions.md", "exec"), names)  # it is our own guide
    batch = calls(("order", '{"item":"tea"}'), ("order", '{"item":"milk"}'))
    agent = Agent(ScriptedModel([batch, text("ordered")]), tools=[names["order"]])
    host = Host(agent, SQLiteStore(tmp_path / "x.db"))
    await host.start()
    records = await run_turn(host, "s", "tea with milk")
    await host.stop()
    results = [record.result.content for record in records if isinstance(record, CallEnded)]
    assert results == ["tea is ordered: 1 orders so far", "milk is ordered: 2 orders so far"]


@pytest.mark.parametrize(
    "text",
    [
        f"{TRANSACTION_S:g} s",
        f"{SLOW_S:g} s",
        f"{BLOB_BYTES_MIN // 1024} KiB",
        f"{EXCERPT_CHARS} characters",
        f"{SHOWN_CHARS_MAX // 1024} Ki characters",
        f"{RESULT_CHARS_MAX // 2**20} Mi characters",
    ],
)
def test_the_limits_are_those_of_the_code(text: str) -> None:
    assert text in GUIDE.replace("\n", " ")
