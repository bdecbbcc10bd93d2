"""Users of the gateway: a key each, revoked at once; the data of one is invisible to the others."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import openai
import pytest

from midstream.environment import World
from midstream.errors import UsageError
from midstream.server.gateway_users import GatewayUsers
from tests.dialects.usage_upstream import TEXT, usage_upstream, user_gateway
from tests.spec import spec

KEY = "the-key-of-ada-0001"
MESSAGES: list[Any] = [{"role": "user", "content": "hi"}]


def file_with(folder: Path, *lines: str) -> Path:
    path = folder / "users"
    path.write_text("".join(f"{line}\n" for line in lines))
    path.chmod(0o600)
    return path


def test_a_key_is_accepted_in_the_header_of_either_api_until_it_is_revoked_or_expires(tmp_path: Path) -> None:
    path = tmp_path / "users"
    users = GatewayUsers(path, World())
    shown = {"authorization": f"Bearer {KEY}"}
    assert users.find(shown) is None
    file_with(tmp_path, f"{KEY} ada acme requests-per-minute=2 models=a,b", f"{KEY}2 eve expires=2001-01-01")
    path.write_text(path.read_text().replace("eve ", "eve acme "))
    for headers in (shown, {"x-api-key": KEY}):
        found = users.find(headers)
        assert found is not None
        assert (found.principal, found.allowance.requests_per_minute) == ("acme:ada", 2)
        assert found.allowance.models == ("a", "b")
    assert [users.find({"x-api-key": key}) for key in (f"{KEY}2", "another", "")] == [None, None, None]
    file_with(tmp_path, "# nobody")
    assert users.find(shown) is None
    file_with(tmp_path, f"{KEY} ada")
    assert users.find(shown) is not None
    path.unlink()
    assert users.find(shown) is None


@pytest.mark.parametrize(
    "line",
    [f"{KEY} ada scope=read", f"{KEY} ada *", f"{KEY} ada role=operator", f"{KEY} ada tokens-per-day=0", KEY],
)
def test_an_invalid_line_fails_the_start_and_admits_no_user_later(tmp_path: Path, line: str) -> None:
    path = file_with(tmp_path, f"{KEY} ada")
    users = GatewayUsers(path, World())
    assert users.find({"x-api-key": KEY}) is not None
    file_with(tmp_path, f"{KEY} ada", "# longer", line)
    assert users.find({"x-api-key": KEY}) is None
    with pytest.raises(UsageError):
        GatewayUsers(path, World())


@spec("REUSE-89")
async def test_the_data_of_one_user_is_invisible_to_another(tmp_path: Path) -> None:
    async with usage_upstream() as upstream, user_gateway(tmp_path, upstream) as [gateway]:
        keys = [await asyncio.to_thread(gateway.command, "keys", "add", name) for name in ("ada", "eve")]
        clients = [gateway.openai(key) for key in (*keys, gateway.own_key)]
        ada, *others = clients
        named = {"x-midstream-session": "plans", "Idempotency-Key": "same"}
        first = await ada.responses.create(model="m", input="hi", extra_headers=named)
        conversation = await ada.conversations.create()
        await ada.responses.create(model="m", input="hi", conversation=conversation.id)
        for other in others:
            for call in (
                other.responses.retrieve(first.id),
                other.responses.cancel(first.id),
                other.responses.delete(first.id),
                other.responses.input_items.list(first.id),
                other.conversations.retrieve(conversation.id),
                other.conversations.items.list(conversation.id),
                other.conversations.delete(conversation.id),
                other.responses.create(model="m", input="more", conversation=conversation.id),
            ):
                with pytest.raises(openai.NotFoundError):
                    await call
            with pytest.raises(openai.BadRequestError) as error:
                await other.responses.create(model="m", input="more", previous_response_id=first.id)
            assert error.value.code == "previous_response_not_found"
            before = upstream.requests
            same = await other.responses.create(model="m", input="hi", extra_headers=named)
            assert same.id != first.id
            assert upstream.requests == before + 1  # It joined no answer of Ada's.
        retrieved = await ada.responses.retrieve(first.id)
        assert retrieved.output_text == TEXT
        more = await ada.responses.create(model="m", input="more", previous_response_id=first.id)
        assert more.output_text == TEXT
        for each in clients:
            await each.close()


async def test_a_revoked_key_is_refused_at_once_and_the_gateways_own_key_stays(tmp_path: Path) -> None:
    async with usage_upstream() as upstream, user_gateway(tmp_path, upstream) as [gateway]:
        key = await asyncio.to_thread(gateway.command, "keys", "add", "ada")
        async with gateway.openai(key) as client, gateway.openai(gateway.own_key) as operator:
            await client.chat.completions.create(model="m", messages=MESSAGES)
            await asyncio.to_thread(gateway.command, "keys", "revoke", "ada")
            with pytest.raises(openai.AuthenticationError) as error:
                await client.chat.completions.create(model="m", messages=MESSAGES)
            assert error.value.code == "invalid_api_key"
            await operator.chat.completions.create(model="m", messages=MESSAGES)
