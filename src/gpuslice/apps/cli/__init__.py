"""The command line. Each command is imported only when it is called, so that the program starts fast."""
