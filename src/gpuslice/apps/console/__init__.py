"""The console: a page that shows who has what of a cluster's cards, and why a pod waits."""
