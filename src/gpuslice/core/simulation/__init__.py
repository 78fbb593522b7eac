"""What would happen: traces of pods played against a cluster and a policy, and how much room is left."""
