from __future__ import annotations

import pytest

from midstream.lazy_names import lazy_names


def test_a_name_is_loaded_from_its_module_and_an_unknown_one_is_an_attribute_error() -> None:
    load, names, public = lazy_names("midstream.example", {"errors": "UsageError MidstreamError"})
    assert load("UsageError").__name__ == "UsageError"  # type: ignore[attr-defined]  # it is a class
    assert public == ["MidstreamError", "UsageError"]
    assert set(public) <= set(names())
    with pytest.raises(AttributeError, match=r"midstream\.example.*Other"):
        load("Other")
