from __future__ import annotations

from pathlib import Path

import pytest

from midstream.errors import UsageError
from midstream.store.encryption.ciphers import FileKeys
from midstream.store.encryption.remote_keys import RemoteKeys
from midstream.store.key_location import KeyEndpoint, make_keys, open_keys


def test_a_path_is_a_key_file_and_an_endpoint_has_a_url(tmp_path: Path) -> None:
    make_keys(tmp_path / "keys")
    assert isinstance(open_keys(tmp_path / "keys"), FileKeys)
    opened = open_keys(KeyEndpoint("https://keys.example/midstream/", "the-token"))
    assert isinstance(opened, RemoteKeys)
    assert opened.url == "https://keys.example/midstream"
    with pytest.raises(UsageError, match="it exists"):
        make_keys(tmp_path / "keys")


def test_a_token_is_not_in_a_repr() -> None:
    endpoint = KeyEndpoint("https://keys.example", "the-token")
    assert "the-token" not in f"{endpoint} {endpoint!r} {vars(open_keys(endpoint))['url']}"
