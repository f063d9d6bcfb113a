"""The served model's tokenizer as files, for clients that count tokens: nothing may come from a hub."""

from __future__ import annotations

from pathlib import Path

from octavo.build import load_configured
from octavo.config import EngineConfig


def save_tokenizer(model: str, folder: Path) -> Path:
    """Write it into a folder in `folder`, as `transformers` reads it; returns the folder."""
    tokenizer = load_configured(EngineConfig(model)).tokenizer
    assert tokenizer is not None
    tokenizer.hf.save_pretrained(folder / "tokenizer")
    return folder / "tokenizer"
