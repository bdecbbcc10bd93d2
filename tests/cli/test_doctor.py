"""`midstream doctor` for people and scripts: its output, the files it writes, its exit codes."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from midstream.cli.terminal import width_of
from tests.cli.conftest import Run
from tests.cli.on_terminal import OnTerminal
from tests.doctor.files import HISTORIES, put
from tests.spec import spec

LONG_NAME = "a-name-that-is-much-too-long-for-a-line-of-eighty-columns-and-goes-on-and-on.json"


def test_the_text_output_fits_80_columns(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("anthropic.broken.json", "claude-code.valid.jsonl", "opencode.broken"):
        put(tmp_path, name)
    Path("cut.json").write_text('[{"role": "user", "con')
    Path("NaN.json").write_text('{"top_p": NaN, "messages": [{"role": "user", "content": "hi"}]}')
    done = run("doctor", "--fix", ".")
    assert done.stdout == GOLDEN
    assert done.stderr == (
        "5 histories: 1 clean, 2 with findings, 1 with findings that need a loss, 1 unreadable.\n"
    )
    assert done.exit_code == 7
    assert max(map(width_of, done.stdout.splitlines())) <= 80


GOLDEN = """\
✗ NaN.json
  openai-chat for openai-chat, 1 message, 1 finding
  the whole: not-a-number: NaN and Infinity are not JSON.
    repair: replaced by null; lost: NaN
  wrote NaN.repaired.json
! anthropic.broken.json
  anthropic for anthropic, 5 messages, 1 finding
  message 1: dangling-call (toolu_01B): Every tool call has a result, directly
    after it.
    repair: added a result that states the outcome
  wrote anthropic.broken.repaired.json
✓ claude-code.valid.jsonl
  claude-code for anthropic, 12 messages in 2 conversations
  note: line 15 was cut off while it was written; a repaired copy leaves it out
  note: earlier states of parts, folded into the last one: 1
✗ cut.json
  the JSON is cut off at line 1, column 19 [cut-json]
! opencode.broken/storage
  opencode for opencode, 2 messages, 1 finding
  message/ses_1/msg_2.json, message 1: dangling-call (call_A): Every tool call
    has a result, directly after it.
    repair: added a result that states the outcome
  wrote opencode.broken/storage.repaired
"""


def test_on_a_terminal_long_names_are_shortened_and_colours_are_optional(
    on_terminal: OnTerminal, tmp_path: Path
) -> None:
    (tmp_path / LONG_NAME).write_text("[]")
    seen = on_terminal("doctor", tmp_path / LONG_NAME)
    assert seen.code == 6
    assert max(map(width_of, seen.text.splitlines())) <= 80
    assert "…" in seen.text


def test_json_is_one_object_per_history_with_every_field(run: Run, tmp_path: Path) -> None:
    put(tmp_path, "codex.broken.jsonl")
    put(tmp_path, "gemini.valid.json")
    lines = [json.loads(line) for line in run("doctor", "--json", tmp_path).stdout.splitlines()]
    assert [line["status"] for line in lines] == ["findings", "clean"]
    assert sorted(lines[0]) == sorted(lines[1])
    assert lines[0]["findings"] == [
        {
            "code": "dangling-call",
            "rule": "Every tool call has a result, directly after it.",
            "repair": "added a result that states the outcome",
            "line": 6,
            "message": -1,
            "part": -1,
            "call_id": "call_A",
            "lost": "",
            "file": "",
        }
    ]


@pytest.mark.parametrize(
    ("names", "code"),
    [
        (["gemini.valid.json"], 0),
        (["gemini.valid.json", "gemini.broken.json"], 6),
        (["gemini.broken.json", "none.json"], 3),
        (["none.json", "lossy.jsonl"], 7),
        (["cut.json"], 7),
    ],
)
def test_exit_codes(run: Run, tmp_path: Path, names: list[str], code: int) -> None:
    for name in names:
        if (HISTORIES / name).exists():
            put(tmp_path, name)
    (tmp_path / "lossy.jsonl").write_text(
        '{"role":"user","content":"hi"}\n{"ro\n{"role":"user","content":"hi"}\n'
    )
    (tmp_path / "cut.json").write_text('[{"role"')
    assert run("doctor", *(tmp_path / name for name in names)).exit_code == code


def test_other_files_of_a_folder_are_not_reported(run: Run, tmp_path: Path) -> None:
    put(tmp_path, "gemini.valid.json")
    (tmp_path / "package.json").write_text('{"name": "x"}')
    (tmp_path / "empty.json").write_text("")
    done = run("doctor", tmp_path)
    assert (done.exit_code, done.stderr) == (0, "1 history: 1 clean.\n")
    assert "package.json" not in done.output


def test_a_folder_without_a_history_is_not_found(run: Run, tmp_path: Path) -> None:
    (tmp_path / "package.json").write_text('{"name": "x"}')
    done = run("doctor", tmp_path)
    assert done.exit_code == 3
    assert "it contains no history [no-history]" in done.stdout


def test_in_place_replaces_and_keeps_the_original(run: Run, tmp_path: Path) -> None:
    path = put(tmp_path, "tunacode.broken.json")
    before = path.read_bytes()
    done = run("doctor", "--fix", "--in-place", path)
    assert done.exit_code == 6
    assert f"the original is {'…' if len(str(path)) > 58 else ''}" in done.stdout
    assert (tmp_path / "tunacode.broken.json.bak").read_bytes() == before
    assert run("doctor", path).exit_code == 0


@spec("SEC-58")
def test_a_link_out_of_the_folder_is_reported_and_not_repaired(run: Run, tmp_path: Path) -> None:
    outside, folder = put(tmp_path, "tunacode.broken.json"), tmp_path / "folder"
    folder.mkdir()
    (folder / "link.json").symlink_to(outside)
    before = outside.read_bytes()
    (folder / "inside.json").write_bytes(before)
    done = run("doctor", folder, "--fix", "--in-place", "--json")
    reports = {Path(line["path"]).name: line for line in map(json.loads, done.stdout.splitlines())}
    assert outside.read_bytes() == before
    assert (folder / "link.json").is_symlink()
    assert reports["link.json"]["written"] == ""
    assert "not repaired" in reports["link.json"]["notes"][-1]
    assert reports["inside.json"]["written"] == str(folder / "inside.json")
    assert run("doctor", folder / "link.json", "--fix", "--in-place").exit_code == 6
    assert outside.read_bytes() != before


def test_without_fix_nothing_is_written_and_the_option_is_shown(run: Run, tmp_path: Path) -> None:
    path = put(tmp_path, "tunacode.broken.json")
    before = sorted(tmp_path.iterdir())
    done = run("doctor", path)
    assert done.stderr.endswith("--fix writes repaired copies beside the files.\n")
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--for", "nobody"], "unknown profile 'nobody'"),
        (["--format", "klingon"], "unknown format 'klingon'"),
        (["--in-place"], "give both"),
    ],
)
def test_wrong_use_is_reported_before_anything_is_read(
    run: Run, tmp_path: Path, arguments: list[str], expected: str
) -> None:
    done = run("doctor", *arguments, put(tmp_path, "gemini.broken.json"))
    assert (done.exit_code, done.stdout) == (2, "")
    assert expected in done.stderr


def test_many_findings_are_counted_and_the_first_few_are_shown(run: Run, tmp_path: Path) -> None:
    calls = [{"type": "tool_use", "id": f"toolu_{at}", "name": "f", "input": {}} for at in range(9)]
    path = tmp_path / "many.json"
    path.write_text(json.dumps([{"role": "user", "content": "x"}, {"role": "assistant", "content": calls}]))
    done = run("doctor", path)
    assert done.stdout.count(": dangling-call (") == 5
    assert "... and 4 more; --json has all" in done.stdout


def test_no_content_of_a_file_acts_on_the_terminal(run: Run, tmp_path: Path) -> None:
    hostile = "a\x1b[2J\x1b]0;pwned\x07\u202e\nb"
    call = {"type": "tool_use", "id": hostile, "name": hostile, "input": {}}
    path = tmp_path / "evil\x1b[31m.json"
    path.write_text(json.dumps([{"role": hostile, "content": "x"}, {"role": "assistant", "content": [call]}]))
    for more in ([], ["--json"]):
        done = run("doctor", *more, path)
        assert done.exit_code == 6
        assert not set(done.output) & {"\x1b", "\x07", "\u202e"}


def test_file_names_that_are_not_text_are_reported(run: Run, tmp_path: Path) -> None:
    path = os.fsencode(tmp_path) + b"/\xff.json"
    try:
        Path(os.fsdecode(path)).write_text("[]")
    except OSError:
        pytest.skip("this file system wants names in UTF-8")
    for more in ([], ["--json"]):
        assert run("doctor", *more, tmp_path).exit_code == 6


def test_without_a_path_the_installation_is_checked(run: Run, tmp_path: Path) -> None:
    done = run("doctor", "--port", "0")
    assert done.exit_code == 0
    assert [line.split()[1] for line in done.stdout.splitlines() if line[0] in "✓!✗"][:2] == [
        "versions",
        "sqlite",
    ]
    assert max(map(width_of, done.stdout.splitlines())) <= 80
    report = json.loads(run("doctor", "--port", "0", "--json").stdout)
    assert report["is_healthy"] is True
    assert {check["verdict"] for check in report["checks"]} <= {"ok", "warning"}


DOCTOR = [sys.executable, "-m", "midstream", "doctor"]


def _doctor(*arguments: object, **more: Any) -> subprocess.CompletedProcess[bytes]:  # noqa: ANN401 - as subprocess has it
    command = [*DOCTOR, *map(str, arguments)]
    return subprocess.run(command, capture_output="stdout" not in more, timeout=60, check=False, **more)


@pytest.mark.slow
def test_standard_input_is_read_from_a_pipe() -> None:
    body = (HISTORIES / "codex.broken.jsonl").read_bytes()
    done = _doctor("--json", "-", input=body)
    report = json.loads(done.stdout)
    assert (done.returncode, report["path"], report["format"], report["status"]) == (
        6,
        "-",
        "codex",
        "findings",
    )
    refused = _doctor("--fix", "-", input=body)
    assert (refused.returncode, refused.stdout) == (2, b"")
    assert b"give a file" in refused.stderr


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a full device")
def test_a_full_disk_for_the_output_is_reported_in_one_line(tmp_path: Path) -> None:
    path = put(tmp_path, "codex.broken.jsonl")
    with Path("/dev/full").open("wb") as full:
        done = _doctor(path, stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 1
    assert done.stderr.endswith(b"the output could not be written: No space left on device. [output]\n")


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="needs limits of POSIX")
@pytest.mark.parametrize("more", [[], ["--in-place"]])
def test_a_copy_without_disk_space_is_reported_and_removed(tmp_path: Path, more: list[str]) -> None:
    path = put(tmp_path, "codex.broken.jsonl")
    before = path.read_bytes()
    script = f"ulimit -f 0; exec {shlex.join([*DOCTOR, '--fix', *more, str(path)])}"
    done = subprocess.run(["/bin/sh", "-c", script], capture_output=True, timeout=60, check=False)
    assert done.returncode == 7
    assert b"cannot be written: File too large [unavailable]" in b" ".join(done.stdout.split())
    assert [(each.name, each.read_bytes()) for each in tmp_path.iterdir()] == [(path.name, before)]


@pytest.mark.slow
def test_a_closed_output_is_not_an_error(tmp_path: Path) -> None:
    for number in range(40):
        (tmp_path / f"{number}.json").write_text("[]")
    command = f"{shlex.join([*DOCTOR, '--json', str(tmp_path)])} | head -n 1"
    done = subprocess.run(["/bin/sh", "-c", command], capture_output=True, timeout=60, check=False)
    assert done.stdout.count(b"\n") == 1
    assert b"bug" not in done.stderr
    assert b"Traceback" not in done.stderr


@pytest.mark.slow
def test_ctrl_c_ends_it_and_leaves_no_draft(tmp_path: Path) -> None:
    path = tmp_path / "long.jsonl"
    lines = (HISTORIES / "codex.broken.jsonl").read_text().splitlines(keepends=True)
    path.write_text("".join([*lines, *lines[1:] * 3_000]))
    with subprocess.Popen(
        [*DOCTOR, "--fix", str(path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as done:
        for _ in range(3000):  # until it has started to write
            with contextlib.suppress(subprocess.TimeoutExpired):
                done.wait(timeout=0.02)
            if len([*tmp_path.iterdir()]) > 1 or done.poll() is not None:
                break
        done.send_signal(signal.SIGINT)
        out, output = done.communicate(timeout=60)
    assert (done.returncode, b"Traceback" in output, out) == (130, False, b"")
    assert [each.name for each in tmp_path.iterdir()] == ["long.jsonl"]


def test_a_folder_without_search_permission_is_reported(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "closed").mkdir()
    put(tmp_path, "gemini.valid.json")
    scandir = os.scandir

    def refuse(path: Any) -> Any:  # noqa: ANN401 - as os has it
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)  # root may read everything
    monkeypatch.setattr(os, "access", lambda path, _: not str(path).endswith("closed"))
    done = run("doctor", tmp_path)
    assert done.exit_code == 7
    assert "this user has no permission to read it [no-permission]" in done.stdout


def test_a_report_has_the_documented_fields(run: Run, tmp_path: Path) -> None:
    report = json.loads(run("doctor", "--json", put(tmp_path, "gemini.broken.json")).stdout)
    assert list(report) == [
        "path",
        "status",
        "format",
        "profile",
        "messages",
        "conversations",
        "findings",
        "notes",
        "reason",
        "problem",
        "written",
        "backup",
    ]


def test_progress_over_a_thousand_files_is_shown_only_on_a_terminal(
    on_terminal: OnTerminal, tmp_path: Path
) -> None:
    body = (HISTORIES / "gemini.valid.json").read_bytes()
    for number in range(1000):
        (tmp_path / f"{number:04}.json").write_bytes(body)
    seen = on_terminal("doctor", tmp_path)
    assert seen.code == 0
    assert "1000 histories: 1000 clean." in seen.text


def test_help_has_the_exit_codes(run: Run) -> None:
    text = run("doctor", "--help").stdout
    assert "7  a file cannot be read, or cannot be repaired without loss" in text
