"""Public names of a package, each loaded at its first use (PEP 562)."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping


def lazy_names(
    package: str, homes: Mapping[str, str]
) -> tuple[Callable[[str], object], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` of a package.

    Args:
        package: The package's `__name__`.
        homes: The public names, separated by blanks, by the module that defines them.
    """
    modules = {name: f"midstream.{module}" for module, names in homes.items() for name in names.split()}

    def load(name: str) -> object:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(modules[name]), name)

    return load, lambda: [*modules, "__version__"], sorted(modules)
