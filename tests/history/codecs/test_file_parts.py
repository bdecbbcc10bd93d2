"""Attachments in each provider's form."""

from __future__ import annotations

import pytest

from midstream.history.codecs.file_parts import file_part, file_words
from midstream.history.codecs.format_registry import FORMATS, find_format
from midstream.history.messages import File
from tests.spec import spec

PNG = File("image/png", data="AAAA")
PDF = File("application/pdf", data="CCCC")


def raw(form: str, file: File, takes: str = "any") -> object:
    part = file_part(find_format(form), takes, file)
    return None if part is None else part.raw


def test_chat_supports_images_audio_and_files() -> None:
    assert raw("openai-chat", PNG) == {
        "type": "image_url",
        "image_url": {"url": "data:image/png;base64,AAAA"},
    }
    assert raw("openai-chat", File("image/png", url="https://example.org/a.png")) == {
        "type": "image_url",
        "image_url": {"url": "https://example.org/a.png"},
    }
    assert raw("openai-chat", File("audio/wav", data="BBBB")) == {
        "type": "input_audio",
        "input_audio": {"data": "BBBB", "format": "wav"},
    }
    assert raw("openai-chat", PDF) == {
        "type": "file",
        "file": {"filename": "attachment.pdf", "file_data": "data:application/pdf;base64,CCCC"},
    }
    assert raw("openai-chat", File("application/pdf", url="https://example.org/a.pdf")) is None


def test_other_formats_write_documents_and_images_in_their_own_form() -> None:
    assert raw("anthropic", PDF) == {
        "type": "document",
        "source": {"type": "base64", "media_type": "application/pdf", "data": "CCCC"},
    }
    assert raw("openai-responses", PDF) == {
        "type": "input_file",
        "filename": "attachment.pdf",
        "file_data": "data:application/pdf;base64,CCCC",
    }
    assert raw("bedrock", PNG) == {"image": {"format": "png", "source": {"bytes": "AAAA"}}}
    assert raw("gemini", PDF) == {"inlineData": {"mimeType": "application/pdf", "data": "CCCC"}}
    assert raw("gemini", File("image/png", url="https://example.org/a.png")) is None
    assert raw("pydantic-ai", File("video/mp4", url="https://example.org/a.mp4")) == {
        "kind": "video-url",
        "url": "https://example.org/a.mp4",
        "media_type": "video/mp4",
    }


@pytest.mark.parametrize("form", sorted(FORMATS))
def test_an_invalid_attachment_is_never_sent(form: str) -> None:
    broken = [File("image/png", data="!"), File("image/png", data=""), File("image/png")]
    for file in [*broken, File("image/png", url="file:///a.png"), File("image/x-odd", data="AAAA")]:
        if (form, file.media_type) != ("pydantic-ai", "image/x-odd"):
            assert file_part(find_format(form), "any", file) is None


@spec("HISTORY-92")
def test_a_profile_decides_which_attachments_are_sent() -> None:
    assert file_part(find_format("openai-chat"), "none", PNG) is None
    assert file_part(find_format("openai-chat"), "images", PDF) is None
    assert file_part(find_format("openai-chat"), "images", PNG) is not None


@spec("HISTORY-92")
def test_an_attachment_that_is_not_sent_is_described_in_text() -> None:
    assert file_words(PDF) == "[attached file: application/pdf, which you cannot be shown]"
    named = File("application/pdf", url="https://example.org/a.pdf", name="a.pdf")
    assert file_words(named) == "[attached file: a.pdf at https://example.org/a.pdf]"
    assert file_words(File("text/plain", data="aGk=", name="a.txt")) == "[attached file: a.txt]\nhi"
    assert (
        file_words(File("text/plain", data="/w==")) == "[attached file: text/plain, which could not be read]"
    )
