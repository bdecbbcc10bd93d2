"""Attacks against running servers. A short form of each is in `make test`; `make attack` plays all of it."""
