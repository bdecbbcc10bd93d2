from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner, Result

from midstream.cli import midstream_command
from tests.core.repair.reported import reply, use, user

BROKEN = [user("q"), reply(use("a")), user("w")]


def run(*arguments: object) -> Result:
    runner = CliRunner()
    return runner.invoke(midstream_command, ["doctor", *map(str, arguments)], standalone_mode=True)


def saved(path: Path, messages: object) -> Path:
    path.write_text(json.dumps(messages), encoding="utf-8")
    return path


def test_a_good_file_is_fine(tmp_path: Path) -> None:
    done = run(saved(tmp_path / "h.json", [user("q")]))
    assert (done.exit_code, done.output.strip()) == (
        0,
        f"{tmp_path}/h.json: fine (json, anthropic, 1 messages)",
    )


def test_a_broken_file_is_explained_and_left_alone(tmp_path: Path) -> None:
    path = saved(tmp_path / "h.json", BROKEN)
    done = run(path)
    assert done.exit_code == 6
    assert "message 1: dangling-call: added a result that says so" in done.output
    assert json.loads(path.read_text(encoding="utf-8")) == BROKEN
    assert [each.name for each in tmp_path.iterdir()] == ["h.json"]


def test_a_fixed_copy_stands_beside_and_is_fine(tmp_path: Path) -> None:
    done = run("--fix", saved(tmp_path / "h.json", BROKEN))
    assert done.exit_code == 6
    assert run(tmp_path / "h.repaired.json").exit_code == 0


def test_in_place_keeps_what_was_there(tmp_path: Path) -> None:
    path = saved(tmp_path / "h.json", BROKEN)
    run("--fix", "--in-place", path)
    assert run(path).exit_code == 0
    assert json.loads((tmp_path / "h.json.bak").read_text(encoding="utf-8")) == BROKEN


def test_json_has_every_finding(tmp_path: Path) -> None:
    done = run("--json", "--for", "bedrock-claude", saved(tmp_path / "h.json", BROKEN))
    answer = json.loads(done.output)
    assert [finding["code"] for finding in answer["findings"]] == ["dangling-call", "same-role-twice"]


def test_a_folder_is_searched_and_an_unreadable_file_does_not_stop_it(tmp_path: Path) -> None:
    saved(tmp_path / "a.json", [user("q")])
    (tmp_path / "b.json").write_text("not json", encoding="utf-8")
    done = run(tmp_path)
    assert done.exit_code == 7
    assert "a.json: fine" in done.output
    assert "b.json: unreadable" in done.output


def test_in_place_without_fix_is_wrong_use(tmp_path: Path) -> None:
    assert run("--in-place", saved(tmp_path / "h.json", BROKEN)).exit_code == 2
