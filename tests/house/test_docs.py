"""All references of the documentation exist, its generated blocks are current, and its sentences are short."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.search import with_slow
from tools import docs

PAGES = docs.pages()
SPEC = docs.ROOT / "docs" / "spec"
SEARCHED = {
    SPEC / "turn.md": "tests/session/test_edges.py",
    SPEC / "stream.md": "tests/protocol/test_halves.py",
}
"""Pages whose blocks need a search of seconds, and the tests that check them beside others of the same search."""

READ = [page for page in PAGES if page == docs.ROOT / "README.md" or docs.ROOT / "docs" in page.parents]
WORDS_MAX = 25
CODE_OR_COMMENT = re.compile(r"```.*?```|<!--.*?-->", re.DOTALL)
TABLE_OR_HEADING = re.compile(r"^(\||#).*$", re.MULTILINE)
SENTENCE_END = re.compile(r"(?:^|\n)\s*(?:[-*]|\d+\.) +|\n\s*\n|(?<=[.!?:;])\s+")


def _name(page: Path) -> str:
    return page.relative_to(docs.ROOT).as_posix()


def _long_sentences(text: str) -> Iterator[str]:
    """Yield the sentences with more than 25 words. Tables, headings and code do not count, inline code is one word."""
    prose = TABLE_OR_HEADING.sub("\n", CODE_OR_COMMENT.sub("\n\n", text))
    codes = iter(docs.INLINE_CODE.findall(prose))
    for sentence in SENTENCE_END.split(docs.INLINE_CODE.sub("\0", prose)):
        shown = re.sub("\0", lambda _: f"`{next(codes)}`", sentence)
        if len(sentence.split()) > WORDS_MAX:
            yield " ".join(shown.split())


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_every_reference_of_a_page_exists(page: Path) -> None:
    assert list(docs.dead_references(page)) == []


# The page of public names imports all packages.
@pytest.mark.parametrize(
    "page",
    with_slow((page for page in PAGES if page not in SEARCHED), [docs.ROOT / "docs/reference/python.md"]),
    ids=_name,
)
def test_the_generated_blocks_of_a_page_are_current(page: Path) -> None:
    assert list(docs.wrong_blocks(page)) == []


@pytest.mark.parametrize("page", SEARCHED, ids=_name)
def test_blocks_generated_by_a_search_are_checked_beside_that_search(page: Path) -> None:
    beside = (docs.ROOT / SEARCHED[page]).read_text(encoding="utf-8")
    assert f'docs.wrong_blocks(docs.ROOT / "docs" / "spec" / "{page.name}")' in beside


@pytest.mark.parametrize("page", READ, ids=_name)
def test_no_sentence_of_a_page_has_more_than_25_words(page: Path) -> None:
    found = [f"{_name(page)}: {each}" for each in _long_sentences(page.read_text(encoding="utf-8"))]
    assert found == []


def test_a_long_sentence_is_found_and_shown_with_its_code() -> None:
    short = "one " * 24 + "`a b c`."
    long = "one " * 25 + "`a b c`."
    assert list(_long_sentences(f"{short} {short}\n\n- {short}\n- {short}")) == []
    assert list(_long_sentences(f"# {long}\n| {long} |\n```\n{long}\n```\n<!-- {long} -->\n")) == []
    assert list(_long_sentences(f"`d`. {long}\n\n{short}")) == [long]


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
