"""Detection of changes that other programs made in a store."""
