from __future__ import annotations

import contextvars
from contextvars import ContextVar

from midstream.frameworks.context_values import value_within


def test_a_value_ends_with_its_block() -> None:
    variable: ContextVar[int] = ContextVar("variable", default=0)
    with value_within(variable, 1):
        assert variable.get() == 1
    assert variable.get() == 0


def test_a_block_may_end_in_another_context() -> None:
    variable: ContextVar[int] = ContextVar("variable", default=0)
    block = value_within(variable, 1)
    contextvars.copy_context().run(block.__enter__)
    block.__exit__(None, None, None)
    assert variable.get() == 0
