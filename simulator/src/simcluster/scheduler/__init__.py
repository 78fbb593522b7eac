"""kube-scheduler's loop: the real order, the real failure handling, the real words, over real HTTP."""
