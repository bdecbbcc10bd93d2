"""`/v1/nodes`: access to the list of servers of a store."""

from __future__ import annotations

import time
from pathlib import Path

import httpx2
import pytest

from tests.cli.processes import Serving

pytestmark = pytest.mark.fault
ALICE, OPERATOR = "alice-token-of-43-characters", "operator-token-of-43-characters"


def test_only_the_operator_can_list_nodes(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text(f"{ALICE} alice\n{OPERATOR} operator role=operator\n")
    tokens.chmod(0o600)
    with Serving(tmp_path, options=["--token-file", str(tokens)]) as server:
        answers = [
            httpx2.get(f"{server.url}/v1/nodes", headers={"authorization": f"Bearer {token}"})
            for token in (ALICE, OPERATOR, "wrong" * 9)
        ]
        assert [each.status_code for each in answers] == [403, 200, 401]
        nodes = answers[1].json()["nodes"]
        until = time.monotonic() + 30
        while not nodes and time.monotonic() < until:  # The node has not written its first report yet.
            nodes = httpx2.get(
                f"{server.url}/v1/nodes", headers={"authorization": f"Bearer {OPERATOR}"}
            ).json()["nodes"]
        (node,) = nodes
        assert (node["pid"], node["state"]) == (server.listening["pid"], "serving")
