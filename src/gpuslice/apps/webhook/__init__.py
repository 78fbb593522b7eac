"""The admission webhook: pods are checked and completed before they are stored."""
