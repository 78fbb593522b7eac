"""The console: a page that shows which pods hold a cluster's cards, and why a pod waits."""
