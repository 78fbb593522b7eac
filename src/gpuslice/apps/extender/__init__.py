"""kube-scheduler's extender: which nodes can hold a pod, which cards it gets, and the binding."""
