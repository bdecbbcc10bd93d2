"""The user of this machine: authenticated by a proof under their key, for one start of the server at one address."""

from __future__ import annotations

from midstream.local_keys import prove_server, token_for
from midstream.server.auth.local_user import START_S, LocalUser
from midstream.server.auth.principals import Principal
from midstream.store.memory import MemoryStore
from midstream.testing.fake_worlds import FakeWorld
from tests.server.auth.test_access import principal_of, request_with
from tests.spec import spec

ADDRESS = "127.0.0.1 8000"


def _bearer_of(source: LocalUser, key: str = "key", address: str = ADDRESS) -> tuple[str, str]:
    proof = source.prove("nonce", request_with())
    return ("authorization", f"Bearer {token_for(key, address, proof.start)}")


@spec("SEC-10", "SEC-11")
async def test_a_token_is_for_one_key_one_address_and_one_start() -> None:
    source, other = LocalUser("key"), LocalUser("key")
    proof = source.prove("nonce", request_with())
    assert proof.proof == prove_server("key", ADDRESS, proof.start, "nonce")
    assert proof.proof != source.prove("nonce", request_with(port=8001)).proof
    assert await principal_of(source, _bearer_of(source)) == "operator"
    for wrong in (
        _bearer_of(other),
        _bearer_of(source, key="other"),
        _bearer_of(source, address="127.0.0.1 8001"),
    ):
        assert await principal_of(source, wrong) is None
    assert await principal_of(source) is None
    assert await principal_of(source, ("authorization", f"Bearer {proof.start}.{proof.proof}")) is None


@spec("SEC-4")
async def test_a_credential_issued_under_another_key_is_not_current() -> None:
    source = LocalUser("key")
    assert await source.is_current(LocalUser("key").principal)
    assert not await source.is_current(LocalUser("other").principal)
    assert not await source.is_current(Principal("operator", is_operator=True))


@spec("SEC-11")
async def test_servers_that_share_a_port_accept_each_others_starts_while_they_live() -> None:
    world, store = FakeWorld(), MemoryStore()
    await store.open()
    first, second = (LocalUser("key", shares_port=True) for _ in range(2))
    assert await principal_of(first, _bearer_of(second)) is None
    for source in (first, second):
        await source.refresh(store, world)
    assert await principal_of(first, _bearer_of(second)) == "operator"
    await world.advance(START_S + 1)
    await first.refresh(store, world)
    assert await principal_of(first, _bearer_of(second)) is None
    alone = LocalUser("key")
    await alone.refresh(store, world)
    assert await principal_of(alone, _bearer_of(first)) is None
