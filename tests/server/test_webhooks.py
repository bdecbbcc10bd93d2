"""Webhooks: the permitted addresses, and the signature."""

from __future__ import annotations

import base64

import pytest
from aiohttp import web
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from midstream.environment import World
from midstream.errors import UsageError
from midstream.server.webhooks import ANSWER_BYTES_MAX, SigningKey, Webhooks, WebhookUrlError
from midstream.store.memory import MemoryStore


async def webhooks(*origins: str) -> Webhooks:
    store = MemoryStore()
    await store.open()
    return Webhooks(store, World(), origins)


@pytest.mark.parametrize(
    "url",
    [
        "http://10.0.0.1/hook",
        "https://10.0.0.1/hook",
        "https://127.0.0.1/hook",
        "https://2130706433/hook",
        "https://[::1]/hook",
        "https://[::ffff:127.0.0.1]/hook",
        "https://169.254.169.254/latest",
        "https://localhost/hook",
        "https://1.1.1.1:0/",
        "http://1.1.1.1/hook",
        "ftp://1.1.1.1/hook",
        "https://user:word@1.1.1.1/",
        "https://1.1.1.1\\@10.0.0.1/",
        "https://1.1.1.1 /",
        "https://",
        "hook",
        "https://[::1",
    ],
)
async def test_private_and_malformed_addresses_are_refused(url: str) -> None:
    with pytest.raises(WebhookUrlError):
        await (await webhooks()).check(url)
    with pytest.raises(WebhookUrlError):
        await (await webhooks()).send(url, b"{}")


async def test_public_addresses_and_allowed_origins_are_accepted() -> None:
    await (await webhooks()).check("https://1.1.1.1/hook")
    allowing = await webhooks("http://127.0.0.1:9000", "http://[::1]")
    await allowing.check("http://127.0.0.1:9000/hook")
    await allowing.check("http://[::1]:77/hook")
    for url in ("http://127.0.0.1:9001/", "https://127.0.0.1:9000/", "http://127.0.0.2:9000/"):
        with pytest.raises(WebhookUrlError):
            await allowing.check(url)


@pytest.mark.parametrize("origin", ["127.0.0.1:9000", "http://", "http://a.example/hook", "*"])
async def test_an_allowed_origin_that_matches_no_webhook_is_refused(origin: str) -> None:
    with pytest.raises(UsageError, match="an origin must look like"):
        await webhooks(origin)


async def test_all_servers_of_a_store_sign_with_one_key() -> None:
    store = MemoryStore()
    await store.open()
    first, second = Webhooks(store, World()), Webhooks(store, World())
    assert (await first.key()).kid == (await second.key()).kid


def test_a_signature_covers_the_time_and_the_body() -> None:
    key = SigningKey(bytes(32))
    header = dict(each.split("=", 1) for each in key.signature(b"body", now=1700000000.9).split(","))
    assert (header["t"], header["kid"]) == ("1700000000", key.kid)
    public = Ed25519PublicKey.from_public_bytes(base64.urlsafe_b64decode(key.public_jwk()["x"] + "="))
    signature = base64.urlsafe_b64decode(header["ed25519"] + "==")
    public.verify(signature, b"1700000000.body")
    with pytest.raises(InvalidSignature):
        public.verify(signature, b"1700000001.body")


async def test_redirects_are_not_followed_and_long_responses_not_read() -> None:
    asked: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(request.path)
        if request.path == "/away":
            raise web.HTTPTemporaryRedirect("/other")
        return web.Response(body=b"x" * (ANSWER_BYTES_MAX + 1))

    app = web.Application()
    app.router.add_post("/{any}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        sending = await webhooks("http://127.0.0.1")
        assert (await sending.send(f"{url}/away", b"{}")).status == 307
        long = await sending.send(f"{url}/long", b"{}")
        assert (long.status, long.is_good, long.body) == (200, True, b"")
    finally:
        await runner.cleanup()
    assert asked == ["/away", "/long"]
    assert (await sending.send(f"{url}/gone", b"{}")).status == 0
