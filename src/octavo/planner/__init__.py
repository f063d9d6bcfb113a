"""Catalogues, traces and replay: what would happen on another device, with other traffic, under other settings."""
