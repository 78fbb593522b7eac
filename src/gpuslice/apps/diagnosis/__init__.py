"""What is known of a cluster and its pods, worked out for what shows it: command line or console."""
