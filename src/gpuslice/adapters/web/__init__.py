"""HTTP serving, metrics exposition and logs of the processes."""
