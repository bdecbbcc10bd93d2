"""What holds for every test."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

from tests.search import EXAMPLES, PROFILE

# No deadline: the machines are shared, and a slow example is no wrong one. A failure prints what repeats it.
settings.register_profile(
    "midstream", max_examples=EXAMPLES, deadline=None, print_blob=True, derandomize=True, database=None
)
settings.register_profile("search", max_examples=EXAMPLES, deadline=None, print_blob=True, derandomize=False)
settings.load_profile(PROFILE)

# Whole programs, real sockets and foreign judges: seconds a file. `make check` leaves them to `make test`.
END_TO_END = frozenset(
    {
        "cli/demo/test_story.py",
        "cli/test_answering.py",
        "cli/test_chat.py",
        "cli/test_resume.py",
        "cli/test_session_actions.py",
        "client/test_client.py",
        "doctor/test_hostile.py",
        "integrations/test_mcp.py",
        "integrations/test_openai_compatible.py",
        "integrations/test_pydantic_ai.py",
        "oracles/test_ai_sdk.py",
        "oracles/test_chat_templates.py",
        "oracles/test_judgement.py",
        "server/test_serve.py",
        "server/test_websocket.py",
    }
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark them slow."""
    here = Path(__file__).parent
    for item in items:
        if item.path.relative_to(here).as_posix() in END_TO_END:
            item.add_marker(pytest.mark.slow)
