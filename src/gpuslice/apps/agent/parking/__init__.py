"""Parking: the memory of idle holders is lent, and is theirs again once they use it."""
