"""What autoscalers are told: how many nodes to add, and which not to take away. Nothing else knows of it."""
