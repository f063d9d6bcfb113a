"""Files that a command will write, checked before it does anything else."""

from __future__ import annotations

import os
from pathlib import Path


def same(one: Path, other: Path) -> bool:
    """Whether both names are one file, by whatever way they lead there."""
    if os.path.realpath(one) == os.path.realpath(other):
        return True
    return os.path.exists(one) and os.path.exists(other) and os.path.samefile(one, other)


def make_folder(folder: Path, option: str) -> None:
    """Make a folder and those above it. Raises OctavoError naming `option`."""
    from octavo.errors import OctavoError

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OctavoError(
            f"{option} needs the folder {str(folder)!r}, which cannot be made ({error.strerror}); give another path."
        ) from error


def try_writing(path: Path, option: str) -> None:
    """Open the file as it will be written, changing nothing. Raises OctavoError naming `option`."""
    from octavo.errors import OctavoError

    new = not os.path.exists(path)
    try:
        path.open("ab").close()
    except OSError as error:
        raise OctavoError(
            f"{option} cannot be written to {str(path)!r} ({error.strerror}); give another name."
        ) from error
    if new:
        path.unlink()
