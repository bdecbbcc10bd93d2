from __future__ import annotations

from typing import Any

import pytest

from midstream.dialects.incoming_files import attachment_of
from midstream.history.codecs.codec_spec import Part, PartKind
from midstream.history.codecs.format_registry import find_format
from midstream.history.messages import File, Text

PNG = "iVBORw0KGgo="

CASES: list[tuple[str, dict[str, Any], File | Text]] = [
    (
        "openai-chat",
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG}"}},
        File("image/png", data=PNG),
    ),
    (
        "openai-chat",
        {"type": "file", "file": {"filename": "a.pdf", "file_data": f"data:application/pdf;base64,{PNG}"}},
        File("application/pdf", data=PNG, name="a.pdf"),
    ),
    ("openai-chat", {"type": "file", "file": {"file_id": "file-1"}}, Text("[attached: file-1]")),
    (
        "openai-chat",
        {"type": "input_audio", "input_audio": {"data": PNG, "format": "mp3"}},
        File("audio/mpeg", data=PNG),
    ),
    (
        "openai-responses",
        {"type": "input_file", "file_url": "https://a.example/a.pdf"},
        File("application/pdf", url="https://a.example/a.pdf"),
    ),
    (
        "openai-responses",
        {"type": "input_file", "filename": "a", "file_data": PNG},
        File("application/pdf", data=PNG, name="a"),
    ),
    ("openai-responses", {"type": "input_image", "file_id": "file-1"}, Text("[attached: file-1]")),
    (
        "anthropic",
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PNG}},
        File("image/png", data=PNG),
    ),
    (
        "anthropic",
        {
            "type": "document",
            "title": "t",
            "source": {"type": "base64", "media_type": "application/pdf", "data": PNG},
        },
        File("application/pdf", data=PNG, name="t"),
    ),
    (
        "anthropic",
        {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "hi"}},
        File("text/plain", data="aGk="),
    ),
    (
        "anthropic",
        {"type": "document", "source": {"type": "url", "url": "https://a.example"}},
        File("application/pdf", url="https://a.example"),
    ),
    (
        "anthropic",
        {"type": "document", "source": {"type": "file", "file_id": "f"}},
        Text("[attached: document]"),
    ),
    ("anthropic", {"type": "document", "source": None}, Text("[attached: document]")),
    ("openai-chat", {"type": "input_audio", "input_audio": 7}, Text("[attached: input_audio]")),
]


@pytest.mark.parametrize(("form", "raw", "read"), CASES)
def test_an_attachment_is_read_or_replaced_by_its_name(
    form: str, raw: dict[str, Any], read: File | Text
) -> None:
    assert attachment_of(find_format(form), Part(PartKind.MEDIA, raw)) == read
