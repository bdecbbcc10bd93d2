"""The user of this machine: authenticated by a proof under their key, for one start of the server at one
address.
"""

from __future__ import annotations

from midstream.local_keys import prove_server, token_for
from midstream.server.auth.local_user import START_S, LocalUser
from midstream.server.auth.principals import Principal
from midstream.store.memory import MemoryStore
from midstream.testing.fake_worlds import FakeWorld
from tests.server.auth.test_access import asking, known_by
from tests.spec import spec

ADDRESS = "127.0.0.1 8000"


def _shown(source: LocalUser, key: str = "key", address: str = ADDRESS) -> tuple[str, str]:
    proof = source.prove("nonce", asking())
    return ("authorization", f"Bearer {token_for(key, address, proof.start)}")


@spec("SEC-10", "SEC-11")
async def test_a_token_is_for_one_key_one_address_and_one_start() -> None:
    source, other = LocalUser("key"), LocalUser("key")
    proof = source.prove("nonce", asking())
    assert proof.proof == prove_server("key", ADDRESS, proof.start, "nonce")
    assert proof.proof != source.prove("nonce", asking(port=8001)).proof
    assert await known_by(source, _shown(source)) == "operator"
    for wrong in (_shown(other), _shown(source, key="other"), _shown(source, address="127.0.0.1 8001")):
        assert await known_by(source, wrong) is None
    assert await known_by(source) is None
    assert await known_by(source, ("authorization", f"Bearer {proof.start}.{proof.proof}")) is None


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
    assert await known_by(first, _shown(second)) is None
    for source in (first, second):
        await source.refresh(store, world)
    assert await known_by(first, _shown(second)) == "operator"
    await world.advance(START_S + 1)
    await first.refresh(store, world)
    assert await known_by(first, _shown(second)) is None
    alone = LocalUser("key")
    await alone.refresh(store, world)
    assert await known_by(alone, _shown(first)) is None
