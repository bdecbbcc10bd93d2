"""The client of the README."""

from midstream import connect


async def ask(url: str, words: str) -> str:
    """Ask a session and return the whole answer."""
    said = ""
    async with connect(url, state="client.db") as client:
        async for event in client.send("my-session", words):
            said += event.text
    return said
