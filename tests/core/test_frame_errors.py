"""An `error` frame comes back as the typed error it stands for."""

from __future__ import annotations

from midstream.core.frame_errors import error_of
from midstream.core.frames import Error
from midstream.errors import DrainingError, MidstreamError, ProtocolError, StoreBusyError, UnavailableError


def test_every_code_of_the_error_tree_comes_back_as_its_type() -> None:
    for kind in _kinds(MidstreamError):
        error = error_of(Error(kind.code, "text", expected=3, retry_after_s=2.0))
        assert (type(error), str(error)) == (kind, "text")
    unknown = error_of(Error("from_the_future", "text"))
    assert (type(unknown), "from_the_future" in str(unknown)) == (ProtocolError, True)
    passing = error_of(Error("from_the_future", "text", "later", retry_after_s=2.0))
    assert (type(passing), passing.retry, passing.retry_after_s) == (UnavailableError, "later", 2.0)
    assert DrainingError("x").retry == StoreBusyError("x").retry == "later"


def _kinds(kind: type[MidstreamError]) -> list[type[MidstreamError]]:
    below = [each for narrower in kind.__subclasses__() for each in _kinds(narrower)]
    return [kind, *(each for each in below if each.__module__ == "midstream.errors")]
