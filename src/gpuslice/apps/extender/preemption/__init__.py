"""Pods of lower priority evicted so that one of higher priority gets a card."""
