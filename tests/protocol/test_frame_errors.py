"""An `error` frame is decoded to its typed error."""

from __future__ import annotations

import pytest

from midstream.errors import DrainingError, MidstreamError, ProtocolError, StoreBusyError, UnavailableError
from midstream.protocol.frame_errors import error_of
from midstream.protocol.frames import Error
from tests.spec import spec


def test_every_code_of_the_error_tree_is_decoded_to_its_type() -> None:
    for kind in _kinds(MidstreamError):
        error = error_of(Error(kind.code, "text", expected=3, retry_after_s=2.0))
        assert (type(error), str(error)) == (kind, "text")
    assert DrainingError("x").retry == StoreBusyError("x").retry == "later"


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
