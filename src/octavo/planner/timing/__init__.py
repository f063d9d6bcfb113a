"""Where the times of a step come from: fits to published kernel times, calibrations, and how they are made."""
