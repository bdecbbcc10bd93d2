"""Protection of any store against other programs that can write into it."""
