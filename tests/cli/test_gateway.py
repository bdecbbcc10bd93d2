"""`midstream gateway` as a process: it prints its address and key file, and errors in one line."""

from __future__ import annotations

import http.client
import json
import signal
import stat
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.agents.scripted_peer import Orders
from tests.cli.conftest import Run
from tests.forked import Forked

WAIT_S = 60.0


def start(home: Path, *options: str) -> tuple[Forked, dict[str, Any]]:
    """Start the gateway; return the process and its ready line."""
    return start_with(home, "--upstream", "scripted", *options)


def start_with(home: Path, *options: str) -> tuple[Forked, dict[str, Any]]:
    """Start the gateway with only these options."""
    arguments = ("midstream", "--home", home, "gateway", "--port", "0", "--json", *options)
    process = Forked(*arguments, stderr=2, text=True)
    assert process.stdout is not None
    return process, json.loads(process.stdout.readline())


def key_of(fields: dict[str, Any]) -> str:
    """Return the key from the file in a gateway's ready line."""
    return Path(fields["key_file"]).read_text().strip()


def stop(process: Forked) -> int:
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=WAIT_S)
    return process.wait()


def ask_chat_completions(url: str, token: str | None, words: str = "hi", system: str = "") -> tuple[int, str]:
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=WAIT_S)
    headers = {"content-type": "application/json", "authorization": f"Bearer {token}"}
    messages = [{"role": "system", "content": system}] if system else []
    body = json.dumps({"model": "m", "messages": [*messages, {"role": "user", "content": words}]})
    connection.request("POST", "/v1/chat/completions", body, headers)
    answer = connection.getresponse()
    whole = answer.read().decode()
    connection.close()
    return answer.status, whole


def ask_responses(url: str, token: str, words: str) -> int:
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=WAIT_S)
    headers = {"content-type": "application/json", "authorization": f"Bearer {token}"}
    connection.request("POST", "/v1/responses", json.dumps({"model": "m", "input": words}), headers)
    answer = connection.getresponse()
    answer.read()
    connection.close()
    return answer.status


def test_its_key_is_created_once_and_only_for_this_user(tmp_path: Path) -> None:
    tokens = []
    for _ in range(2):
        process, ready = start(tmp_path)
        tokens.append(key_of(ready))
        status, body = ask_chat_completions(ready["url"], key_of(ready))
        assert (status, "You said: hi" in body) == (200, True)
        assert ask_chat_completions(ready["url"], "another")[0] == 401
        assert stop(process) == 0
    assert tokens[0] == tokens[1]
    assert stat.S_IMODE((tmp_path / "gateway-token").stat().st_mode) == 0o600


def test_without_a_key_every_user_of_this_machine_gets_answers(tmp_path: Path) -> None:
    process, ready = start(tmp_path, "--no-token")
    try:
        assert (ready["requires_key"], ready["key_file"]) == (False, None)
        assert ask_chat_completions(ready["url"], None)[0] == 200
    finally:
        assert stop(process) == 0
    assert not (tmp_path / "gateway-token").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--upstream", "nobody"), "unknown upstream 'nobody'"),
        (("--upstream", "scripted", "--no-token", "--token", "x" * 16), "--no-token"),
        (("--upstream", "scripted", "--no-token", "--host", "0.0.0.0"), "--no-token"),
        (("--upstream", "scripted", "--host", "0.0.0.0"), "with --allow-host"),
        (("--upstream", "scripted", "--key-from", "NOPE"), "does not support --key-from"),
        (("--upstream", "scripted", "--token-file", "/nope"), "'/nope' does not exist"),
        (("--upstream", "scripted", "--token", "short"), "the key (the value of --token) has fewer than 16"),
        (("--upstream", "scripted", "--input-price", "nan", "--output-price", "1"), "not a finite number"),
        (("--upstream", "scripted", "--input-price", "1", "--output-price", "inf"), "not a finite number"),
    ],
)
def test_errors_are_one_line(run: Run, options: tuple[str, ...], words: str) -> None:
    done = run("gateway", *options)
    assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert words in done.stderr


def test_an_invalid_key_is_not_shown(run: Run, tmp_path: Path) -> None:
    (tmp_path / "gateway-token").write_bytes(b"\xff\xfe")
    (tmp_path / "gateway-token").chmod(0o600)
    done = run("gateway", "--upstream", "scripted", "--port", "0")
    assert (done.exit_code, done.stdout, "is not text; name the right file" in done.stderr) == (
        2,
        "",
        True,
    )


def token_file(folder: Path, content: str = "the-key-of-a-file\n", mode: int = 0o600) -> Path:
    path = folder / "key"
    path.write_text(content)
    path.chmod(mode)
    return path


def test_its_key_is_read_from_a_file(tmp_path: Path) -> None:
    process, ready = start(tmp_path, "--token-file", str(token_file(tmp_path)))
    try:
        assert ready["key_file"] == str(tmp_path / "key")
        assert ask_chat_completions(ready["url"], "the-key-of-a-file")[0] == 200
    finally:
        assert stop(process) == 0
    assert not (tmp_path / "gateway-token").exists()


@pytest.mark.parametrize(
    ("content", "mode", "words"),
    [
        ("key", 0o644, "readable by other users; restrict it with chmod 600"),
        ("\n", 0o600, "is empty; write the key into it"),
        ("key another", 0o600, "contains more than a key"),
        ("k\u00e9", 0o600, "does not contain a key; write the key into it"),
        ("fifteen-letters", 0o600, "fewer than 16 characters"),
    ],
)
def test_a_file_without_a_key_is_refused(
    run: Run, tmp_path: Path, content: str, mode: int, words: str
) -> None:
    done = run("gateway", "--upstream", "scripted", "--token-file", token_file(tmp_path, content, mode))
    assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert words in done.stderr


@pytest.mark.parametrize(
    ("others", "words"),
    [
        (("--token", "x" * 16), "--token and --token-file exclude each other"),
        (("--no-token",), "--token-file and --no-token exclude each other"),
    ],
)
def test_exactly_one_kind_of_authentication_is_accepted(
    run: Run, tmp_path: Path, others: tuple[str, ...], words: str
) -> None:
    done = run("gateway", "--upstream", "scripted", "--token-file", token_file(tmp_path), *others)
    assert (done.exit_code, done.stderr.count("\n"), words in done.stderr) == (2, 1, True)


@pytest.mark.parametrize(
    ("variable", "flags", "token"),
    [
        ("", (), "the-key-of-a-file"),
        ("the-key-of-a-variable", (), "the-key-of-a-variable"),
        ("", ("--token", "the-key-of-a-flag"), "the-key-of-a-flag"),
        ("the-key-of-a-variable", ("--no-token",), None),
    ],
)
def test_the_key_of_a_flag_takes_precedence_over_a_variable_and_that_over_the_options_file(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
    flags: tuple[str, ...],
    token: str | None,
) -> None:
    monkeypatch.setenv("MIDSTREAM_GATEWAY_TOKEN", variable)
    config = tmp_path / "gateway.toml"
    config.write_text(f'token-file = "{token_file(tmp_path).name}"')
    process, ready = start(tmp_path, "--config", str(config), *flags)
    try:
        assert ask_chat_completions(ready["url"], token)[0] == 200
        assert ready["requires_key"] is (token is not None)
        assert token is None or ask_chat_completions(ready["url"], "the-key-of-another")[0] == 401
    finally:
        assert stop(process) == 0


def test_the_ready_message_for_people_shows_how_to_connect(tmp_path: Path) -> None:
    arguments = ("midstream", "--home", tmp_path, "gateway", "--upstream", "scripted", "--port", "0")
    process = Forked(*arguments, stdout=1, text=True)
    assert process.stderr is not None
    lines = [process.stderr.readline() for _ in range(4)]
    assert lines[0].startswith("scripted on http://127.0.0.1:")
    assert lines[1].strip().startswith("OPENAI_BASE_URL=http://127.0.0.1:")
    assert lines[2].strip().startswith("ANTHROPIC_BASE_URL=http://127.0.0.1:")
    assert lines[3].strip() == f"API key: in {tmp_path / 'gateway-token'}"
    assert stop(process) == 0


ROOT = Path(__file__).parents[2]


def test_an_agent_receives_the_given_servers_mode_and_limits(tmp_path: Path) -> None:
    pytest.importorskip("acp")
    folder, key_file, store = tmp_path / "agent", tmp_path / "keys", tmp_path / "gateway.db"
    servers = {
        "files": {"command": "npx", "args": ["files"]},
        "shop": {"url": "https://b.example", "oauth": {"clientId": "id"}},
    }
    (tmp_path / "mcp.json").write_text(json.dumps({"mcpServers": servers}))
    agent = f"cd {ROOT} && exec {sys.executable} -m tests.agents.acp_agent {folder} load"
    options = ["--upstream", f"acp:sh -c '{agent}'", "--mcp-servers", str(tmp_path / "mcp.json")]
    options += ["--pool-records", "1", "--key-file", str(key_file), "--store", str(store)]
    command = ("midstream", "--home", tmp_path, "gateway", "--port", "0", "--json")
    with (tmp_path / "log").open("w") as log:
        process = Forked(*command, *options, stderr=log, text=True)
        assert process.stdout is not None
        report = json.loads(process.stdout.readline())
        try:
            assert ask_chat_completions(report["url"], key_of(report), "one")[0] == 200
            # The store contains the text of a response.
            assert ask_responses(report["url"], key_of(report), "quetzal") == 200
        finally:
            assert stop(process) == 0
    opened = Orders(folder).recorded("opened")
    assert [[server["name"] for server in each["servers"]] for each in opened] == [["files"]] * 2
    lines = (tmp_path / "log").read_text().splitlines()
    assert len([line for line in lines if "'shop' is left out" in line]) == 1  # the notice, once
    assert len([line for line in lines if "the limit is 1 records" in line]) == 1
    assert key_file.exists()
    files = [path for path in store.parent.rglob(f"{store.name}*") if path.is_file()]
    assert not any(b"quetzal" in path.read_bytes() for path in files)


def test_an_options_file_sets_an_agents_variables_mode_sign_in_rules_and_instructions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("acp")
    folder, config = tmp_path / "agent", tmp_path / "gateway.toml"
    command = f"{sys.executable} -m tests.agents.acp_agent {folder} load"
    config.write_text(
        f"""
upstream = "acp:env SOME=thing {command}"
agent-env = ["ITS_KEY", "PYTHONPATH={ROOT}"]
permission-mode = "careful"
sign-in = "oauth"
instructions = "message"
allow-kind = ["edit"]
"""
    )
    monkeypatch.setenv("ITS_KEY", "s3cr3t")
    monkeypatch.setenv("OTHER_KEY", "hidden")
    arguments = ("midstream", "--home", tmp_path, "gateway", "--port", "0", "--json", "--config", config)
    process = Forked(*arguments, stderr=2, text=True)
    assert process.stdout is not None
    report = json.loads(process.stdout.readline())
    orders = Orders(folder)
    orders.order("tool", {"name": "edit", "arguments": "{}", "content": "done", "is_asked": True})
    try:
        assert ask_chat_completions(report["url"], key_of(report), "one", system="be brief")[0] == 200
    finally:
        assert stop(process) == 0
    assert report["upstream"] == f"acp:{Path(sys.executable).name}"
    (initialized,) = orders.recorded("initialized")
    assert (initialized["env"]["ITS_KEY"], initialized["env"]["SOME"]) == ("s3cr3t", "thing")
    assert "OTHER_KEY" not in initialized["env"]
    assert [each["method"] for each in orders.recorded("signed in")] == ["oauth"]
    assert [each["mode"] for each in orders.recorded("mode")] == ["careful"]
    (message,) = orders.recorded("told")
    assert "be brief" in message["text"]
    assert len(orders.recorded("ran")) == 1


@pytest.mark.parametrize(
    ("option", "words"),
    [
        (("--permission-mode", "plan"), "does not support --permission-mode"),
        (("--sandbox", "read-only"), "does not support --sandbox"),
        (("--rules-file",), "does not support --rules-file"),
        (("--allow-kind", "edit"), "does not support --allow-kind, --allow-tool or --refuse-tool"),
        (("--allow-tool", "Bash"), "does not support --allow-kind, --allow-tool or --refuse-tool"),
        (("--refuse-tool", "Bash"), "does not support --allow-kind, --allow-tool or --refuse-tool"),
        (("--agent-env", "A=b"), "does not support --agent-env"),
        (("--agent-path", __file__), "does not support --agent-path"),
        (("--agent-sessions", "cli"), "does not support --agent-sessions"),
        (("--sign-in", "oauth"), "does not support --sign-in"),
        (("--instructions", "meta"), "does not support --instructions"),
        (("--pool-records", "5"), "has no pool"),
        (("--agent-rest", "5"), "has no pool"),
    ],
)
def test_an_option_that_an_upstream_does_not_support_is_refused(
    run: Run, option: tuple[str, ...], words: str
) -> None:
    done = run("gateway", "--upstream", "scripted", *option)
    assert (done.exit_code, done.stderr.count("\n"), words in done.stderr) == (2, 1, True)
