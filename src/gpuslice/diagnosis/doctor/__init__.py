"""What is wrong with a cluster: facts, checks from facts to findings, and findings that say the same."""
