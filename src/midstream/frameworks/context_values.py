"""Values of context variables inside a block of the application, which may be in an async generator."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import TypeVar

T = TypeVar("T")


@contextmanager
def value_within(variable: ContextVar[T], value: T) -> Generator[None, None, None]:
    """Set a context variable inside the block, and restore its value at the end.

    An async generator that is dropped before its end, such as the body of a response whose client has left, is closed
    by the event loop in another context. That context does not have the value.
    """
    token = variable.set(value)
    try:
        yield
    finally:
        with suppress(ValueError):
            variable.reset(token)
