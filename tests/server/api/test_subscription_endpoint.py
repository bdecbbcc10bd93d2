"""Subscriptions over HTTP: cases that the public suite does not cover."""

from __future__ import annotations

import httpx2

from midstream.server.api.subscription_delivery import SUBSCRIPTIONS_MAX
from tests.server.serving import Json, asgi_client, make_app

SUBSCRIPTION = "/v1/stream/__ds/subscriptions/sub"
JSON = {"content-type": "application/json"}
PULL: Json = {"type": "pull-wake", "pattern": "events/**", "wake_stream": "pool"}


async def subscribed(client: httpx2.AsyncClient) -> None:
    assert (await client.put("/v1/stream/pool", headers=JSON)).status_code == 201
    assert (await client.put(SUBSCRIPTION, json=PULL)).status_code == 201


async def claimed(client: httpx2.AsyncClient) -> Json:
    response = await client.post(f"{SUBSCRIPTION}/claim", json={"worker": "w"})
    assert response.status_code == 200, response.text
    wake: Json = response.json()
    return wake


def report(wake: Json, **more: object) -> Json:
    return {"wake_id": wake["wake_id"], "generation": wake["generation"], **more}


async def test_existing_records_are_not_delivered_and_new_streams_are_delivered_from_their_beginning() -> (
    None
):
    async with asgi_client(make_app()) as client:
        await client.put("/v1/stream/events/old", headers=JSON, content='["a"]')
        await subscribed(client)
        refused = await client.post(f"{SUBSCRIPTION}/claim", json={"worker": "w"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "NO_PENDING_WORK")
        await client.put("/v1/stream/events/x/new", headers=JSON, content='["a","b"]')
        wake = await claimed(client)
        pending = {each["path"]: each["has_pending"] for each in wake["streams"]}
        assert pending == {"events/old": False, "events/x/new": True}


async def test_a_report_that_acks_too_much_changes_nothing() -> None:
    async with asgi_client(make_app()) as client:
        await subscribed(client)
        await client.put("/v1/stream/events/a", headers=JSON, content='["a"]')
        wake = await claimed(client)
        token = {"authorization": f"Bearer {wake['token']}"}
        acks = [{"stream": "events/a", "offset": f"{0:016d}_{2:016d}"}]
        body = report(wake, acks=acks, done=True)
        response = await client.post(f"{SUBSCRIPTION}/ack", headers=token, json=body)
        assert (response.status_code, response.json()["error"]["code"]) == (409, "INVALID_OFFSET")
        wrong = await client.post(f"{SUBSCRIPTION}/callback", headers=token, json=report(wake))
        assert (wrong.status_code, wrong.json()["error"]["code"]) == (409, "FENCED")
        acks[0]["offset"] = wake["streams"][0]["tail_offset"]
        response = await client.post(
            f"{SUBSCRIPTION}/ack", headers=token, json=report(wake, acks=acks, done=True)
        )
        assert response.json() == {"ok": True, "next_wake": False}


async def test_a_token_is_valid_for_its_subscription_while_that_exists() -> None:
    async with asgi_client(make_app()) as client:
        await subscribed(client)
        await client.put("/v1/stream/events/a", headers=JSON, content='["a"]')
        wake = await claimed(client)
        token = {"authorization": f"Bearer {wake['token']}"}
        assert (await client.delete(SUBSCRIPTION)).status_code == 204
        assert (await client.get(SUBSCRIPTION)).status_code == 404
        assert (await client.put(SUBSCRIPTION, json=PULL)).status_code == 201
        response = await client.post(f"{SUBSCRIPTION}/release", headers=token, json=report(wake))
        assert response.status_code == 401, "it is of the subscription before this one"
        for other in ("", "Bearer ", "Bearer x", f"Basic {wake['token']}"):
            response = await client.post(
                f"{SUBSCRIPTION}/ack", headers={"authorization": other}, json=report(wake)
            )
            assert response.status_code == 401


async def test_a_subscription_config_is_compared_as_a_whole_and_needs_its_wake_stream() -> None:
    async with asgi_client(make_app()) as client:
        assert (await client.put(SUBSCRIPTION, json=PULL)).status_code == 409, "no wake stream"
        await subscribed(client)
        assert (await client.put(SUBSCRIPTION, json=PULL)).status_code == 200
        for other in ({"pattern": "other"}, {"lease_ttl_ms": 2000}, {"streams": ["a"]}, {"description": "d"}):
            response = await client.put(SUBSCRIPTION, json=PULL | other)
            assert response.json()["error"]["code"] == "SUBSCRIPTION_ALREADY_EXISTS", other
        for wrong in ({"type": "x"}, {"lease_ttl_ms": 1}, {"streams": ["a~b"]}, {"pattern": ""}):
            assert (await client.put(SUBSCRIPTION, json=PULL | wrong)).status_code == 400, wrong


async def test_a_refused_webhook_is_a_fault_of_the_request_and_not_of_http() -> None:
    body = {"type": "webhook", "pattern": "a", "webhook": {"url": "http://127.0.0.1:9/hook"}}
    async with asgi_client(make_app()) as client:
        response = await client.put(SUBSCRIPTION, json=body)
        refused = response.json()
        assert (response.status_code, refused["error"]["code"]) == (400, "WEBHOOK_URL_REJECTED")
        assert (refused["code"], refused["next"]) == (
            "usage",
            "Correct the request; the same one is refused again.",
        )


async def test_subscriptions_of_one_principal_are_bounded() -> None:
    async with asgi_client(make_app()) as client:
        await subscribed(client)
        response = [
            (await client.put(f"/v1/stream/__ds/subscriptions/s{number}", json=PULL)).status_code
            for number in range(SUBSCRIPTIONS_MAX)
        ]
        assert response == [201] * (SUBSCRIPTIONS_MAX - 1) + [429]


async def test_an_invalid_id_of_a_subscription_is_named_as_such() -> None:
    async with asgi_client(make_app()) as client:
        response = await client.put("/v1/stream/__ds/subscriptions/a~b", json=PULL)
    assert (response.status_code, "the id of a subscription has 1 to 128" in response.text) == (400, True)
