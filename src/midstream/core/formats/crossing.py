"""What crosses from one format to another besides words and calls: images and files, and thinking."""

from __future__ import annotations

from msgspec import Struct

from midstream.core.formats.parts import Json, Kind, Part, Value


class Media(Struct, frozen=True):
    """An attachment in nobody's shape: `data` is base64, or `url` says where it is."""

    media_type: str
    data: str | None = None
    url: str | None = None


def media_in(form: str, part: Part) -> Media | None:
    """Read an image or file of any format, or None where this one cannot be carried over."""
    raw = part.raw
    if not isinstance(raw, dict):
        return None
    if form == "anthropic":
        return _of_anthropic(raw)
    if form == "gemini":
        return _of_gemini(raw)
    if form == "bedrock":
        image = raw.get("image")
        data = image.get("source", {}).get("bytes") if isinstance(image, dict) else None
        return Media(f"image/{image['format']}", data=data) if isinstance(data, str) and image else None
    url = raw.get("image_url")
    if isinstance(url, dict):
        url = url.get("url")
    return _of_url(url) if isinstance(url, str) else None


def media_for(form: str, media: Media) -> Part | None:
    """Write an image for a format, or None where it has no place for it."""
    url = media.url or f"data:{media.media_type};base64,{media.data}"
    raw: Json | None = None
    if form == "anthropic" and media.media_type.startswith("image/"):
        source: Json = {"type": "url", "url": media.url}
        if media.data is not None:
            source = {"type": "base64", "media_type": media.media_type, "data": media.data}
        raw = {"type": "image", "source": source}
    elif form == "gemini":
        if media.data is not None:
            raw = {"inlineData": {"mimeType": media.media_type, "data": media.data}}
        else:
            raw = {"fileData": {"mimeType": media.media_type, "fileUri": media.url}}
    elif form in ("openai-chat", "mistral", "langchain") and media.media_type.startswith("image/"):
        raw = {"type": "image_url", "image_url": {"url": url}}
    elif form == "openai-responses" and media.media_type.startswith("image/"):
        raw = {"type": "input_image", "image_url": url, "detail": "auto"}
    return None if raw is None else Part(Kind.MEDIA, raw, name="chunk", is_new=True)


def thinking_for(form: str, source: str, part: Part) -> Part | None:
    """Write thinking for a format, or None where it would be refused: a signature is one provider's only."""
    words, signature = part.body, part.signature
    if not isinstance(words, str):
        return None
    raw: Json | None = None
    signers = ("anthropic", "bedrock")
    if form in signers:
        if source not in signers or not signature:
            return None
        raw = {"type": "thinking", "thinking": words, "signature": signature}
        if form == "bedrock":
            raw = {"reasoningContent": {"reasoningText": {"text": words, "signature": signature}}}
    elif form == "gemini":
        raw = {"text": words, "thought": True}
    elif form == "pydantic-ai":
        raw = {"content": words, "part_kind": "thinking"}
        if signature and source in signers:
            raw |= {"signature": signature, "provider_name": source}
    elif form == "langchain":
        raw = {"type": "thinking", "thinking": words}
        if signature:
            raw["signature"] = signature
    elif form != "openai-chat":
        return None
    return Part(Kind.THINKING, raw, body=words, signature=signature, is_new=True)


def _of_anthropic(raw: Json) -> Media | None:
    source = raw.get("source")
    if raw.get("type") != "image" or not isinstance(source, dict):
        return None
    if source.get("type") == "base64":
        return Media(source.get("media_type") or "image/png", data=source.get("data"))
    return Media("image/*", url=source.get("url")) if source.get("type") == "url" else None


def _of_gemini(raw: Json) -> Media | None:
    inline: Value = raw.get("inlineData") or raw.get("inline_data")
    if isinstance(inline, dict):
        return Media(inline.get("mimeType") or inline.get("mime_type") or "", data=inline.get("data"))
    filed: Value = raw.get("fileData") or raw.get("file_data")
    if isinstance(filed, dict):
        kind = filed.get("mimeType") or filed.get("mime_type") or ""
        return Media(kind, url=filed.get("fileUri") or filed.get("file_uri"))
    return None


def _of_url(url: str) -> Media:
    if url.startswith("data:") and ";base64," in url:
        kind, _, data = url.removeprefix("data:").partition(";base64,")
        return Media(kind, data=data)
    return Media("image/*", url=url)
