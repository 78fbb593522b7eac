"""Dashboards, alerts and autoscaling rules, generated from the exporter's metric catalogue."""
