"""An agent for `midstream serve`: the upstream of `ASKING_UPSTREAM`, whose permission requests go to people."""

from __future__ import annotations

import os
from pathlib import Path

from midstream import Agent
from midstream.agents.permission_rules import ASK_FIRST
from midstream.cli.upstream_options import UpstreamOptions, find_upstream
from midstream.store.memory import MemoryKeyValue

agent = Agent(
    find_upstream(
        os.environ["ASKING_UPSTREAM"],
        MemoryKeyValue(),
        cwd=Path.cwd(),
        options=UpstreamOptions(rules=ASK_FIRST, sandbox=os.environ.get("ASKING_SANDBOX", "")),
    )
)
