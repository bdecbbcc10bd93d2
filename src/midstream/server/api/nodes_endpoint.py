"""`/v1/nodes`: the servers that share the store."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct
from starlette.requests import Request

from midstream.server.auth.caller import require_operator
from midstream.server.node_reporting import NodeReports
from midstream.store.node_reports import NodeLine


class NodeList(Struct, frozen=True):
    """All servers of a store, oldest first."""

    nodes: Sequence[NodeLine]


class NodesEndpoint:
    """Endpoint of the list of servers."""

    def __init__(self, reports: NodeReports) -> None:
        self._reports = reports

    async def nodes(self, request: Request) -> NodeList:
        """List the servers that share the store, with their sessions and leases; for the operator only."""
        require_operator(request.scope, "the list of servers")
        return NodeList(await self._reports.lines())
