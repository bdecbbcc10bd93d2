"""Fields of a request's body, decoded one by one, each with its own error."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeVar, cast

import msgspec

from midstream.errors import MalformedFrameError
from midstream.json_depth import TOO_DEEP, is_too_deep

T = TypeVar("T")
Fields = Mapping[str, msgspec.Raw]

_NULL = b"null"

_object = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


class BadFieldError(MalformedFrameError):
    """A field of a request, `param`, is invalid. Nothing was done."""

    param = ""


def bad_field(param: str, message: str) -> BadFieldError:
    """Return the error for a field."""
    error = BadFieldError(message)
    error.param = param
    return error


def fields_of(body: bytes) -> Fields:
    """Return the undecoded top-level fields of a JSON object, without nulls.

    Raises:
        MalformedFrameError: The body is not a JSON object.
    """
    try:
        return without_nulls(_object(body))
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise no_object() from error


def without_nulls(fields: Fields) -> Fields:
    """Return fields without nulls."""
    return {name: raw for name, raw in fields.items() if not _is_null(raw)}


def no_object() -> MalformedFrameError:
    """Return the error for a body that is not a JSON object."""
    return MalformedFrameError("the body of this request is not a JSON object")


def field(fields: Fields, name: str, kind: type[T]) -> T | None:
    """Decode a field; return None if it is missing.

    Raises:
        BadFieldError: The field has another type, or is nested too deeply.
    """
    raw = fields.get(name)
    if raw is None:
        return None
    try:
        value = _decoder_of(cast("Hashable", kind))(raw)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise bad_field(name, f"`{name}` does not have the form of this API") from error
    if isinstance(value, list | dict) and is_too_deep(value):
        raise bad_field(name, f"`{name}` is {TOO_DEEP}")
    return cast("T", value)


def texts_of(fields: Fields, name: str) -> dict[str, str]:
    """Return the texts in an object field; empty if it is missing or not an object."""
    found = field(fields, name, object)
    return {key: value for key, value in _items(found) if isinstance(value, str)}


@functools.cache
def _decoder_of(kind: Hashable) -> Callable[[msgspec.Raw], object]:
    """Return a cached decoder: creating one takes longer than decoding most values."""
    return msgspec.json.Decoder(cast("type[object]", kind)).decode


def _is_null(raw: msgspec.Raw) -> bool:
    view = memoryview(raw)
    return view.nbytes == len(_NULL) and view == _NULL


def _items(found: object) -> list[tuple[str, Any]]:
    return list(found.items()) if isinstance(found, dict) else []
