"""The doctor: finds histories on disk, says what a provider would refuse in them, and writes repaired copies."""
