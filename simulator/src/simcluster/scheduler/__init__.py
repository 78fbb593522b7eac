"""kube-scheduler's loop: its real order, failure handling and messages, over real HTTP."""
