"""Record the golden transcripts of the gateway: `python -m tests.golden.record_gateway [--inputs] [NAME…]`.

With `--inputs` the SDKs run through their stories again; without, the recorded requests are replayed and only
the responses are recorded again.
"""

from __future__ import annotations

import argparse
import asyncio
import json

from tests.golden.gateway_adapter import gateway_before
from tests.golden.transcripts import FOLDER, Json, replayed


async def record_story(name: str) -> Json:
    from tests.golden.gateway_stories import STORIES, gateway_clients

    story = STORIES[name]
    upstream_script = [list(steps) for steps in story.script]
    async with (
        gateway_before(story.kind, upstream_script) as (url, upstream),
        gateway_clients(url, upstream) as talk,
    ):
        await story.live(talk)
        steps = talk.recorder.steps
    return {"upstream": {"kind": story.kind, "script": upstream_script}, "steps": steps}


async def play(story: Json) -> Json:
    """Replay a story before a gateway of its own."""
    async with gateway_before(story["upstream"]["kind"], story["upstream"]["script"]) as (url, upstream):
        return await replayed(story, url, upstream)


def text_of(story: Json) -> str:
    return json.dumps(story, indent=1, sort_keys=True) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.golden.record_gateway")
    parser.add_argument("names", nargs="*", help="the stories; all by default")
    parser.add_argument("--inputs", action="store_true", help="let the SDKs send their requests again, too")
    given = parser.parse_args()
    if given.inputs:
        from tests.golden.gateway_stories import STORIES

        names = given.names or list(STORIES)
    else:
        names = given.names or sorted(path.stem for path in FOLDER.glob("*.json"))
    for name in names:
        path = FOLDER / f"{name}.json"
        story = (
            asyncio.run(record_story(name)) if given.inputs else json.loads(path.read_text(encoding="utf-8"))
        )
        done = asyncio.run(play(story))
        if given.inputs:
            assert done["steps"] == story["steps"], f"{name}: an SDK was answered otherwise than its replay"
        path.write_text(text_of(done), encoding="utf-8")
        print(f"{name}: {len(done['steps'])} steps")  # noqa: T201 - for the person at the recording


if __name__ == "__main__":
    main()
