"""The model protocol, adapters of providers, and decoders of their streams."""
