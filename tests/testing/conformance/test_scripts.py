"""The scripts as data: cited clauses exist, and each clause that is observable at a server has a script."""

from __future__ import annotations

import re

from midstream.client.transport_selection import TransportKind
from midstream.testing.conformance.scripts import scripts
from tests.house.source import ROOT

CLAUSE = re.compile(r"^\*\*(STREAM-\d+)\*\*", re.MULTILINE)

NOT_SEEN_AT_A_SERVER = {
    "STREAM-9": "no server is degraded by wish; the client's scripts have it",
    "STREAM-10": "of clients",
    "STREAM-11": "of clients",
    "STREAM-18": "of clients that run tools",
    "STREAM-21": "of clients",
    "STREAM-22": "of clients",
    "STREAM-24": "of clients",
    "STREAM-27": "of transports whose body has an end: the tests of each transport have it",
    "STREAM-29": "of clients",
    "STREAM-30": "of clients",
    "STREAM-32": "of clients",
    **dict.fromkeys(
        (f"STREAM-{number}" for number in range(37, 46) if number != 39),
        "of requests below the frames: tests/client/test_http_transport.py, "
        "tests/server/transports/test_long_poll.py and test_probe.py",
    ),
    **dict.fromkeys((f"STREAM-{number}" for number in range(46, 49)), "of clients"),
    "STREAM-49": "of clients: tests/client/test_client.py runs over each transport",
    "STREAM-51": "of the requests below the frames: tests/server/transports/test_websocket_endpoint.py, "
    "tests/server/transports/test_stream_headers.py",
    "STREAM-53": "of clients: a server may acknowledge as it likes",
    "STREAM-55": "a server may take its time: tests/server/transports/test_disconnects.py",
    "STREAM-56": "of an operator",
    "STREAM-59": "of what is inside",
    **dict.fromkeys(
        (f"STREAM-{number}" for number in range(60, 69)),
        "of what an operator keeps, and for how long: tests/server/test_kept.py",
    ),
    **dict.fromkeys(
        (f"STREAM-{number}" for number in range(69, 76)),
        "of whom an operator lets in: tests/server/auth/test_access_rules.py",
    ),
    **dict.fromkeys((f"STREAM-{number}" for number in range(76, 80)), "of clients"),
    **dict.fromkeys(
        (f"STREAM-{number}" for number in range(80, 84)),
        "of clients in browsers: tests/server/test_page_transports.py, tests/server/test_page_lifecycle.py",
    ),
    **dict.fromkeys(
        (f"STREAM-{number}" for number in range(84, 96)),
        "of sessions that only their clients can open: tests/server/auth/test_session_unlocking.py",
    ),
    "STREAM-96": "of clients: tests/client/test_other_processes.py, tests/server/test_page_escrow.py",
    "STREAM-97": "of clients in browsers: tests/server/test_page_tabs.py",
    "STREAM-98": "of the requests below the frames: tests/server/transports/test_websocket_endpoint.py",
    "STREAM-99": "of what is inside: tests/store/test_tampering.py",
    "STREAM-100": "of clients",
    "STREAM-107": "of clients",
    "STREAM-108": "of clients",
    "STREAM-109": "of clients",
    "STREAM-106": "of whom an operator lets in: tests/server/auth/test_access_rules.py",
    "STREAM-110": "of the requests below the frames: tests/server/transports/test_stream_headers.py",
    "STREAM-111": "of the transports below the frames: tests/server/transports/test_websocket_endpoint.py",
    "STREAM-112": "of the transports below the frames: tests/server/api/test_http_endpoints.py",
    "STREAM-102": "of several servers: tests/server/transports/test_stream_fencing.py, tests/fault/test_fencing.py",
    "STREAM-103": "of the requests below the frames: tests/client/test_http_transport.py, tests/fault/test_fencing.py",
    "STREAM-105": "of clients",
    "STREAM-114": "of what a server holds: tests/server/transports/test_encoded_pages.py",
    "STREAM-115": "of what is inside, a full disk: tests/engine/test_outages.py",
}
"""Clause: the reason why no script can observe it from outside."""


def test_every_clause_that_a_server_can_be_seen_to_keep_has_a_script() -> None:
    clauses = set(CLAUSE.findall((ROOT / "docs/spec/stream.md").read_text(encoding="utf-8")))
    cited = {clause for script in scripts("server") for clause in script.clauses}
    assert sorted(clauses - cited - NOT_SEEN_AT_A_SERVER.keys()) == []
    assert sorted(cited & NOT_SEEN_AT_A_SERVER.keys()) == []


def test_every_cited_clause_exists() -> None:
    clauses = set(CLAUSE.findall((ROOT / "docs/spec/stream.md").read_text(encoding="utf-8")))
    cited = {clause for side in ("server", "client") for script in scripts(side) for clause in script.clauses}
    assert sorted((cited | NOT_SEEN_AT_A_SERVER.keys()) - clauses) == []


def test_each_transport_has_a_script_for_each_clause_that_it_can_show() -> None:
    cited = {
        transport: {
            clause for script in scripts("server") if script.fits(transport) for clause in script.clauses
        }
        for transport in TransportKind
    }
    # Needs frames after an error, or a connection that outlives the turn, or malformed frames.
    assert cited[TransportKind.WEBSOCKET] - cited[TransportKind.SSE] == {"STREAM-1", "STREAM-17"}
    assert cited[TransportKind.POLL] == cited[TransportKind.SSE]
    needs = {need for script in scripts("server") for need in script.needs}
    assert needs == {"websocket", "requests"}


def test_scripts_have_names_of_their_own() -> None:
    for side in ("server", "client"):
        names = [script.name for script in scripts(side)]
        assert len(names) == len(set(names)) > 30
