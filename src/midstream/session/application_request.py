"""One request of a client application, as a journal has it."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from midstream.session.model_settings import DEFAULT_SETTINGS, ModelSettings


class ApplicationRequest(Struct, frozen=True, gc=False, omit_defaults=True):
    """One request of a client application that resends its conversation, without the conversation.

    Args:
        id: The id of the response in the application's API.
        digest: Digest of the request; equal for equal requests only.
        key: The application's idempotency key, or "".
        conversation: The name by which a stateful upstream agent finds the conversation; "" for none.
        settings: How the response is to be made.
        is_ephemeral: A side request, such as one for a title: it leaves no trace in an agent's memory.
        is_background: The response is made whether or not a client reads it.
        form: What the dialect needs to write the response.
        input: The items of the request as they came, where its API lists them later.
        model: Which model answers it, where several can; "" where there is one.
        principal: Who requested it, where the requests of several are kept apart; "" otherwise.
        usage_entry: The name of the entry in which its usage is counted; "" where it is not.
    """

    id: str
    digest: str = ""
    key: str = ""
    conversation: str = ""
    settings: ModelSettings = DEFAULT_SETTINGS
    is_ephemeral: bool = False
    is_background: bool = False
    form: dict[str, Any] = {}
    input: list[Any] = []
    model: str = ""
    principal: str = ""
    usage_entry: str = ""
