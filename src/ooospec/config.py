"""Where files are kept and which defaults the package uses."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs

from ooospec.errors import CacheError

DEFAULT_TARGET = "qwen2.5-coder-1.5b-instruct"
DEFAULT_SIDECAR = "qwen2.5-coder-0.5b-instruct"
DEFAULT_SIDECAR_WEIGHTS = 494_032_768
SMALLER = 2
"""On cores that target and sidecar share, waves of a sidecar that is not so many times smaller than the target take
longer than they save (docs/performance.md, entry 20)."""
AUTO = "auto"
"""As the name of a sidecar: the default one, where it pays; as that of an adapter: the one that ships; as that of a
dtype: what the device computes in."""
DEFAULT_MAX_NEW_TOKENS = 256


def default_sidecar_pays(target_weights: int) -> bool:
    """Tell whether the default sidecar pays on cores that it shares with a target of so many weights; 0 = unknown."""
    return not target_weights or target_weights >= SMALLER * DEFAULT_SIDECAR_WEIGHTS


def make_cache_dir(*parts: str) -> Path:
    """Make and return a folder inside the cache. Raises CacheError where that cannot be written."""
    folder = cache_dir().joinpath(*parts)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(13, "not writable", str(folder))
    except OSError as error:
        raise CacheError(
            f"Cannot use the cache folder {cache_dir()} ({error.strerror or error}); set OOOSPEC_CACHE to a folder "
            "that can be written."
        ) from error
    return folder


def cache_dir() -> Path:
    """Return the cache folder: `OOOSPEC_CACHE` if set, else the user's cache folder of this system."""
    chosen = os.environ.get("OOOSPEC_CACHE")
    return Path(chosen).expanduser() if chosen else Path(platformdirs.user_cache_dir("ooospec", appauthor=False))
