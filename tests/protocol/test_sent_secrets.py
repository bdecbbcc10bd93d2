"""Changed secrets are presented by all processes of a user, and a refused one is not presented repeatedly."""

from __future__ import annotations

import pytest

from midstream.errors import AccessError, ConnectionLostError, WrongSecretError
from midstream.protocol import frames
from midstream.protocol.checkpoint import Forgotten
from midstream.protocol.client_stream import ClientStream
from midstream.protocol.frames import Error, Open, Welcome
from midstream.protocol.sent_secrets import SentSecrets
from tests.protocol.test_client_stream import receive, stream_in_turn
from tests.spec import spec


def test_the_secret_of_a_stream_is_presented_beside_the_current_one_of_its_session() -> None:
    for own, beside in (("first", "first"), ("", "")):
        shown = SentSecrets("first", "", own, is_due=True)
        for learnt, expected in (
            (("second", ""), ("second", beside)),
            (("third", "second"), ("third", "second")),
            (("", ""), ("third", "second")),
            (("first", ""), ("first", "")),
        ):
            shown = shown.with_secrets(*learnt)
            assert (shown.secret, shown.old_secret, shown.is_due) == (*expected, False)
            assert expected[0] not in repr(shown)


def test_only_a_wrong_secret_is_doubted_and_only_once() -> None:
    shown, refusal = SentSecrets("first", "", "first"), WrongSecretError("no")
    for other in (None, ConnectionLostError("reset"), AccessError("no")):
        assert shown.with_doubt(other) is None
    doubted = shown.with_doubt(refusal)
    assert doubted is not None
    assert doubted.refusal is refusal
    assert doubted.with_doubt(refusal) is None
    assert [doubted.with_secrets(each, "").refusal for each in ("first", "", "second")] == [
        refusal,
        refusal,
        None,
    ]
    assert doubted.with_acceptance().with_doubt(refusal) is not None
    assert shown.with_acceptance() is shown


REFUSED = Error("wrong_secret", "no")


def _secrets_of(stream: ClientStream) -> tuple[str, str]:
    """Return the secrets that the next connection presents."""
    stream.end_connection(chance=0.0, now=1.0)
    stream.handle_deadline(now=100.0)
    stream.begin_connection(now=100.0)
    opening = frames.decode_client(stream.frames_to_send()[0])
    assert isinstance(opening, Open)
    return opening.secret, opening.old_secret


@spec("STREAM-96")
def test_a_refused_secret_is_read_again_and_presented_if_it_has_changed() -> None:
    stream = stream_in_turn()
    receive(stream, REFUSED)
    assert (stream.needs_secret, stream.is_connection_wanted, stream.is_ended) == (True, False, False)
    stream.show("newer")
    assert not stream.needs_secret
    assert _secrets_of(stream) == ("newer", "secret")
    receive(stream, REFUSED)
    assert isinstance(stream.error, WrongSecretError), "it was looked at once"
    assert (str(stream.error), stream.writes()) == ("no", [Forgotten()])


@spec("STREAM-96")
def test_a_refused_secret_that_has_not_changed_ends_the_stream() -> None:
    for secret in ("secret", ""):
        stream = stream_in_turn()
        stream.end_connection(WrongSecretError("no"), chance=0.0, now=1.0)
        assert (stream.needs_secret, stream.is_ended) == (True, False)
        stream.show(secret)
        assert (type(stream.error), stream.needs_secret) == (WrongSecretError, False)
        assert stream.writes() == [Forgotten()]


@spec("STREAM-96")
def test_a_shell_that_cannot_read_secrets_never_presents_a_refused_one_again() -> None:
    stream = stream_in_turn()
    receive(stream, REFUSED)
    stream.end_connection(chance=0.0, now=1.0)
    stream.handle_deadline(now=1.0)
    stream.begin_connection(now=1.0)
    assert isinstance(stream.error, WrongSecretError)
    assert (stream.writes(), stream.frames_to_send()) == ([Forgotten()], [])


@spec("STREAM-96")
def test_after_a_welcome_a_secret_can_be_refused_again() -> None:
    stream = stream_in_turn()
    for newer in ("second", "third"):
        receive(stream, REFUSED)
        stream.show(newer)
        assert _secrets_of(stream) == (newer, "secret")
        receive(stream, Welcome("a", "1-3", "1-3", acked=1))
    assert not stream.is_ended


@spec("STREAM-96")
@pytest.mark.parametrize("is_encrypted", [True, False, None])
def test_the_secret_is_read_for_each_new_connection_of_a_possibly_encrypted_session(
    *, is_encrypted: bool | None
) -> None:
    stream = ClientStream("a", "secret", now=0.0)
    stream.handle_deadline(now=0.0)
    assert not stream.needs_secret, "it was just read"
    if is_encrypted is not None:
        stream.begin_connection(now=0.0)
        stream.frames_to_send()
        receive(stream, Welcome("a", "1-3", "1-3", is_encrypted=is_encrypted))
    stream.end_connection(chance=0.0, now=1.0)
    assert not stream.needs_secret, "no connection is made yet"
    stream.handle_deadline(now=1.0)
    assert stream.needs_secret is (is_encrypted is not False)
    stream.show("newest", "newer")
    assert not stream.needs_secret
    assert _secrets_of(stream) == ("newest", "newer")


@spec("STREAM-96")
def test_a_degraded_server_that_refuses_a_secret_ends_the_stream() -> None:
    stream = stream_in_turn()
    stream.end_connection(chance=0.0, now=1.0)
    stream.handle_deadline(now=1.0)
    stream.begin_connection(now=1.0)
    receive(stream, Welcome("a", "1-3", "1-3", acked=1, is_degraded=True), REFUSED)
    assert isinstance(stream.error, WrongSecretError)
