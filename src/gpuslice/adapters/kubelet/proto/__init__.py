"""Messages generated from the .proto files beside them; `generate.py` makes them again."""
