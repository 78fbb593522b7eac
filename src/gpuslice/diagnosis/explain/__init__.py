"""Why a pod waits, or is where it is: what is read for that, what follows from it, and how it is told."""
