"""Finding and reading a model's config: file, directory, GGUF header, packaged model, catalogue name or hub id.

Nothing heavy is imported and nothing is downloaded except `config.json` of a hub id that is neither in the local
Hugging Face cache nor in the catalogue.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from octavo.models.errors import ModelError

PACKAGED = ("demo", "gemma3-270m")


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model config and what is known beside it.

    where         in words: which file or catalogue entry was read
    config        the parsed config.json, or a GGUF header under the same names
    names         field → its name in the original file, where that is not a config.json
    weight_bytes  measured bytes of the weights, with where they were measured, if the files are here
    parameters    published parameter count (catalogue)
    unverified    fields of the catalogue entry that come from memory or a secondary page
    """

    where: str
    config: Mapping[str, Any]
    names: Mapping[str, str] = field(default_factory=dict)
    weight_bytes: tuple[int, str] | None = None
    parameters: int | None = None
    unverified: tuple[str, ...] = ()


def find_source(model: str) -> ModelSource:
    """The config of `model`.

    Tried in this order: `demo` and other packaged models; an existing file or directory; the local Hugging Face
    cache; the shipped catalogue; the hub. Raises ModelError with what was tried and the nearest catalogue names.
    """
    if not model.strip():
        raise ModelError("The model name is empty: give a path, a hub id, a catalogue name or `demo`.")
    if model in PACKAGED:
        from octavo.models.demo import packaged_model

        packaged = packaged_model(model)
        if packaged is not None:
            return _from_gguf(packaged)
    path = Path(os.path.expanduser(model))
    if os.path.isdir(path):  # unlike Path.is_dir, no error for a name that is too long
        return _from_directory(path)
    if os.path.isfile(path):
        return _from_gguf(path) if _is_gguf(path) else _from_json(path)
    if model.startswith((".", "/", "~")) or path.suffix in (".json", ".gguf"):
        raise ModelError(f"There is no file or directory {model}.")
    return _from_name(model)


def _from_name(model: str) -> ModelSource:
    from octavo.planner.catalogue import find_model, similar_models

    is_hub_id = model.count("/") == 1
    cached = _cached_config(model) if is_hub_id else None
    if cached is not None:
        return _from_json(cached)
    entry = find_model(model)
    if entry is not None:
        return ModelSource(
            where=f"Octavo's catalogue, {entry.name}",
            config=entry.config,
            parameters=entry.parameters,
            unverified=entry.unverified,
        )
    if is_hub_id:
        return _from_hub(model)
    near = similar_models(model)
    hint = f"; did you mean {' or '.join(near)}?" if near else "."
    raise ModelError(f"{model} is neither a file, a directory, a hub id (owner/name) nor in the catalogue{hint}")


def _is_gguf(path: Path) -> bool:
    if path.suffix == ".gguf":
        return True
    try:
        with open(path, "rb") as file:
            return file.read(4) == b"GGUF"
    except OSError as error:
        raise ModelError(f"{path} cannot be opened ({error.strerror}): give a file that may be read.") from error


def _from_json(path: Path) -> ModelSource:
    try:
        config = json.loads(path.read_text(encoding="utf-8-sig"))  # a byte order mark is allowed
    except (OSError, ValueError, RecursionError) as error:  # ValueError: bytes, syntax, or a number of 5,000 digits
        raise ModelError(f"{path} is not a readable JSON file ({error}): correct it or download it again.") from error
    if not isinstance(config, dict):
        raise ModelError(f"{path} holds a JSON {type(config).__name__}; a model config is an object.")
    return ModelSource(where=str(path), config=config, weight_bytes=_safetensors_bytes(path.parent))


def _from_directory(path: Path) -> ModelSource:
    if (path / "config.json").is_file():
        return _from_json(path / "config.json")
    found = sorted(path.glob("*.gguf"))
    if len(found) == 1:
        return _from_gguf(found[0])
    what = "neither config.json nor a .gguf file" if not found else f"no config.json but {len(found)} .gguf files"
    raise ModelError(f"The directory {path} has {what}: name the file to read.")


def _from_gguf(path: Path) -> ModelSource:
    from octavo.models.gguf_config import config_from_gguf
    from octavo.models.gguf_header import read_header

    header = read_header(path)
    config, names = config_from_gguf(header)
    parts = header.metadata.get("split.count", 1)
    measured = (header.weight_bytes, f"tensors of {path.name}") if parts in (0, 1) else None
    return ModelSource(where=str(path), config=config, names=names, weight_bytes=measured)


def _safetensors_bytes(folder: Path) -> tuple[int, str] | None:
    """Bytes of the weights beside a config: the index's total, or the one file's header."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            total = json.loads(index.read_text(encoding="utf-8-sig"))["metadata"]["total_size"]
            if not 0 < total < 1 << 60:
                raise ValueError(total)
            return int(total), f"{index.name}, metadata.total_size"
        except (OSError, KeyError, TypeError, ValueError, RecursionError) as error:
            raise ModelError(
                f"{index} has no metadata.total_size that is a number of bytes: remove it or download it again."
            ) from error
    single = folder / "model.safetensors"
    if not single.is_file():
        return None
    with open(single, "rb") as file:
        head = file.read(8)
    size = single.stat().st_size - 8 - int.from_bytes(head, "little")
    if len(head) < 8 or size < 0:
        raise ModelError(f"{single} is a truncated safetensors file: download it again.")
    return size, f"tensors of {single.name}"


def _cached_config(repo: str) -> Path | None:
    """config.json of a hub id in the local Hugging Face cache, the revision of `main` first."""
    home = Path(os.environ.get("HF_HOME", Path.home() / ".cache" / "huggingface"))
    cache = Path(os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE") or home / "hub")
    folder = cache / f"models--{repo.replace('/', '--')}"
    main = folder / "refs" / "main"
    revisions = [main.read_text(errors="replace").strip()] if main.is_file() else []
    found = [folder / "snapshots" / revision / "config.json" for revision in revisions]
    found += sorted(folder.glob("snapshots/*/config.json"))
    return next((path for path in found if path.is_file()), None)


def _from_hub(repo: str) -> ModelSource:
    try:
        from huggingface_hub import hf_hub_download
    except ImportError:
        raise ModelError(
            f"{repo} is neither in the catalogue nor in the local Hugging Face cache, and huggingface_hub is not "
            "installed to fetch it: install it, or give the path of its config.json."
        ) from None
    try:
        return _from_json(Path(hf_hub_download(repo, "config.json")))
    except ModelError:
        raise
    except Exception as error:  # the client raises many kinds, from its own and from its HTTP library
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(f"config.json of {repo} could not be fetched from the hub: {first}") from error
