"""A known load on a card."""
