"""The options file of `midstream gateway`: flags take precedence over it, and errors name their place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from midstream.cli.gateway import gateway
from midstream.cli.gateway_file import file_option, models_of
from midstream.store.key_location import KeyEndpoint
from tests.cli.conftest import Run


def parse(*arguments: str) -> dict[str, Any]:
    """Return the options of `midstream gateway` with these arguments."""
    context = gateway.make_context("gateway", [*arguments], auto_envvar_prefix="MIDSTREAM_GATEWAY")
    return context.params


def write_file(folder: Path, text: str) -> str:
    folder.mkdir(exist_ok=True)
    path = folder / "gateway.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


EVERY_KIND = """
upstream = "claude"
permission-mode = "acceptEdits"
agent-env = ["GEMINI_API_KEY", "HOME=/srv/agent"]
allow-kind = ["edit", "fetch"]
hide-tools = true
port = 9000
grace = 2
silence = 2.5
log-level = "info"
"""


def test_every_kind_of_value_is_read(tmp_path: Path) -> None:
    found = parse("--config", write_file(tmp_path, EVERY_KIND))
    expected = {
        "upstream": "claude",
        "permission_mode": "acceptEdits",
        "agent_env": ("GEMINI_API_KEY", "HOME=/srv/agent"),
        "allow_kind": ("edit", "fetch"),
        "hides_tools": True,
        "port": 9000,
        "grace_s": 2.0,
        "silence_s": 2.5,
        "log_level": "info",
    }
    assert {name: found[name] for name in expected} == expected
    assert found == {**parse("--upstream", "claude"), **expected}


def test_a_flag_takes_precedence_over_the_environment_and_that_over_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_file(tmp_path, EVERY_KIND)
    monkeypatch.setenv("MIDSTREAM_GATEWAY_PORT", "9001")
    assert parse("--config", file)["port"] == 9001
    found = parse("--port", "9002", "--allow-kind", "move", "--config", file, "--upstream", "scripted")
    assert (found["port"], found["allow_kind"], found["upstream"]) == (9002, ("move",), "scripted")


def test_a_variable_can_give_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MIDSTREAM_GATEWAY_CONFIG", write_file(tmp_path, EVERY_KIND))
    assert parse()["port"] == 9000


def test_a_relative_path_is_relative_to_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "etc"
    names = 'token-file = "key"\nmcp-servers = "mcp.json"\ncwd = "project"\nkey-file = "/keys"\n'
    file = write_file(folder, 'upstream = "scripted"\nstore = "gateway.db"\n' + names)
    (folder / "project").mkdir()
    for name in ("key", "mcp.json"):
        (folder / name).touch()
    monkeypatch.chdir(tmp_path)
    for path in (file, "etc/gateway.toml"):
        found = parse("--config", path)
        assert found["token_file"] == folder / "key"
        assert found["servers_path"] == folder / "mcp.json"
        assert found["cwd"] == folder / "project"
        assert found["store"] == str(folder / "gateway.db")
        assert found["key_file"] == Path("/keys")


@pytest.mark.parametrize(
    ("place", "expected"),
    [("keys", "{folder}/keys"), ("/etc/keys", "/etc/keys"), ("https://keys.example/a", "")],
)
def test_a_key_file_is_relative_to_the_file_and_a_key_endpoint_is_a_url(
    tmp_path: Path, place: str, expected: str
) -> None:
    file = write_file(tmp_path, f'upstream = "scripted"\nkey-file = "{place}"\n')
    found = parse("--config", file)["key_file"]
    assert found == (Path(expected.format(folder=tmp_path)) if expected else KeyEndpoint(place))


@pytest.mark.parametrize(
    ("store", "expected"),
    [
        ("sqlite:///a.db", "sqlite:///{folder}/a.db"),
        ("sqlite:////srv/a.db", "sqlite:////srv/a.db"),
        ("/srv/a.db", "/srv/a.db"),
        ("memory:", "memory:"),
    ],
)
def test_a_store_by_url_is_relative_to_the_file_too(tmp_path: Path, store: str, expected: str) -> None:
    file = write_file(tmp_path, f'upstream = "scripted"\nstore = "{store}"\n')
    assert parse("--config", file)["store"] == expected.format(folder=tmp_path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("= 1", "gateway.toml' is not valid TOML"),
        ("nope = 1", "'nope': unknown option; known: agent-env, agent-memory"),
        ('servers_path = "a"', "'servers_path': unknown option"),
        ('config = "other.toml"', "'config': unknown option"),
        ("[gateway]\nport = 1", "'gateway': unknown option"),
        ('token = "s3cr3t"', "'token': this file must not contain secrets; give a file with `token-file`"),
        ('agent-env = ["MY_API_KEY=s3cr3t"]', "write 'MY_API_KEY' without a value"),
        ('agent-env = ["token=s3cr3t"]', "write 'token' without a value"),
        ('agent-env = ["PGPASSWORD=s3cr3t"]', "write 'PGPASSWORD' without a value"),
        ('agent-env = "MY_API_KEY=s3cr3t"', "'agent-env': the value has a wrong type; expected a list"),
        ("serve-as = [1]", "'serve-as': the value has a wrong type; expected a list of strings"),
        ('port = "8100"', "'port': the value has a wrong type; expected a whole number"),
        ("port = true", "'port': the value has a wrong type; expected a whole number"),
        ("port = 99999", "'port': 99999 is not in the range"),
        ('grace = "5"', "'grace': the value has a wrong type; expected a number"),
        ("grace = true", "'grace': the value has a wrong type; expected a number"),
        ("hide-tools = 1", "'hide-tools': the value has a wrong type; expected true or false"),
        ("upstream = 1", "'upstream': the value has a wrong type; expected a string"),
        ('allow-kind = ["nope"]', "'allow-kind': 'nope' is not one of"),
        ('cwd = "nope"', "nope' does not exist"),
        ('store = "ftp://x"', "'store': store 'ftp://x' has an unknown scheme"),
    ],
)
def test_an_error_has_the_file_and_the_key(run: Run, tmp_path: Path, text: str, words: str) -> None:
    done = run("gateway", "--upstream", "scripted", "--config", write_file(tmp_path, text))
    assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert words in done.stderr
    assert "gateway.toml" in done.stderr
    assert "s3cr3t" not in done.stderr


MODELS = """
port = 9000
pool-records = 500

[models.fast]
upstream = "openai-compatible:http://127.0.0.1:1/v1"
model = "m"
key-from = "FAST_KEY"
silence = 2

[models."vendor/deep"]
upstream = "claude:opus"
cwd = "project"
allow-kind = ["edit"]
live-agents = 2
"""


def models_in(*arguments: str) -> dict[str, dict[str, Any]]:
    context = gateway.make_context("gateway", [*arguments], auto_envvar_prefix="MIDSTREAM_GATEWAY")
    return {name: dict(options) for name, options in models_of(context).items()}


def test_each_table_has_the_options_of_one_upstream(tmp_path: Path) -> None:
    (tmp_path / "project").mkdir()
    found = models_in("--config", write_file(tmp_path, MODELS), "--port", "9001")
    assert [*found] == ["fast", "vendor/deep"]
    fast, deep = found.values()
    assert (fast["upstream"], fast["model"], fast["key_variable"], fast["silence_s"]) == (
        "openai-compatible:http://127.0.0.1:1/v1",
        "m",
        "FAST_KEY",
        2.0,
    )
    assert (deep["cwd"], deep["allow_kind"], deep["live_agents"]) == (tmp_path / "project", ("edit",), 2)
    assert (fast["allow_kind"], fast["live_agents"], deep["silence_s"]) == ((), 8, 1800.0)
    assert "pool_records" not in fast
    assert models_in("--upstream", "scripted") == {}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("models = 1", "'models': expected tables, such as [models.fast]"),
        ("[models]", "'models': expected tables"),
        ('[models]\nfast = "scripted"', "'models': expected tables"),
        ('[models.fast]\nmodel = "m"', "'models.fast': `upstream` is missing"),
        (
            '[models.fast]\nupstream = "scripted"\nport = 1',
            "'models.fast.port': unknown option; known: agent",
        ),
        ('[models.fast]\nupstream = "scripted"\npool-days = 1', "'models.fast.pool-days': unknown option"),
        ("[models.fast]\nupstream = 1", "'models.fast.upstream': the value has a wrong type"),
        ('[models.fast]\nupstream = "claude"\nagent-env = ["A_KEY=s3cr3t"]', "write 'A_KEY' without a value"),
        ('[models.fast]\nupstream = "nobody"', "model 'fast': unknown upstream 'nobody'"),
        (
            '[models.fast]\nupstream = "scripted"\nmodel = "m"',
            "model 'fast': the upstream 'scripted' does not support",
        ),
        (
            'upstream = "scripted"\n[models.fast]\nupstream = "scripted"',
            "--upstream is an option of one upstream",
        ),
        ('silence = 9\n[models.fast]\nupstream = "scripted"', "--silence is an option of one upstream"),
        ('serve-as = ["no"]\n[models.fast]\nupstream = "scripted"', "none of the models has the name no"),
        ('[models.""]\nupstream = "scripted"', "several models need a name each"),
        ("port = 1", "Missing option '--upstream'"),
    ],
)
def test_an_error_in_a_table_has_its_name(run: Run, tmp_path: Path, text: str, words: str) -> None:
    done = run("gateway", "--config", write_file(tmp_path, text))
    assert (done.exit_code, done.stdout) == (2, "")
    assert words in done.stderr
    assert "s3cr3t" not in done.stderr


def test_a_missing_file_is_reported(run: Run) -> None:
    done = run("gateway", "--upstream", "scripted", "--config", "/nope.toml")
    assert (done.exit_code, "'/nope.toml' does not exist" in done.stderr) == (2, True)


def test_without_a_file_none_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_file(tmp_path, "nope = 1")
    monkeypatch.chdir(tmp_path)
    assert parse("--upstream", "scripted")["port"] == 8100


def test_shell_completion_reads_no_file(tmp_path: Path) -> None:
    @file_option
    @click.command
    def command() -> None: ...

    file = write_file(tmp_path, "nope = 1")
    context = command.make_context("command", ["--config", file], resilient_parsing=True)
    assert context.default_map is None
    assert CliRunner().invoke(command, ["--config", file]).exit_code == 1
