"""Names of sessions that are parts of others."""

from __future__ import annotations

from midstream.session.child_names import PART_MARK, root_of


def test_parts_of_parts_have_the_same_root() -> None:
    assert (
        root_of("s") == root_of(f"s{PART_MARK}1.2.0") == root_of(f"s{PART_MARK}1.2.0{PART_MARK}1.1.0") == "s"
    )
