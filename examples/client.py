"""The client of the README."""

from collections.abc import Callable

from midstream import connect


async def ask(url: str, text: str) -> str:
    """Send a message to a session and return the whole answer, each word once."""
    async with connect(url, state="client.db") as client:
        return await client.ask("my-session", text)


async def stream(url: str, text: str, show: Callable[[str], None]) -> None:
    """Show the answer while it arrives. Each call of `show` gets the whole text so far."""
    async with connect(url, state="client.db") as client:
        async for event in client.send("my-session", text):
            show(event.transcript)
