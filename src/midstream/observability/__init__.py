"""OpenTelemetry, Prometheus, debug output."""
