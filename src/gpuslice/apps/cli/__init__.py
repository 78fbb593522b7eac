"""The command line: what people type. It starts at once, so each command is imported when it is called."""
