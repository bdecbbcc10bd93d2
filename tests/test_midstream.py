from __future__ import annotations

import tomllib

import pytest

import midstream
from tests.house.source import ROOT


def test_every_public_name_is_loaded_from_its_home_when_it_is_asked_for() -> None:
    for name in midstream.__all__:
        public = getattr(midstream, name)
        assert public.__name__ == name


def test_a_name_that_does_not_exist_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'Nothing'"):
        midstream.Nothing  # noqa: B018 - asking for it is the test


def test_dir_lists_the_public_names() -> None:
    assert set(midstream.__all__) <= set(dir(midstream))
    assert "__version__" in dir(midstream)


def test_the_version_is_the_one_that_is_packaged() -> None:
    packaged = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert midstream.__version__ == packaged
