"""The limit on open files: raised at the start of every process that holds connections."""

from __future__ import annotations

import resource
import sys
from contextlib import suppress


def raise_file_limit() -> int:
    """Raise the soft limit on this process's open files to the hard one; children started later inherit it.

    Returns:
        The soft limit in force afterwards (files); `sys.maxsize` where there is none.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(ValueError, OSError):  # the system refuses it: keep the present limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft
