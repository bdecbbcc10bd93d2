"""Provider shapes, one file each: plain values in, plain values out, no SDK, nothing repaired."""
