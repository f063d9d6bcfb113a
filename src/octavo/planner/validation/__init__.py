"""Measured runs and points of real engines, and how far off the planner is."""
