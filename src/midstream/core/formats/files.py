"""A user's attachments in each provider's form, or in words where a model cannot be shown them."""

from __future__ import annotations

import base64
import binascii

from midstream.core.formats.crossing import Media, media_for
from midstream.core.formats.parts import Json, Kind, Part, Value
from midstream.core.messages import File

_IMAGES = {"image/png", "image/jpeg", "image/gif", "image/webp"}
"""What everybody who looks at images can read."""
_AUDIO_FORMATS = {"audio/wav": "wav", "audio/x-wav": "wav", "audio/mpeg": "mp3", "audio/mp3": "mp3"}
_PDF = "application/pdf"
_BY_ADDRESS = ("https://", "http://")
_NO_ADDRESSES = {"gemini", "bedrock"}
"""Formats that take no attachment by its address."""


def file_part(form: str, takes: str, file: File) -> Part | None:
    """Write an attachment for a format, or None where it must be told in words.

    Args:
        form: The name of the format.
        takes: What the profile is shown as it is: `any`, `images` or `none`.
        file: The attachment. One that holds no base64 and no web address can be shown to nobody.
    """
    is_image = file.media_type.startswith("image/")
    if takes == "none" or (takes == "images" and not is_image) or not _is_whole(file, form):
        return None
    if is_image and file.data is not None and file.media_type not in _IMAGES:
        return None
    raw = _raw_of(form, file)
    if raw is not None:
        return Part(Kind.MEDIA, raw, name="chunk", is_new=True)
    is_plain_media = is_image or (form == "gemini" and not file.media_type.startswith("text/"))
    return media_for(form, Media(file.media_type, file.data, file.url)) if is_plain_media else None


def file_words(file: File) -> str:
    """Tell of an attachment in words; one that is text is told whole."""
    name = file.name or file.media_type
    if file.data is None:
        return f"[attached file: {name} at {file.url}]"
    if file.media_type.startswith("text/"):
        try:
            return f"[attached file: {name}]\n{base64.b64decode(file.data, validate=True).decode()}"
        except (binascii.Error, ValueError):
            return f"[attached file: {name}, which could not be read]"
    return f"[attached file: {name}, which you cannot be shown]"


def _is_whole(file: File, form: str) -> bool:
    if file.data is None:
        return form not in _NO_ADDRESSES and (file.url or "").startswith(_BY_ADDRESS)
    try:
        return bool(binascii.a2b_base64(file.data, strict_mode=True))
    except (binascii.Error, ValueError):
        return False


def _raw_of(form: str, file: File) -> Json | None:
    """Write what is more than an image by the common rules."""
    kind, _, ending = file.media_type.partition("/")
    ending = ending.partition(";")[0]
    data_url = f"data:{file.media_type};base64,{file.data}"
    if form == "pydantic-ai":
        return _pydantic_ai(file, kind)
    if form == "openai-chat" and file.data is not None and kind != "image":
        if file.media_type in _AUDIO_FORMATS:
            audio = {"data": file.data, "format": _AUDIO_FORMATS[file.media_type]}
            return {"type": "input_audio", "input_audio": audio}
        named = {"filename": file.name or f"attachment.{ending}", "file_data": data_url}
        return {"type": "file", "file": named}
    if form == "openai-responses" and file.media_type == _PDF:
        if file.data is None:
            return {"type": "input_file", "file_url": file.url}
        return {"type": "input_file", "filename": file.name or "attachment.pdf", "file_data": data_url}
    if form == "anthropic" and file.media_type == _PDF:
        source: Json = {"type": "url", "url": file.url}
        if file.data is not None:
            source = {"type": "base64", "media_type": _PDF, "data": file.data}
        return {"type": "document", "source": source}
    if form == "bedrock" and kind == "image":
        return {"image": {"format": ending, "source": {"bytes": file.data}}}
    return None


def _pydantic_ai(file: File, kind: str) -> Json:
    if file.data is not None:
        # pydantic-ai reads its own base64, which has another alphabet
        data = file.data.replace("+", "-").replace("/", "_")
        return {"kind": "binary", "data": data, "media_type": file.media_type}
    kinds = {"image": "image-url", "audio": "audio-url", "video": "video-url"}
    value: Value = kinds.get(kind, "document-url")
    return {"kind": value, "url": file.url, "media_type": file.media_type}
