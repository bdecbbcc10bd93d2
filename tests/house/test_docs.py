"""All references of the documentation exist, and its generated blocks are current."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import docs

PAGES = docs.pages()
SPEC = docs.ROOT / "docs" / "spec"
SEARCHED = {
    SPEC / "turn.md": "tests/session/test_edges.py",
    SPEC / "stream.md": "tests/protocol/test_halves.py",
}
"""Pages whose blocks need a search of seconds, and the tests that check them beside others of the same search."""


def _name(page: Path) -> str:
    return page.relative_to(docs.ROOT).as_posix()


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_every_reference_of_a_page_exists(page: Path) -> None:
    assert list(docs.dead_references(page)) == []


@pytest.mark.parametrize("page", [page for page in PAGES if page not in SEARCHED], ids=_name)
def test_the_generated_blocks_of_a_page_are_current(page: Path) -> None:
    assert list(docs.wrong_blocks(page)) == []


@pytest.mark.parametrize("page", SEARCHED, ids=_name)
def test_blocks_generated_by_a_search_are_checked_beside_that_search(page: Path) -> None:
    beside = (docs.ROOT / SEARCHED[page]).read_text(encoding="utf-8")
    assert f'docs.wrong_blocks(docs.ROOT / "docs" / "spec" / "{page.name}")' in beside


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
    assert docs.problems(page, tmp_path) == [
        "page.md: nothing generates 'nothing'",
        "page.md: the link '#no-heading' leads nowhere",
        "page.md: the link 'no.md' leads nowhere",
        "page.md: there is no `tests/test_b.py::test_two`",
        "page.md: there is no `tests/no.py`",
    ]


def test_a_stale_block_is_found_and_regenerated(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- generated: make-targets -->\nold\n<!-- end of generated -->\n")
    assert docs.problems(page, tmp_path) == ["page.md: a generated block is stale: run `make docs`"]
    page.write_text(docs.with_fresh_blocks(page.read_text()))
    assert "| `make check` |" in page.read_text()
    assert docs.problems(page, tmp_path) == []


def test_the_description_of_the_http_interface_is_current() -> None:
    assert docs.OPENAPI.read_text(encoding="utf-8") == docs.openapi()
