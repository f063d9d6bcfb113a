"""Who owns which slot: pure integers, no tensors."""
