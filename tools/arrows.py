"""A contract for import-linter: only the named homes may import a module directly.

import-linter's own `protected` contract fails if no module imports a named module. That is the normal state of an
optional package before its adapter is written, so this contract accepts it.
"""

from __future__ import annotations

from typing import Any

from grimp import ImportGraph
from importlinter import Contract, ContractCheck, fields, output


class Homes(Contract):
    """Import contract. Each entry of `homes` is `imported: importer, importer`.

    A name includes all modules below it; `package.__init__` is that one file.
    """

    type_name = "homes"
    homes = fields.ListField(subfield=fields.StringField())

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:  # noqa: ARG002, FBT001 - the interface of import-linter
        strays = [
            stray
            for line in self.homes  # type: ignore[attr-defined] # import-linter replaces the field by its value
            for stray in _strays(graph, *_parse(line))
        ]
        return ContractCheck(kept=not strays, metadata={"strays": strays})

    def render_broken_contract(self, check: ContractCheck) -> None:
        for stray in check.metadata["strays"]:
            output.print_error(f"- {stray}", bold=False)


def _parse(line: str) -> tuple[str, tuple[str, ...]]:
    imported, _, homes = line.partition(":")
    return imported.strip(), tuple(home.strip() for home in homes.split(",") if home.strip())


def _strays(graph: ImportGraph, protected: str, homes: tuple[str, ...]) -> list[str]:
    return [
        f"{importer} -> {imported} (line {_lines(graph, importer, imported)})"
        for imported in sorted(graph.modules)
        if _is_in(imported, protected)
        for importer in sorted(graph.find_modules_that_directly_import(imported))
        if not any(_is_in(importer, home) for home in (protected, *homes))
    ]


def _is_in(module: str, package: str) -> bool:
    if package.endswith(".__init__"):
        return module == package.removesuffix(".__init__")
    return module == package or module.startswith(f"{package}.")


def _lines(graph: ImportGraph, importer: str, imported: str) -> str:
    details: list[Any] = graph.get_import_details(importer=importer, imported=imported)
    return ", ".join(str(detail["line_number"]) for detail in details)
