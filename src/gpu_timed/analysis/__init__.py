"""Pure functions over what was measured: no torch, no GPU, no OpenTelemetry."""
