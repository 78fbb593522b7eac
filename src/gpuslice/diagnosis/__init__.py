"""What is known about a cluster and its pods, for the command line and the console."""
