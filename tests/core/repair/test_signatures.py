from __future__ import annotations

import base64

from midstream.core.repair.signatures import has_any, odd_signatures
from tests.core.repair.reported import reply, text, thought, user


def signature(size: int) -> str:
    return base64.b64encode(bytes([0x12, size]) + bytes([7]) * size).decode()


def test_a_signature_cut_at_capture_is_odd_beside_whole_ones() -> None:
    cut = signature(90)[:24]
    history = [reply(thought(signature=signature(80)), text("a")), reply(thought(signature=cut), text("b"))]
    assert odd_signatures(history) == {cut}
    assert [has_any(message, frozenset({cut})) for message in history] == [False, True]


def test_signatures_that_all_look_alike_are_left_alone() -> None:
    history = [user("q"), reply(thought(signature="sig_1")), reply(thought(signature="sig_2"))]
    assert odd_signatures(history) == frozenset()
