from __future__ import annotations

from midstream.history.codecs.codec_spec import Media, Part, PartKind
from midstream.history.codecs.format_registry import find_format
from midstream.history.codecs.media import media_for, media_in, thinking_for


def test_an_image_is_the_same_in_every_format_that_supports_it() -> None:
    image = Media("image/png", data="aGk=")
    for form in ("anthropic", "openai-chat", "openai-responses", "gemini"):
        written = media_for(find_format(form), image)
        assert written is not None
        assert media_in(find_format(form), written) == image


def test_an_unsupported_file_is_none() -> None:
    assert media_for(find_format("openai-chat"), Media("application/zip", data="aGk=")) is None
    assert media_in(find_format("anthropic"), Part(PartKind.MEDIA, {"type": "document"})) is None


def test_a_signature_is_kept_only_where_it_is_known() -> None:
    thought = Part(PartKind.THINKING, {}, body="hm", signature="sig")
    kept = thinking_for(find_format("bedrock"), "anthropic", thought)
    assert kept is not None
    assert (
        find_format("bedrock").parse({"role": "assistant", "content": [kept.raw]}, 0).parts[0].signature
        == "sig"
    )
    assert thinking_for(find_format("anthropic"), "", thought) is None
    assert thinking_for(find_format("openai-responses"), "anthropic", thought) is None
