"""Each package may be imported only from its home, and every other import is reported."""

from __future__ import annotations

import grimp

from tools.arrows import Homes

HOMES = ["apsw: app.store.sqlite", "app.store: app.cli, app.__init__", "unused:"]


def test_the_home_may_import_and_need_not() -> None:
    assert _strays(("app.store.sqlite", "apsw"), ("app.cli.serve", "app.store")) == []


def test_the_public_face_of_a_package_is_one_file() -> None:
    assert _strays(("app", "app.store"), ("app.core", "app.store")) == ["app.core -> app.store (line 7)"]


def test_a_stray_import_is_reported_with_its_line() -> None:
    assert _strays(("app.store.memory", "apsw"), ("app.core", "app.store.sqlite")) == [
        "app.store.memory -> apsw (line 7)",
        "app.core -> app.store.sqlite (line 7)",
    ]


def test_a_name_that_only_starts_like_the_home_is_a_stray() -> None:
    assert _strays(("app.store.sqlite_old", "apsw")) == ["app.store.sqlite_old -> apsw (line 7)"]


def _strays(*arrows: tuple[str, str]) -> list[str]:
    graph = grimp.ImportGraph()
    for importer, imported in arrows:
        graph.add_import(importer=importer, imported=imported, line_number=7, line_contents="import it")
    contract = Homes(name="homes", session_options={}, contract_options={"homes": HOMES})
    check = contract.check(graph, verbose=False)
    strays: list[str] = check.metadata["strays"]
    assert check.kept == (strays == [])
    return strays
