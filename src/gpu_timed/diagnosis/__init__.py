"""What is found out about an installation, as pure functions. Knows no runtime and no OpenTelemetry."""
