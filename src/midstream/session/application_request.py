"""One request of a client application, as the journal has it."""

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
        conversation: The name of the conversation for a stateful upstream agent; "" for none.
        settings: Settings for the response.
        is_ephemeral: Whether it is a side call, such as one for a title, without a trace in an agent's memory.
        is_background: Whether the response is completed without a reader.
        form: Data that the dialect needs to write the response.
        input: The items of the request, if its API can list them later.
        model: The model that answers, if there are several; else "".
        principal: The principal of the request, if principals are distinguished; else "".
        usage_entry: The name of the entry that counts its usage; "" for none.
        is_private: Whether none of its content may be stored on disk.
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
    is_private: bool = False
