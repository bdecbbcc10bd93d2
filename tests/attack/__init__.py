"""Attacks against running servers. `make test` runs a short form of each; `make attack` runs all of them."""
