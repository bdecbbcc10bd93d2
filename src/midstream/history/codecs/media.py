"""Conversion between formats, except for text and calls: images, files and thinking."""

from __future__ import annotations

from midstream.history.codecs.codec_spec import Format, Json, Media, Part, PartKind

_DEFAULT_DETAIL = "auto"
"""The default of an image's `detail`."""


def media_in(form: Format, part: Part) -> Media | None:
    """Read an image or file of any format; None if it cannot be converted."""
    raw = part.raw
    return (form.spec.read_media or _of_url)(raw) if isinstance(raw, dict) else None


def media_for(form: Format, media: Media) -> Part | None:
    """Write an image for a format; None if it has no place for it."""
    raw = form.spec.write_media(media) if form.spec.write_media else None
    return None if raw is None else Part(PartKind.MEDIA, raw, name="chunk", is_new=True)


def thinking_for(form: Format, signer: str, part: Part) -> Part | None:
    """Write thinking for a format; None if it would be refused, because a signature is valid only for one provider.

    Args:
        form: The format.
        signer: The format of the provider that signed it; empty if signatures are not passed on.
        part: The thinking.
    """
    words, signature = part.body, part.signature
    if not isinstance(words, str):
        return None
    if form.spec.reasoning == "written":
        return Part(PartKind.THINKING, None, body=words, signature=signature, is_new=True)
    write = form.spec.write_thought
    if write is None or (form.spec.signs_thinking and not (signer and signature)):
        return None
    raw = write(words, signature, signer)
    return Part(PartKind.THINKING, raw, body=words, signature=signature, is_new=True)


def _of_url(raw: Json) -> Media | None:
    url = raw.get("image_url")
    detail = raw.get("detail")
    if isinstance(url, dict):
        detail = url.get("detail")
        url = url.get("url")
    if not isinstance(detail, str) or detail == _DEFAULT_DETAIL:
        detail = None
    if not isinstance(url, str):
        return None
    if url.startswith("data:") and ";base64," in url:
        kind, _, data = url.removeprefix("data:").partition(";base64,")
        return Media(kind, data=data, detail=detail)
    return Media("image/*", url=url, detail=detail)
