"""Check that this process may read a checkpoint's files, with an error that says how to fix it."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from medha.errors import CheckpointInvalid


def require_readable(path: Path) -> None:
    """Raise an error if the file exists and this process's user may not read it.

    Libraries that open such a file report it as missing. Any other fault of it is left to its reader.

    Raises:
        CheckpointInvalid: permission is denied; the text has the user, the path at fault and a command to run.
    """
    try:
        path.open("rb").close()
    except PermissionError as error:
        denies = _denying(path)
        found = denies.stat()
        raise CheckpointInvalid(
            f"{path}: cannot be read by uid {os.geteuid()}: {denies} has mode {stat.S_IMODE(found.st_mode):04o} and "
            f"belongs to uid {found.st_uid}; where the model is kept, run: chmod -R a+rX {path.parent}"
        ) from error
    except OSError:
        return


def _denying(path: Path) -> Path:
    """Return the outermost folder of `path` that this user may not enter, or `path` itself."""
    for folder in reversed(path.parents):
        if not os.access(folder, os.X_OK, effective_ids=True):
            return folder
    return path
