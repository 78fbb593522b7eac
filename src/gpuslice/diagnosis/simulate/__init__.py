"""What a cluster could hold with other nodes, more pods or another policy."""
