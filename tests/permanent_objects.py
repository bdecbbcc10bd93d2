"""Objects that stay in memory, and so are excluded from the garbage collector: repeated scans of them take long."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def permanent_objects() -> Iterator[None]:
    """Exclude all objects that exist at the end of the block from later collections."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
