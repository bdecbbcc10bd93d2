"""`midstream gateway keys`: keys of users, printed once, listed and revoked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from midstream.server.auth.token_file import TokenUse, digest_of_token, read_token_file
from tests.cli.conftest import Run


def test_a_key_is_printed_once_and_its_digest_and_limits_are_stored(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "users"
    of_file = ("gateway", "--users-file", file, "keys")
    limits = ("--requests-per-minute", 60, "--concurrent-requests", 4, "--tokens-per-day", 1000)
    more = ("--tokens-per-month", 20000, "--budget-per-month", 2.5, "--model", "a", "--model", "b/c")
    done = run(*of_file, "add", "ada", *limits, *more, "--days", 3, "--comment", "a laptop")
    report = json.loads(run(*of_file, "add", "eve", "--json").stdout)
    key, [ada, eve] = done.stdout.strip(), read_token_file(file, TokenUse.GATEWAY)
    assert (digest_of_token(key), digest_of_token(report["key"])) == (ada.digest, eve.digest)
    assert (key in file.read_text(), file.stat().st_mode & 0o777) == (False, 0o600)
    assert "is not stored" in done.stderr
    shown = [json.loads(line) for line in run(*of_file, "list", "--json").stdout.splitlines()]
    assert [(each["user"], each["id"]) for each in shown] == [
        ("ada", ada.digest[:12]),
        ("eve", eve.digest[:12]),
    ]
    assert shown[0]["allowance"] == {
        "requests_per_minute": 60,
        "concurrent_requests": 4,
        "tokens_per_day": 1000,
        "tokens_per_month": 20000,
        "budget_per_month": 2.5,
        "models": ["a", "b/c"],
    }
    first, second = run(*of_file, "list").stdout.splitlines()
    assert "requests-per-minute=60" in first
    assert "models=a,b/c" in first
    assert second.split("\t")[1:] == ["eve", "never ends", "no limits"]


def test_keys_are_revoked_by_user_and_by_id_and_stored_in_the_data_folder(run: Run) -> None:
    for _ in range(2):
        run("gateway", "keys", "add", "ada")
    run("gateway", "keys", "add", "eve")
    lines = run("gateway", "keys", "list").stdout.splitlines()
    assert [line.split("\t")[1] for line in lines] == ["ada", "ada", "eve"]
    assert "1 key revoked" in run("gateway", "keys", "revoke", lines[0].split("\t")[0]).stdout
    assert json.loads(run("gateway", "keys", "revoke", "ada", "--json").stdout) == {"revoked": 1}
    assert run("gateway", "keys", "list").stdout == lines[2] + "\n"
    refused = run("gateway", "keys", "revoke", "ada")
    assert refused.exit_code != 0
    assert "no key of 'ada'" in refused.stderr


def test_a_limit_is_listed_with_all_its_digits(run: Run) -> None:
    limits = (
        "--tokens-per-month",
        "12345678",
        "--budget-per-month",
        "1234567.5",
        "--tokens-per-day",
        "2000000",
    )
    run("gateway", "keys", "add", "ada", *limits)
    listed = run("gateway", "keys", "list").stdout.rstrip().split("\t")[-1]
    assert listed == "tokens-per-day=2000000 tokens-per-month=12345678 budget-per-month=1234567.5"


def test_keys_of_a_user_in_a_tenant_are_revoked_by_the_listed_name(run: Run) -> None:
    for tenant in ("acme", "corp"):
        run("gateway", "keys", "add", "ada", "--tenant", tenant)
    assert "1 key revoked" in run("gateway", "keys", "revoke", "acme:ada").stdout
    assert [line.split("\t")[1] for line in run("gateway", "keys", "list").stdout.splitlines()] == [
        "corp:ada"
    ]


@pytest.mark.parametrize(
    "words",
    [
        ("two words",),
        ("ada", "--tokens-per-day", "0"),
        ("ada", "--model", "a b"),
        ("ada", "--days", "nan"),
        ("ada", "--days", "1e9"),
    ],
)
def test_an_invalid_line_is_refused_and_nothing_is_written(
    run: Run, tmp_path: Path, words: tuple[str, ...]
) -> None:
    file = tmp_path / "users"
    done = run("gateway", "--users-file", file, "keys", "add", *words)
    assert (done.exit_code, done.stdout, file.exists()) == (2, "", False)


def test_the_options_file_can_give_the_file_of_users(run: Run, tmp_path: Path) -> None:
    config = tmp_path / "gateway.toml"
    config.write_text('upstream = "scripted"\nusers-file = "people"\n')
    run("gateway", "--config", config, "keys", "add", "ada")
    assert (tmp_path / "people").exists()


def test_users_and_no_key_exclude_each_other(run: Run, tmp_path: Path) -> None:
    done = run("gateway", "--upstream", "scripted", "--no-token", "--users-file", tmp_path / "users")
    assert (done.exit_code, "--no-token" in done.stderr) == (2, True)
