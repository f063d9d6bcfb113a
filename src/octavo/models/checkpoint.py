"""The tensors of a checkpoint directory: safetensors files, mapped and read on demand."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

_PREFIXES = ("", "language_model.", "model.language_model.")  # where multimodal checkpoints keep their decoder


class Checkpoint:
    """Use as a context manager. Reading errors are the safetensors library's."""

    def __init__(self, path: Path) -> None:
        from safetensors import safe_open

        self._stack = ExitStack()
        self._files: dict[str, Any] = {}
        for file in sorted(path.glob("*.safetensors")):
            opened = self._stack.enter_context(safe_open(str(file), framework="pt"))
            self._files.update(dict.fromkeys(opened.keys(), opened))

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    @property
    def dtype(self) -> torch.dtype:
        """That of the first floating-point tensor, as transformers' `auto` takes it."""
        tensors = (file.get_tensor(name) for name, file in self._files.items())
        return next((t.dtype for t in tensors if t.is_floating_point()), torch.float32)

    def tensor(self, name: str) -> torch.Tensor | None:
        """The tensor of this name, also under the prefixes of multimodal models; None if there is none."""
        for prefix in _PREFIXES:
            full = prefix + (name.removeprefix("model.") if prefix.startswith("model.") else name)
            if full in self._files:
                found: torch.Tensor = self._files[full].get_tensor(full)
                return found
        return None
