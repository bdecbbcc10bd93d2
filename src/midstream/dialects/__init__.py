"""Wire protocols of other projects: the contract of a dialect, and the registry."""

from __future__ import annotations

from typing import TYPE_CHECKING

from midstream.lazy_names import lazy_names

if TYPE_CHECKING:
    from midstream.dialects.dialect import Asked as Asked
    from midstream.dialects.dialect import Dialect as Dialect
    from midstream.dialects.dialect import Form as Form
    from midstream.dialects.dialect import Writer as Writer
    from midstream.dialects.dialect_registry import DIALECTS as DIALECTS
    from midstream.dialects.usage_totals import Prices as Prices

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "dialects.dialect": "Asked Dialect Form Writer",
        "dialects.dialect_registry": "DIALECTS",
        "dialects.usage_totals": "Prices",
    },
)
