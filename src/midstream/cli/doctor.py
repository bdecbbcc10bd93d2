"""`midstream doctor`: say what is wrong with history files, and write repaired copies."""

from __future__ import annotations

import json
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from midstream.cli import Surroundings
from midstream.cli.exits import UNREADABLE, VERIFICATION
from midstream.cli.terminal import clean, escaped_json
from midstream.core.repair.refusals import REFUSALS
from midstream.errors import InvalidHistoryError, UsageError
from midstream.history import Repaired, repair
from midstream.integrations.history_files import Stored, read_history, write_history

SHOWN_MAX = 5
"""Findings shown for a file; --json has all."""
SUFFIXES = (".json", ".jsonl")


@click.command()
@click.argument("paths", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
@click.option(
    "--for", "profile", metavar="PROFILE", help="Judge for this provider (default: the format's own)."
)
@click.option("--format", "form", metavar="FORMAT", help="Whose messages these are (default: found out).")
@click.option("--fix", is_flag=True, help="Write a repaired copy beside each file, as NAME.repaired.SUFFIX.")
@click.option(
    "--in-place", is_flag=True, help="With --fix: replace the file, and keep it as NAME.SUFFIX.bak."
)
@click.option("--json", "is_json", is_flag=True, help="Answer in JSON, one line a file.")
@click.pass_obj
def doctor(
    surroundings: Surroundings,
    paths: tuple[Path, ...],
    *,
    profile: str | None,
    form: str | None,
    fix: bool,
    in_place: bool,
    is_json: bool,
) -> int:
    """Check history files and repair copies of them.

    Reads Claude Code, Codex, pydantic-ai, OpenAI, Anthropic, Gemini, Bedrock, Mistral, LangChain and tunacode files.
    Ends with 0 if all is well, 6 if something would be refused, 7 if a file could not be read or a repair lost
    something.
    """
    if in_place and not fix:
        raise UsageError("--in-place does nothing without --fix")
    worst = 0
    for path in _files(paths):
        try:
            stored = read_history(path, form)
            done = repair(stored.messages, format=stored.form, profile=profile, system=stored.system)
        except (InvalidHistoryError, OSError) as error:
            worst = UNREADABLE
            _say(surroundings, {"file": str(path), "error": str(error)}, is_json=is_json)
            continue
        answer = _answer(path, stored, done)
        if fix and done.is_changed:
            answer["written"] = str(_fixed(path, stored, done, in_place=in_place))
        worst = max(worst, UNREADABLE if done.is_lossy else VERIFICATION if done.is_changed else 0)
        _say(surroundings, answer, is_json=is_json)
    return worst


def _files(paths: tuple[Path, ...]) -> Iterator[Path]:
    for path in paths:
        if path.is_dir():
            yield from sorted(each for each in path.rglob("*") if each.suffix in SUFFIXES and each.is_file())
        else:
            yield path


def _answer(path: Path, stored: Stored, done: Repaired) -> dict[str, Any]:
    findings = [
        {
            "code": edit.code,
            "at": edit.at,
            "part": edit.part,
            "call_id": edit.call_id,
            "rule": REFUSALS[edit.code].rule,
            "did": edit.did,
            "lost": edit.lost,
        }
        for edit in done.edits
    ]
    return {
        "file": str(path),
        "kind": stored.kind,
        "format": stored.form,
        "messages": len(stored.messages),
        "notes": list(stored.notes),
        "findings": findings,
    }


def _fixed(path: Path, stored: Stored, done: Repaired, *, in_place: bool) -> Path:
    target = path if in_place else path.with_name(f"{path.stem}.repaired{path.suffix}")
    if in_place:
        shutil.copy2(path, path.with_name(path.name + ".bak"))
    write_history(stored, done.messages, path, target)
    return target


def _say(surroundings: Surroundings, answer: dict[str, Any], *, is_json: bool) -> None:
    if is_json:
        click.echo(escaped_json(json.dumps(answer, ensure_ascii=False)))
        return
    for line in _lines(answer):
        click.echo(clean(line, is_one_line=True), file=sys.stdout)
    del surroundings


def _lines(answer: dict[str, Any]) -> Iterator[str]:
    if "error" in answer:
        yield f"{answer['file']}: unreadable: {answer['error']}"
        return
    findings = answer["findings"]
    state = f"{len(findings)} findings" if findings else "fine"
    yield f"{answer['file']}: {state} ({answer['kind']}, {answer['format']}, {answer['messages']} messages)"
    for note in answer["notes"]:
        yield f"  note: {note}"
    for finding in findings[:SHOWN_MAX]:
        yield f"  message {finding['at']}: {finding['code']}: {finding['did']}"
    if len(findings) > SHOWN_MAX:
        rest = Counter(finding["code"] for finding in findings[SHOWN_MAX:])
        yield "  and " + ", ".join(f"{count} {code}" for code, count in rest.most_common())
    if "written" in answer:
        yield f"  repaired copy: {answer['written']}"
