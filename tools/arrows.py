"""A contract for import-linter: a module may be imported directly only by its named homes.

import-linter's own `protected` contract refuses to run while a named module is imported by nobody. An
optional package is exactly that until its adapter is written, so this one takes absence for obedience.
"""

from __future__ import annotations

from typing import Any

from grimp import ImportGraph
from importlinter import Contract, ContractCheck, fields, output


class Homes(Contract):
    """Each entry of `homes` reads `what: who, who`; a name stands for itself and all below it.

    `package.__init__` stands for that one file.
    """

    type_name = "homes"
    homes = fields.ListField(subfield=fields.StringField())

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:  # noqa: ARG002, FBT001 - their interface
        strays = [
            stray
            for line in self.homes  # type: ignore[attr-defined] # a field becomes its value
            for stray in _strays(graph, *_parse(line))
        ]
        return ContractCheck(kept=not strays, metadata={"strays": strays})

    def render_broken_contract(self, check: ContractCheck) -> None:
        for stray in check.metadata["strays"]:
            output.print_error(f"- {stray}", bold=False)


def _parse(line: str) -> tuple[str, tuple[str, ...]]:
    what, _, homes = line.partition(":")
    return what.strip(), tuple(home.strip() for home in homes.split(",") if home.strip())


def _strays(graph: ImportGraph, what: str, homes: tuple[str, ...]) -> list[str]:
    return [
        f"{importer} -> {imported} (line {_lines(graph, importer, imported)})"
        for imported in sorted(graph.modules)
        if _is_in(imported, what)
        for importer in sorted(graph.find_modules_that_directly_import(imported))
        if not any(_is_in(importer, home) for home in (what, *homes))
    ]


def _is_in(module: str, package: str) -> bool:
    if package.endswith(".__init__"):
        return module == package.removesuffix(".__init__")
    return module == package or module.startswith(f"{package}.")


def _lines(graph: ImportGraph, importer: str, imported: str) -> str:
    details: list[Any] = graph.get_import_details(importer=importer, imported=imported)
    return ", ".join(str(detail["line_number"]) for detail in details)
