from __future__ import annotations

import inspect
import tomllib
import typing
from collections.abc import Iterator
from enum import StrEnum
from typing import Any

import pytest

import midstream
from midstream.client.transport_selection import TransportKind
from midstream.protocol.frames import SnapshotWhen
from midstream.session.calls import OnDoubt
from midstream.session.turn.commands import WhenBusy
from tests.house.source import ROOT

FROM_PEOPLE = {"Client.answer(choice)"}
"""Options with values that a person types at run time."""


def test_every_public_name_is_loaded_on_demand() -> None:
    for name in midstream.__all__:
        public = getattr(midstream, name)
        assert public.__name__ == name


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'Nothing'"):
        midstream.Nothing  # noqa: B018 - asking for it is the test


def test_dir_lists_the_public_names() -> None:
    assert set(midstream.__all__) <= set(dir(midstream))
    assert "__version__" in dir(midstream)


def test_the_version_is_the_packaged_one() -> None:
    packaged = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert midstream.__version__ == packaged


def _options(public: object) -> Iterator[tuple[str, Any]]:
    """Yield the types of the parameters that a caller of a public name gives."""
    functions = [public]
    if inspect.isclass(public):
        functions = [each for name, each in vars(public).items() if not name.startswith("_")]
        functions.append(vars(public).get("__init__"))
    for function in filter(inspect.isfunction, functions):
        for name, hint in typing.get_type_hints(function).items():
            yield f"{function.__qualname__}({name})", hint


def test_an_option_with_several_valid_words_names_them_in_its_type() -> None:
    found: dict[str, set[str]] = {}
    for each in midstream.__all__:
        for option, hint in _options(getattr(midstream, each)):
            members = typing.get_args(hint)
            words = {word for member in members for word in typing.get_args(member) if isinstance(word, str)}
            kinds = [member for member in members if inspect.isclass(member) and issubclass(member, StrEnum)]
            if kinds and option not in FROM_PEOPLE:
                assert str not in members, option
                assert set(kinds[0]) <= words, option
                found[option] = words
    assert found["tool(on_doubt)"] == {*OnDoubt}
    assert found["connect(transport)"] == {"auto", *TransportKind}
    assert found["Client.send(when_busy)"] == {*WhenBusy}
    assert found["Client.follow(snapshots)"] == {*SnapshotWhen}
