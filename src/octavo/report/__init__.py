"""What happened in a run, as records, tables, JSON and one self-contained page."""
