"""Octavo: an LLM inference engine built around its KV cache. It serves, it explains, it plans."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from octavo.config import EngineConfig
from octavo.errors import OctavoError
from octavo.types import FinishReason, RequestError, SamplingParams

if TYPE_CHECKING:
    from octavo.kv.spec import KVSpec
    from octavo.llm import LLM

__version__ = "0.1.0"
__all__ = ["LLM", "EngineConfig", "FinishReason", "KVSpec", "OctavoError", "RequestError", "SamplingParams"]


def __getattr__(name: str) -> Any:
    """`LLM` needs torch and `KVSpec` does not: import them only when asked for."""
    if name == "LLM":
        from octavo.openmp import spin_shortly

        spin_shortly()
        from octavo.llm import LLM

        return LLM
    if name == "KVSpec":
        from octavo.kv.spec import KVSpec

        return KVSpec
    raise AttributeError(f"module 'octavo' has no attribute {name!r}")
