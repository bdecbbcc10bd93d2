"""An incomplete story proves nothing and reports that; a complete one has a verdict."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from midstream.cli.demo_screen import DemoScreen
from midstream.cli.terminal import PLAIN
from midstream.demo.check import DemoVerdict
from midstream.demo.demo_server import DemoServer
from midstream.demo.folder import Folder
from midstream.demo.script import LINES, Lines
from midstream.demo.story import Story
from midstream.environment import World
from midstream.errors import UnavailableError

SHORT = "something the scripted model does not know"


class DemoStage:
    """A folder, a server, and the output of the demo."""

    def __init__(self, path: Path) -> None:
        self.folder = Folder(path)
        self.folder.make()
        self.server = DemoServer(self.folder, "scripted", 0, World())
        self.seen: list[str] = []

    def story(self, lines: Lines = LINES) -> Story:
        return Story(self.folder, self.server, DemoScreen(self.seen.append, PLAIN), World(), lines=lines)


async def run_story(story: Story) -> DemoVerdict:
    await story.run("")
    assert story.verdict is not None
    assert story.timings is not None
    return story.verdict


@pytest.fixture
async def stage(tmp_path: Path) -> AsyncIterator[DemoStage]:
    stage = DemoStage(tmp_path)
    yield stage
    await stage.server.stop()


async def test_an_answer_too_short_to_be_cut_is_no_proof(stage: DemoStage) -> None:
    with pytest.raises(UnavailableError, match="nothing was cut"):
        await stage.story(Lines(SHORT, LINES.write, LINES.again)).run("")


async def test_a_tool_that_was_not_called_is_no_proof(stage: DemoStage) -> None:
    with pytest.raises(UnavailableError, match="nothing could be killed"):
        await stage.story(Lines(LINES.ask, SHORT, LINES.again)).run("")


async def test_a_complete_story_has_a_verdict_and_leaves_the_server_running(stage: DemoStage) -> None:
    verdict = await run_story(stage.story())
    assert verdict.problems == []
    assert [(each.tool, each.started, each.outcome) for each in verdict.executions] == [
        ("search_files", 1, "ok"),
        ("read_file", 1, "ok"),
        ("write_note", 1, "unknown"),
        ("list_files", 1, "ok"),
        ("write_note", 1, "ok"),
    ]
    seen = "".join(stage.seen)
    assert seen.index("✂") < seen.index("reconnected by itself") < seen.index("☠")
    await stage.server.kill()  # the server is still running


@pytest.mark.long
async def test_a_second_story_in_a_kept_folder_is_judged_separately(stage: DemoStage) -> None:
    first, second = stage.story(), stage.story()
    assert first.session != second.session
    assert (await run_story(first)).problems == []
    await stage.server.stop()
    assert (await run_story(second)).problems == []
