"""Errors of the servers as errors of ours."""

from __future__ import annotations

from pathlib import Path

import pytest

from midstream.errors import (
    StoreBusyError,
    StoreFullError,
    UsageError,
)
from midstream.session.records import Sync
from midstream.store.contract import Batch, SessionListing
from midstream.store.jetstream import JetStreamStore
from midstream.store.jetstream.jetstream_errors import (
    BatchRefusedError,
    NoMessageError,
    NoStreamError,
    SubjectMovedError,
    error_of,
)
from tests.store.stores import append, bodies

GUIDE = (Path(__file__).parents[3] / "docs" / "guides" / "jetstream.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("has_mark", [False, True])
async def test_a_full_stream_refuses_and_accepts_again_when_there_is_space(
    store: JetStreamStore, *, has_mark: bool
) -> None:
    epoch = await store.claim("s", at=1.0)
    await append(store, b"a", expected=0, epoch=epoch)
    opened = store._opened
    assert opened is not None
    stream = opened.presence._subjects.session("s").stream
    config = (await opened.link.api(f"STREAM.INFO.{stream}"))["config"]
    await opened.link.api(f"STREAM.UPDATE.{stream}", {**config, "max_bytes": 2000})
    batch = Batch(
        [b"x" * 3000], 1, epoch, Sync.FULL, SessionListing(is_live=True, at=2.0) if has_mark else None
    )
    with pytest.raises(StoreFullError, match="free some"):
        await store.append("s", batch)
    assert await bodies(store) == [b"a"]
    await opened.link.api(f"STREAM.UPDATE.{stream}", config)
    assert await store.append("s", batch) == 2
    line = await store.find("s")
    assert line is not None
    assert line.mark.is_live == has_mark


def test_each_server_error_maps_to_one_of_ours() -> None:
    kinds = {
        10071: SubjectMovedError,
        10164: SubjectMovedError,
        10037: NoMessageError,
        10059: NoStreamError,
        10210: BatchRefusedError,
        10047: StoreFullError,
        10076: UsageError,
        10054: UsageError,
        10008: StoreBusyError,
        99999: StoreBusyError,
    }
    assert {code: type(error_of(code, "words", "where")) for code in kinds} == kinds
