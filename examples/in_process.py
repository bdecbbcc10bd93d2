"""An agent in your own program, such as a web endpoint: no server, and sessions that survive its death all the same."""

from examples.hello import agent
from midstream import Host


async def main(words: str) -> str:
    """Ask the agent in a session of this process and return the whole answer."""
    async with Host(agent, "sessions.db") as host:
        return await host.ask("my-session", words)
