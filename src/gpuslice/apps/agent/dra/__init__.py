"""Dynamic resource allocation: the agent as the driver of a node whose cards are given out by claims."""
