"""Outputs that must not change by a byte."""
