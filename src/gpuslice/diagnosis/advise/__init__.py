"""Better sizes of requests, and cards that could be emptied."""
