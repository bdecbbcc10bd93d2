"""Codecs of provider formats, one file each: plain values in and out, no SDK, no repair."""
