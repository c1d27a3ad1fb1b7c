"""Where files are kept and which defaults the package uses."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs

DEFAULT_TARGET = "qwen2.5-coder-1.5b-instruct"
DEFAULT_SIDECAR = "qwen2.5-coder-0.5b-instruct"
DEFAULT_MAX_NEW_TOKENS = 256


def cache_dir() -> Path:
    """Return the cache folder: `OOOSPEC_CACHE` if set, else the user's cache folder of this system."""
    chosen = os.environ.get("OOOSPEC_CACHE")
    return Path(chosen).expanduser() if chosen else Path(platformdirs.user_cache_dir("ooospec", appauthor=False))
