"""An OpenTelemetry collector, by OTLP over HTTP."""
