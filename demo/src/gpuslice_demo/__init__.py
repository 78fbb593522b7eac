"""The whole product on a simulated edge, in one command: the demo."""
