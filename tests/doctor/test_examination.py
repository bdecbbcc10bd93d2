"""Every format is recognized by its content, judged by its own provider's rules, and its repaired copy is clean."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from midstream.doctor.examination import examine
from midstream.doctor.findings import Status
from tests.doctor.files import HISTORIES, put, read_lines, write_lines

BROKEN = sorted(path.name for path in HISTORIES.iterdir() if ".broken" in path.name)
VALID = sorted(path.name for path in HISTORIES.iterdir() if ".valid" in path.name)

# The format of each hand-made file, and the rules that apply to it.
KINDS = {
    "anthropic": ("anthropic", "anthropic"),
    "bedrock": ("bedrock", "bedrock-claude"),
    "claude-code": ("claude-code", "anthropic"),
    "codex": ("codex", "responses"),
    "codex-compacted": ("codex", "responses"),
    "gemini": ("gemini", "gemini"),
    "langchain": ("langchain", "neutral"),
    "langgraph": ("langchain", "neutral"),
    "message-lines": ("openai-chat", "openai-chat"),
    "mistral": ("mistral", "mistral"),
    "openai-chat": ("openai-chat", "openai-chat"),
    "openai-responses": ("openai-responses", "responses"),
    "opencode": ("opencode", "opencode"),
    "pydantic-ai": ("pydantic-ai", "pydantic-ai"),
    "request-lines": ("openai-chat", "openai-chat"),
    "tunacode": ("tunacode", "pydantic-ai"),
    "tunacode-tinyagent": ("tunacode", "neutral"),
}


def test_there_is_a_broken_and_a_valid_history_of_every_kind() -> None:
    assert {name.partition(".")[0] for name in BROKEN} == set(KINDS)
    assert {name.partition(".")[0] for name in VALID} == set(KINDS) - {"codex-compacted"}


@pytest.mark.parametrize("name", VALID)
def test_a_valid_history_is_clean_and_there_is_nothing_to_write(tmp_path: Path, name: str) -> None:
    done = examine(put(tmp_path, name))
    assert (done.report.status, done.report.findings, done.remedy) == (Status.CLEAN, (), None)
    assert (done.report.format, done.report.profile) == KINDS[name.partition(".")[0]]


@pytest.mark.parametrize("name", BROKEN)
def test_a_call_without_a_result_is_found_and_the_copy_has_one(tmp_path: Path, name: str) -> None:
    path = put(tmp_path, name)
    done = examine(path)
    assert done.report.status is Status.FINDINGS
    assert done.report.findings[0].code == "dangling-call"
    assert (done.report.format, done.report.profile) == KINDS[name.partition(".")[0]]
    before = _contents(path)
    assert done.remedy is not None
    copy = done.remedy.beside().path
    assert ".repaired" in copy.name
    assert _contents(path) == before
    again = examine(copy)
    assert (again.report.status, again.report.findings) == (Status.CLEAN, ())


@pytest.mark.parametrize("name", BROKEN)
def test_in_place_the_original_is_kept_as_a_backup(tmp_path: Path, name: str) -> None:
    path = put(tmp_path, name)
    before = _contents(path)
    remedy = examine(path).remedy
    assert remedy is not None
    backup = remedy.in_place().backup
    assert backup is not None
    assert backup.read_bytes() in before.values()
    assert examine(path).report.status is Status.CLEAN


def test_unchanged_lines_keep_their_bytes(tmp_path: Path) -> None:
    path = put(tmp_path, "codex.broken.jsonl")
    remedy = examine(path).remedy
    assert remedy is not None
    old, new = path.read_bytes().splitlines(), remedy.beside().path.read_bytes().splitlines()
    assert [line for line in new if line in old] == old
    assert len(new) == len(old) + 1


def test_a_separate_system_prompt_is_judged_with_the_messages(tmp_path: Path) -> None:
    path = tmp_path / "request.json"
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hello."}]
    path.write_text(json.dumps({"system": "Be brief.", "messages": messages}))
    remedy = examine(path, named="anthropic").remedy
    assert remedy is not None
    written = json.loads(remedy.beside().path.read_text())
    assert "Be brief." in json.dumps(written["system"])
    assert "Be kind." in json.dumps(written)
    assert written["messages"][-1] == messages[1]


def test_another_profile_finds_the_faults_that_its_provider_refuses(tmp_path: Path) -> None:
    path = tmp_path / "chat.json"
    path.write_text(json.dumps([{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]))
    assert examine(path).report.status is Status.CLEAN
    strict = examine(path, profile="strict-template").report
    assert [found.code for found in strict.findings] == ["same-role-twice"]


def test_a_copy_has_the_indentation_of_its_original(tmp_path: Path) -> None:
    remedy = examine(put(tmp_path, "openai-chat.broken.json")).remedy
    assert remedy is not None
    assert remedy.beside().path.read_text().startswith('[\n  {\n    "role": "system"')


@pytest.mark.parametrize(
    ("body", "reason", "place"),
    [
        (b"hello there", "not-json", "line 1, column 1"),
        (b'[{"role": "user",\n "content": "hel', "cut-json", "line 2, column 13"),
        (b"[" * 10_000 + b"]" * 10_000, "too-deep", "levels deep"),
        (b'[{"role": "user", "content": ' + b"[" * 10_000 + b"]" * 10_000 + b"}]", "too-deep", "levels deep"),
        (b"\x00\x01\x02", "binary", "not text"),
        (b"", "no-history", "is empty"),
        (b" \n ", "no-history", "is empty"),
        (b'{"name": "a package", "version": 1}', "no-history", "without messages"),
        (b"[1, 2, 3]", "no-history", "without messages"),
        (b'[{"role": "user", "content": "\xff\xfe"}]', "not-json", "byte 30"),
    ],
)
def test_a_file_without_a_history_is_reported_with_the_place(
    tmp_path: Path, body: bytes, reason: str, place: str
) -> None:
    path = tmp_path / "file.json"
    path.write_bytes(body)
    done = examine(path)
    assert (done.report.status, done.report.reason, done.remedy) == (Status.UNREADABLE, reason, None)
    assert place in done.report.problem


def test_a_mix_of_formats_is_reported_and_the_format_can_be_given(tmp_path: Path) -> None:
    path = tmp_path / "mixed.json"
    call = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "r"},
    ]
    path.write_text(json.dumps(messages))
    document = examine(path).report
    assert (document.status, document.reason) == (Status.UNREADABLE, "mixed-formats")
    assert "anthropic (first: message 1), openai-chat (first: message 2)" in document.problem
    assert examine(path, named="anthropic").report.status is Status.FINDINGS


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("claude-code.valid.jsonl", "gemini"),
        ("codex.valid.jsonl", "claude-code"),
        ("anthropic.valid.json", "bedrock"),
        ("pydantic-ai.valid.json", "tunacode"),
        ("message-lines.valid.jsonl", "anthropic"),
        ("gemini.valid.json", "openai-responses"),
    ],
)
def test_a_wrong_format_is_refused_and_the_right_one_is_named(tmp_path: Path, name: str, named: str) -> None:
    document = examine(put(tmp_path, name), named=named).report
    assert (document.status, document.reason) == (Status.UNREADABLE, "wrong-format")
    assert f"not {named}" in document.problem


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("claude-code.valid.jsonl", "anthropic"),
        ("claude-code.valid.jsonl", "claude-code"),
        ("openai-chat.valid.json", "mistral"),
        ("tunacode.valid.json", "pydantic-ai"),
    ],
)
def test_the_right_format_name_changes_nothing(tmp_path: Path, name: str, named: str) -> None:
    assert examine(put(tmp_path, name), named=named).report.status is Status.CLEAN


def test_an_empty_list_is_a_finding(tmp_path: Path) -> None:
    path = tmp_path / "empty.json"
    path.write_text("[]")
    done = examine(path)
    assert ([found.code for found in done.report.findings], done.remedy) == (["empty-list"], None)


def test_invalid_entries_surrogates_and_line_breaks_in_ids_are_findings(tmp_path: Path) -> None:
    path = tmp_path / "odd.json"
    call = {"id": "a\nb", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    response = {"role": "assistant", "content": None, "tool_calls": [call]}
    path.write_text(json.dumps([{"role": "user", "content": "half \ud83d"}, 42, response]))
    done = examine(path)
    assert [(found.code, found.message) for found in done.report.findings] == [
        ("lone-surrogate", 0),
        ("not-a-message", 1),
        ("dangling-call", 2),
    ]
    assert done.remedy is not None
    assert examine(done.remedy.beside().path).report.status is Status.CLEAN


def test_a_lone_surrogate_outside_the_messages_stays_an_escape(tmp_path: Path) -> None:
    path = tmp_path / "odd.json"
    path.write_text(json.dumps({"title": "half \ud83d", "messages": [{"role": "user", "content": ""}, 42]}))
    remedy = examine(path).remedy
    assert remedy is not None
    assert json.loads(remedy.beside().path.read_text())["title"] == "half \ud83d"


def test_not_a_number_becomes_null_and_is_a_loss(tmp_path: Path) -> None:
    path = tmp_path / "request.json"
    path.write_text('{"temperature": NaN, "messages": [{"role": "user", "content": "hi"}]}')
    done = examine(path)
    assert (done.report.status, done.report.findings[0].lost) == (Status.LOSSY, "NaN")
    assert done.remedy is not None
    assert json.loads(done.remedy.beside().path.read_text())["temperature"] is None


def test_lines_that_are_not_json_are_omitted_from_the_copy_and_are_a_loss(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text(
        '{"role":"user","content":"hi"}\n{"role":"assis\n42\n{"role":"assistant","content":"yo"}\n'
    )
    done = examine(path)
    assert (done.report.status, [(found.code, found.line) for found in done.report.findings]) == (
        Status.LOSSY,
        [("broken-line", 2), ("not-a-message", 3)],
    )
    assert done.remedy is not None
    assert read_lines(done.remedy.beside().path)[0] == {"role": "user", "content": "hi"}


@pytest.mark.skipif(os.name == "nt", reason="needs POSIX files")
def test_broken_links_and_special_files_are_reported(tmp_path: Path) -> None:
    (tmp_path / "link.json").symlink_to("nowhere")
    os.mkfifo(tmp_path / "pipe.json")
    path = examine(tmp_path / "link.json").report
    assert (path.status, path.reason) == (Status.MISSING, "not-found")
    assert "'nowhere'" in path.problem
    assert examine(tmp_path / "pipe.json").report.reason == "not-a-file"
    assert examine(tmp_path / "none.json").report.status is Status.MISSING
    assert examine(tmp_path).report.status is Status.MISSING


def test_an_unreadable_file_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = put(tmp_path, "openai-chat.valid.json")

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)  # root may read everything
    assert examine(path).report.reason == "no-permission"


def test_a_read_error_of_the_disk_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = put(tmp_path, "claude-code.valid.jsonl")

    def fail(*_: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("midstream.doctor.examination.lines_of", fail)
    document = examine(path).report
    assert (document.reason, document.problem) == ("not-a-file", "it cannot be read: Input/output error")


def test_insufficient_memory_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr("midstream.doctor.examination.document_in", fail)
    assert examine(put(tmp_path, "gemini.valid.json")).report.reason == "too-large"


def test_trailing_zeros_of_a_power_cut_are_a_cut_line(tmp_path: Path) -> None:
    path = put(tmp_path, "codex.valid.jsonl")
    path.write_bytes(path.read_bytes() + bytes(500))
    document = examine(path).report
    assert (document.status, len(document.notes)) == (Status.CLEAN, 1)
    assert "was cut off while it was written" in document.notes[0]


def test_a_cut_last_request_is_not_a_defect(tmp_path: Path) -> None:
    path = put(tmp_path, "request-lines.broken.jsonl")
    path.write_text(path.read_text() + '{"messages": [{"ro')
    done = examine(path)
    assert [found.code for found in done.report.findings] == ["dangling-call"]
    assert done.report.notes == ("line 3 was cut off while it was written; a repaired copy leaves it out",)
    assert done.remedy is not None
    assert len(read_lines(done.remedy.beside().path)) == 2


def test_a_document_too_large_for_memory_is_refused_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("midstream.doctor.file_reading.DOCUMENT_BYTES_MAX", 10)
    document = examine(put(tmp_path, "openai-chat.valid.json")).report
    assert document.reason == "too-large"


def test_a_single_whole_session_line_needs_no_suffix(tmp_path: Path) -> None:
    first = read_lines(HISTORIES / "codex.valid.jsonl")[:1]
    assert examine(write_lines(tmp_path / "rollout.json", first)).report.format == "codex"


def _contents(path: Path) -> dict[str, bytes]:
    files = path.rglob("*") if path.is_dir() else [path]
    return {str(file): file.read_bytes() for file in files if file.is_file()}
