"""The processes: one main.py each that wires everything and starts named tasks."""
