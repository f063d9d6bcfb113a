"""Which limit bound, second by second and request by request: from a decision log or a replay report."""
