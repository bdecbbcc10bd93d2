"""The documentation refers to nothing that is not there, and its generated blocks are current."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import docs


@pytest.mark.parametrize("page", docs.pages(), ids=lambda page: page.relative_to(docs.ROOT).as_posix())
def test_a_page_is_true(page: Path) -> None:
    assert list(docs.problems(page)) == []


def test_every_kind_of_broken_reference_is_found(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_b.py").write_text("def test_one() -> None: ...\n")
    page = tmp_path / "page.md"
    page.write_text(
        "# A heading\n[good](#a-heading) [good](tests) [bad](#no-heading) [bad](no.md)\n"
        "`tests/test_b.py::test_one` `tests/test_b.py::test_two` `tests/no.py`\n"
        "```\n[not a link](nowhere.md)\n```\n"
        "<!-- generated: nothing -->\n<!-- end of generated -->\n"
    )
    assert list(docs.problems(page, tmp_path)) == [
        "page.md: nothing generates 'nothing'",
        "page.md: the link '#no-heading' leads nowhere",
        "page.md: the link 'no.md' leads nowhere",
        "page.md: there is no `tests/test_b.py::test_two`",
        "page.md: there is no `tests/no.py`",
    ]


def test_a_stale_block_is_found_and_made_anew(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- generated: make-targets -->\nold\n<!-- end of generated -->\n")
    assert list(docs.problems(page, tmp_path)) == ["page.md: a generated block is stale: run `make docs`"]
    page.write_text(docs.with_fresh_blocks(page.read_text()))
    assert "| `make check` |" in page.read_text()
    assert list(docs.problems(page, tmp_path)) == []


def test_the_description_of_the_http_interface_is_current() -> None:
    assert docs.OPENAPI.read_text(encoding="utf-8") == docs.openapi()
