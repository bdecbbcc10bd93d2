"""The files of `deploy/`: parsed, and compared with the command line. `tests/scale` runs the same processes."""

from __future__ import annotations

import configparser
import re
import shlex
from pathlib import Path
from typing import Any

import httpx2
import pytest
import yaml  # type: ignore[import-untyped]
from click import Command, Context, Group

from midstream.cli import Invocation, midstream_command
from midstream.local_keys import headers_for
from midstream.paths import Paths
from midstream.store.postgres.postgres_address import PostgresAddress
from tests.cli.processes import Serving

DEPLOY = Path(__file__).parents[1] / "deploy"
SERVERS = ("server-1", "server-2", "server-3")


def _compose() -> dict[str, Any]:
    read: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    return read


def _parse(words: list[str], folder: Path) -> dict[str, Any]:
    """Parse a command line of midstream as the program does, with its secrets in a folder, and run nothing."""
    (folder / "tokens").touch()
    words = [re.sub(r"/run/secrets|/etc/midstream", str(folder), word) for word in words]
    command: Command = midstream_command
    context = Context(command, obj=Invocation(Paths(folder, folder), "never"))
    while isinstance(command, Group):
        name, *words = words
        found = command.get_command(context, name)
        assert found is not None, name
        command = found
        context = Context(command, parent=context, info_name=name)
    command.parse_args(context, words)
    return context.params


@pytest.mark.parametrize("service", [*SERVERS, "prepare"])
def test_the_command_line_of_each_service_is_accepted(service: str, tmp_path: Path) -> None:
    parameters = _parse([str(word) for word in _compose()["services"][service]["command"]], tmp_path)
    url = parameters.get("store") or parameters["url"]
    address = PostgresAddress.parse(url.partition(":")[2])
    assert (address.schema, address.dsn) == ("midstream", "postgresql://midstream@db/midstream")
    if service in SERVERS:
        assert parameters["host"] == "0.0.0.0"
        assert parameters["token_file"] == tmp_path / "tokens"


def test_the_dependencies_of_each_service_exist() -> None:
    compose = _compose()
    for name, service in compose["services"].items():
        assert {*service.get("secrets", ())} <= {*compose["secrets"]}, name
        assert {*service.get("depends_on", ())} <= {*compose["services"]}, name
        for volume in service.get("volumes", ()):
            source = volume.partition(":")[0]
            assert source in compose["volumes"] or (DEPLOY / source).exists(), volume
    assert compose["services"]["db"]["environment"]["POSTGRES_DB"] == "midstream"
    assert (DEPLOY / "Dockerfile").read_text().rstrip().endswith('ENTRYPOINT ["midstream"]')
    variables: dict[str, Any] = {}
    exec((DEPLOY / "app.py").read_text(), variables)  # The file that the image has.
    assert variables["agent"].name == "example"


@pytest.mark.parametrize("file", ["Caddyfile", "nginx.conf"])
def test_a_balancer_names_all_servers(file: str) -> None:
    text = (DEPLOY / file).read_text()
    port = next(word for word in _compose()["services"]["server-1"]["command"] if "--port=" in word)
    number = port.partition("=")[2]
    assert set(re.findall(r"(server-\d):(\d+)", text)) == {(name, number) for name in SERVERS}
    assert text.count("{") == text.count("}")
    assert "8080" in text


def test_the_systemd_unit_has_valid_commands(tmp_path: Path) -> None:
    unit = configparser.RawConfigParser(strict=True)
    unit.optionxform = str  # type: ignore[assignment,method-assign]  # as systemd has them
    unit.read_string((DEPLOY / "midstream@.service").read_text())
    program, *words = shlex.split(unit["Service"]["ExecStart"].replace("%i", "8001"))
    assert program.endswith("/bin/midstream")
    assert _parse(words, tmp_path)["port"] == 8001
    assert unit["Service"]["KillSignal"] == "SIGTERM"


def test_the_systemd_unit_with_workers_has_valid_start_and_reload_commands(tmp_path: Path) -> None:
    unit = configparser.RawConfigParser(strict=True)
    unit.optionxform = str  # type: ignore[assignment,method-assign]  # as systemd has them
    unit.read_string((DEPLOY / "midstream-workers.service").read_text())
    program, *words = shlex.split(unit["Service"]["ExecStart"])
    assert program.endswith("/bin/midstream")
    assert _parse(words, tmp_path)["workers"] == 4
    assert unit["Service"]["ExecReload"] == "/bin/kill -HUP $MAINPID"
    assert unit["Service"]["KillMode"] == "mixed"


@pytest.mark.slow
def test_each_metric_of_an_alert_is_served(tmp_path: Path) -> None:
    with Serving(tmp_path, options=["--metrics"]) as server:
        page = httpx2.get(f"{server.url}/metrics", headers=headers_for(server.url)).text
    served = {line.split()[2] for line in page.splitlines() if line.startswith("# TYPE ")}
    served |= {f"{name}_bucket" for name in served}
    (group,) = yaml.safe_load((DEPLOY / "alerts.yaml").read_text())["groups"]
    names: set[str] = set()
    for rule in group["rules"]:
        found = set(re.findall(r"midstream_[a-z_]+", rule["expr"]))
        assert found or rule["expr"].startswith("up{"), rule["alert"]
        assert found <= served, rule["alert"]
        assert rule["expr"].count("(") == rule["expr"].count(")")
        assert rule["annotations"]["summary"]
        assert rule["labels"]["severity"] in {"warning", "critical"}
        names.add(rule["alert"])
    assert len(names) == len(group["rules"])
