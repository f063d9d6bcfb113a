"""Who computes."""
