"""Provider formats, both ways: plain dicts in, plain dicts out, no SDK imported."""
