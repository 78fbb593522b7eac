"""The JSON of kube-scheduler's extender calls and of admission reviews."""
