"""What OpenTelemetry decides when a span is entered: parent, sampling, ids."""
