"""Conversion of a client application's attachments; a mere reference to a file becomes text."""

from __future__ import annotations

import base64

from midstream.history.codecs.codec_spec import Format, Json, Part, Value, as_words
from midstream.history.codecs.media import media_in
from midstream.history.messages import File, Text, UserPart

_AUDIO = {"wav": "audio/wav", "mp3": "audio/mpeg"}
_PDF = "application/pdf"


def attachment_of(form: Format, part: Part) -> UserPart:
    """Convert an attachment of a format; one that cannot be converted becomes text."""
    raw: Json = part.raw if isinstance(part.raw, dict) else {}
    found = media_in(form, part)
    if found is not None and (found.data or found.url):
        return File(found.media_type, data=found.data, url=found.url, detail=found.detail)
    kind = raw.get("type")
    filed = _of_audio(raw) if kind == "input_audio" else _of_document(raw) if kind == "document" else None
    return filed or _of_file(raw) or Text(f"[attached: {_name_of(raw) or kind or 'a file'}]")


def _of_audio(raw: Json) -> UserPart | None:
    audio = raw.get("input_audio")
    if not isinstance(audio, dict) or not isinstance(audio.get("data"), str):
        return None
    return File(_AUDIO.get(str(audio.get("format")), "audio/wav"), data=audio["data"])


def _of_file(raw: Json) -> UserPart | None:
    """Convert a file of OpenAI's formats, with its fields in a nested object or next to the type."""
    inner = raw.get("file")
    fields: Json = inner if isinstance(inner, dict) else raw
    name = _text(fields.get("filename"))
    if address := _text(fields.get("file_url")):
        return File(_PDF, url=address, name=name)
    written = _text(fields.get("file_data"))
    if not written:
        return None
    head, comma, data = written.partition(";base64,")
    if not comma:
        return File(_PDF, data=written, name=name)
    return File(head.removeprefix("data:"), data=data, name=name)


def _of_document(raw: Json) -> UserPart | None:
    source = raw.get("source")
    if not isinstance(source, dict):
        return None
    title, kind = _text(raw.get("title")), source.get("type")
    media_type = _text(source.get("media_type")) or _PDF
    if kind == "base64" and (data := _text(source.get("data"))):
        return File(media_type, data=data, name=title)
    if kind == "url" and (address := _text(source.get("url"))):
        return File(_PDF, url=address, name=title)
    words = as_words(source.get("data") if kind == "text" else source.get("content"))
    if kind not in ("text", "content") or not words:
        return None
    return File("text/plain", data=base64.b64encode(words.encode("utf-8", "replace")).decode(), name=title)


def _name_of(raw: Json) -> str:
    inner: Value = raw.get("file") if isinstance(raw.get("file"), dict) else raw
    return _text(inner.get("filename")) or _text(inner.get("file_id")) or ""


def _text(value: Value) -> str | None:
    return value if isinstance(value, str) and value else None
