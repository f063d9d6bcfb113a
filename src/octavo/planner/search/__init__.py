"""Many replays to answer one question: the largest rate, the cheapest fleet, what to change."""
