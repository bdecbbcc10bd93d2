"""An agent in your own program, such as a web endpoint. It needs no server, and its sessions survive a kill."""

from examples.hello import agent
from midstream import Host


async def main(text: str) -> str:
    """Send a message to a session of this process and return the whole answer."""
    async with Host(agent, "sessions.db") as host:
        return await host.ask("my-session", text)
