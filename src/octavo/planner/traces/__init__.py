"""Traces: recorded or synthetic traffic, from many formats into one."""

from octavo.planner.traces.api import BadLine, Trace, TraceError, TraceRequest

__all__ = ["BadLine", "Trace", "TraceError", "TraceRequest", "open_trace"]


def __getattr__(name: str) -> object:
    """`open_trace`, when it is asked for: it brings all readers with it, and numpy."""
    if name != "open_trace":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from octavo.planner.traces.opening import open_trace

    return open_trace
