"""``gpuslice claims``: makes the ResourceClaimTemplates that rewritten pods refer to."""
