"""Dashboards, alerts and autoscaling rules, made from the exporter's metric catalogue."""
