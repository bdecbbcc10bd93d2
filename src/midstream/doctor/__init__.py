"""The doctor: finds histories on disk, lists what a provider would refuse in them, and writes repaired copies."""
