"""A user's attachments in each provider's form, or as text if a model cannot read them."""

from __future__ import annotations

import base64
import binascii

from midstream.history.codecs.codec_spec import Format, Media, Part, PartKind
from midstream.history.codecs.media import media_for
from midstream.history.messages import File

_IMAGES = {"image/png", "image/jpeg", "image/gif", "image/webp"}
"""Types that every model with images can read."""
_BY_ADDRESS = ("https://", "http://")


def file_part(form: Format, takes: str, file: File) -> Part | None:
    """Write an attachment for a format; None if it must be described as text.

    Args:
        form: The format.
        takes: The attachments that the profile accepts: `any`, `images` or `none`.
        file: The attachment. One without base64 and without a web address cannot be sent.
    """
    is_image = file.media_type.startswith("image/")
    if takes == "none" or (takes == "images" and not is_image) or not _is_whole(file, form):
        return None
    if is_image and file.data is not None and file.media_type not in _IMAGES:
        return None
    raw = form.spec.write_file(file) if form.spec.write_file else None
    if raw is not None:
        return Part(PartKind.MEDIA, raw, name="chunk", is_new=True)
    is_plain_media = is_image or (form.spec.takes_any_media and not file.media_type.startswith("text/"))
    return (
        media_for(form, Media(file.media_type, file.data, file.url, file.detail)) if is_plain_media else None
    )


def file_words(file: File) -> str:
    """Describe an attachment as text; a text file is included completely."""
    name = file.name or file.media_type
    if file.data is None:
        return f"[attached file: {name} at {file.url}]"
    if file.media_type.startswith("text/"):
        try:
            return f"[attached file: {name}]\n{base64.b64decode(file.data, validate=True).decode()}"
        except (binascii.Error, ValueError):
            return f"[attached file: {name}, which could not be read]"
    return f"[attached file: {name}, which you cannot be shown]"


def _is_whole(file: File, form: Format) -> bool:
    if file.data is None:
        return form.spec.takes_addresses and (file.url or "").startswith(_BY_ADDRESS)
    try:
        return bool(binascii.a2b_base64(file.data, strict_mode=True))
    except (binascii.Error, ValueError):
        return False
