"""One outside thing each; adapters do not import each other."""
