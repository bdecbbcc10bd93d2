"""The client of the README."""

from collections.abc import Callable

from midstream import connect


async def ask(url: str, words: str) -> str:
    """Ask a session and return the whole answer, each word once."""
    async with connect(url, state="client.db") as client:
        return await client.ask("my-session", words)


async def stream(url: str, words: str, show: Callable[[str], None]) -> None:
    """Show the answer while it arrives: each call of `show` gets the whole answer so far, to replace the last."""
    async with connect(url, state="client.db") as client:
        async for event in client.send("my-session", words):
            show(event.transcript)
