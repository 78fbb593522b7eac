"""The exporter: what each card and each container uses, for Prometheus."""
