from __future__ import annotations

import base64

from midstream.history.repair.signatures import odd_signatures
from tests.history.repair.reported import response, text, thought, user


def signature(size: int) -> str:
    return base64.b64encode(bytes([0x12, size]) + bytes([7]) * size).decode()


def test_a_signature_cut_at_capture_is_odd_beside_complete_ones() -> None:
    cut = signature(90)[:24]
    history = [
        response(thought(signature=signature(80)), text("a")),
        response(thought(signature=cut), text("b")),
    ]
    assert odd_signatures(history) == {cut}


def test_signatures_that_all_look_alike_are_kept() -> None:
    history = [user("q"), response(thought(signature="sig_1")), response(thought(signature="sig_2"))]
    assert odd_signatures(history) == frozenset()


def test_newer_signatures_with_a_version_prefix_are_as_valid_as_older_ones() -> None:
    newer = base64.b64encode(bytes([8, 2, 0x12, 90]) + bytes([7]) * 90).decode()
    assert newer.startswith("CAIS")
    history = [response(thought(signature=signature(80))), response(thought(signature=newer))]
    assert odd_signatures(history) == frozenset()
    assert odd_signatures([*history, response(thought(signature=newer[:24]))]) == {newer[:24]}


def test_a_signature_is_odd_under_any_role() -> None:
    cut = signature(90)[:24]
    history = [
        response(thought(signature=signature(80))),
        {"role": "model", "content": [thought(signature=cut)]},
    ]
    assert odd_signatures(history) == {cut}
