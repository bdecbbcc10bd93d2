"""The operator's settings in a file: read, followed, and unharmed by mistakes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from midstream.environment import World
from midstream.errors import UsageError
from midstream.protocol.stream_settings import StreamSettings
from midstream.server.settings_file import SettingsFile
from tests.spec import spec

WAIT_S = 60.0


class Stepped(World):
    """A world where the test decides when a second is over."""

    def __init__(self) -> None:
        self._asleep = asyncio.Event()
        self._wake = asyncio.Event()

    async def sleep(self, seconds: float) -> None:
        self._asleep.set()
        await self._wake.wait()
        self._wake.clear()

    async def pass_a_second(self) -> None:
        """Return when all due work of this second is done."""
        self._asleep.clear()
        self._wake.set()
        await self._asleep.wait()


@contextlib.asynccontextmanager
async def followed(path: Path) -> AsyncIterator[tuple[Stepped, list[float]]]:
    """Follow a file; collect the heartbeat of each change."""
    reported: list[float] = []
    world = Stepped()
    file = SettingsFile(path, world=world)
    file.read()
    following = asyncio.create_task(file.follow(lambda settings: reported.append(settings.heartbeat_s)))
    try:
        async with asyncio.timeout(WAIT_S):
            await asyncio.sleep(0)
            yield world, reported
    finally:
        following.cancel()
        await asyncio.wait([following])


def test_a_missing_setting_has_its_default(tmp_path: Path) -> None:
    path = tmp_path / "streams.toml"
    path.write_text("# of the harbour office\nlook_back_s = 60\nis_recovery_on = false\n")
    assert SettingsFile(path).read() == StreamSettings(is_recovery_on=False, look_back_s=60.0)
    path.write_text("")
    assert SettingsFile(path).read() == StreamSettings()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"heartbeat_s = 0", "`heartbeat_s` is 0.0; expected 0.1 to 300 seconds"),
        (b"heartbeat_s = nan", "`heartbeat_s` is nan"),
        (b"heartbeats = 3", "unknown field `heartbeats`"),
        (b'heartbeat_s = "10"', "Expected `float`, got `str`"),
        (b"heartbeat_s = ", "Invalid value"),
        (b"\xff", "utf-8"),
    ],
)
def test_an_invalid_setting_is_refused_with_its_reason(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "streams.toml"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=words) as refused:
        SettingsFile(path).read()
    assert str(path) in refused.value.message


def test_a_missing_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        SettingsFile(tmp_path / "streams.toml").read()


@spec("STREAM-56")
async def test_each_change_is_announced_once(tmp_path: Path) -> None:
    path, beside = tmp_path / "streams.toml", tmp_path / "new"
    path.write_text("heartbeat_s = 1")
    async with followed(path) as (world, announced):
        for content in ("heartbeat_s = 22", "heartbeat_s = 4"):
            beside.write_text(content)
            beside.replace(path)
            for _ in range(3):
                await world.pass_a_second()
        assert announced == [22.0, 4.0]


async def test_a_partly_written_file_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "streams.toml"
    path.write_text("heartbeat_s = 1")
    async with followed(path) as (world, announced):
        for content in ("", "heartbeat_s = 2", "heartbeat_s = 22"):
            path.write_text(content)
            await world.pass_a_second()
        assert announced == []
        await world.pass_a_second()
        assert announced == [22.0]


async def test_an_invalid_or_missing_file_leaves_the_settings_in_effect(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "streams.toml"
    path.write_text("heartbeat_s = 1")
    async with followed(path) as (world, announced):
        path.unlink()
        for _ in range(2):
            await world.pass_a_second()
        with caplog.at_level(logging.WARNING):
            path.write_text("heartbeat_s = 333333")
            for _ in range(3):
                await world.pass_a_second()
        assert (announced, caplog.text.count("the previous settings remain in effect")) == ([], 1)
        path.write_text("heartbeat_s = 4")
        for _ in range(2):
            await world.pass_a_second()
        assert announced == [4.0]
