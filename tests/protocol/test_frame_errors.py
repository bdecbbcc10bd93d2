"""An `error` frame is decoded to its typed error."""

from __future__ import annotations

import re

import pytest

from midstream.errors import DrainingError, MidstreamError, ProtocolError, StoreBusyError, UnavailableError
from midstream.protocol.frame_errors import KEEPS_CHECKPOINT, error_of
from midstream.protocol.frames import Error
from tests.house.source import ROOT
from tests.spec import spec


def test_every_code_of_the_error_tree_is_decoded_to_its_type() -> None:
    for kind in _kinds(MidstreamError):
        error = error_of(Error(kind.code, "text", expected=3, retry_after_s=2.0))
        assert (type(error), str(error)) == (kind, "text")
    assert DrainingError("x").retry == StoreBusyError("x").retry == "later"


@spec("STREAM-28")
@pytest.mark.parametrize(
    ("path", "list_of_codes"),
    [
        ("src/midstream/server/static/client/errors.js", r"KEEPS_CHECKPOINT = new Set\(\[(.*?)\]\)"),
        ("examples/minimal_client/stream.mjs", r"RESUMABLE = words\((.*?)\)"),
    ],
)
def test_all_clients_keep_the_checkpoint_after_the_same_errors(path: str, list_of_codes: str) -> None:
    found = re.search(list_of_codes, (ROOT / path).read_text(), re.DOTALL)
    assert found is not None
    assert {*re.findall(r"[a-z_]+", found[1].replace("EVENTS_LOST", "events_lost"))} == KEEPS_CHECKPOINT


@spec("STREAM-28")
@pytest.mark.parametrize(
    ("retry", "kind"),
    [
        ("never", ProtocolError),
        ("ask", ProtocolError),
        ("later", UnavailableError),
        ("now", UnavailableError),
    ],
)
def test_an_unknown_code_is_classified_by_its_retry(retry: str, kind: type[MidstreamError]) -> None:
    unknown = error_of(Error("from_the_future", "text", retry, retry_after_s=2.0))
    assert (type(unknown), unknown.retry_after_s) == (kind, 2.0)
    assert "from_the_future" in str(unknown)


def _kinds(kind: type[MidstreamError]) -> list[type[MidstreamError]]:
    below = [each for narrower in kind.__subclasses__() for each in _kinds(narrower)]
    return [kind, *(each for each in below if each.__module__ == "midstream.errors")]
