"""From the name a user gives to a folder that transformers loads.

A name is a local folder, a `.gguf` file, a catalogue name, or a hub id, tried in this order.
"""

from __future__ import annotations

import difflib
import hashlib
import shutil
from pathlib import Path

from filelock import FileLock

from ooospec.config import cache_dir, make_cache_dir
from ooospec.errors import CacheError, ModelNotFoundError
from ooospec.models.catalogue import CatalogueEntry, catalogue
from ooospec.models.convert import convert_gguf
from ooospec.models.fetch import fetch_gguf, hub_reachable
from ooospec.models.progress import Progress, Silent

ROOM_FACTOR = 5
"""Peak disk use of a catalogue model, in sizes of its GGUF file: parts, joined file, bfloat16 weights."""


def resolve_model(name: str, progress: Progress | None = None) -> Path:
    """Return a folder with the model's weights and tokenizer, fetching and converting what is missing.

    Two processes that ask at once wait for each other. Raises ModelNotFoundError or ChecksumError.
    """
    progress = progress or Silent()
    if not name.strip():
        raise ModelNotFoundError("The model name is empty; give a hub id, a folder, a .gguf file or an embedded name.")
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelNotFoundError(f"Folder {name!r} has no config.json; a transformers model folder is needed.")
        return path
    if path.suffix == ".gguf":
        return _local_gguf(path, progress)
    entry = catalogue().get(name.lower())
    if entry is not None:
        return _embedded(name.lower(), entry, progress)
    return _from_hub(name)


def converted_folder(name: str) -> Path:
    """Return where the converted weights of a catalogue model are, or will be."""
    return cache_dir() / "models" / name


def _embedded(name: str, entry: CatalogueEntry, progress: Progress) -> Path:
    folder = converted_folder(name)
    if folder.is_dir():
        return folder
    make_cache_dir("models")
    with FileLock(folder.with_name(name + ".lock")):
        if folder.is_dir():
            return folder
        if hub_reachable():
            return _from_hub(entry.hub)
        downloads = make_cache_dir("downloads", name)
        _check_room(downloads, entry)
        gguf = fetch_gguf(entry, downloads, progress)
        convert_gguf(gguf, folder, progress)
        gguf.unlink()
    return folder


def _check_room(downloads: Path, entry: CatalogueEntry) -> None:
    """Raise CacheError where the file and its bfloat16 copy will not fit."""
    here = sum(file.stat().st_size for file in downloads.rglob("*") if file.is_file())
    needed = ROOM_FACTOR * entry.bytes - here
    free = shutil.disk_usage(downloads).free
    if free < needed:
        raise CacheError(
            f"{entry.file} needs about {needed / 1e6:.0f} MB in {cache_dir()}, of which {free / 1e6:.0f} MB are free; "
            "make room or set OOOSPEC_CACHE to a folder on another disk."
        )


def _local_gguf(path: Path, progress: Progress) -> Path:
    if not path.is_file():
        raise ModelNotFoundError(f"No file {str(path)!r}; give the path of an existing .gguf file.")
    stat = path.stat()
    identity = hashlib.sha256(f"{path.resolve()}:{stat.st_size}:{stat.st_mtime_ns}".encode()).hexdigest()[:16]
    folder = cache_dir() / "models" / f"{path.stem}-{identity}"
    make_cache_dir("models")
    with FileLock(folder.with_name(folder.name + ".lock")):
        if not folder.is_dir():
            convert_gguf(path, folder, progress)
    return folder


def _from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    known = ", ".join(catalogue())
    close = difflib.get_close_matches(name, catalogue(), n=1)
    meant = f" Did you mean {close[0]!r}?" if close else ""
    missing = (
        f"Unknown model {name!r}.{meant} Allowed: a hub id such as Qwen/Qwen3-8B, a local folder, a .gguf file, or one "
        f"of the embedded models: {known}."
    )
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise ModelNotFoundError(missing)
    patterns = ["*.json", "*.safetensors", "*.jinja", "tokenizer*", "*.model", "*.txt"]
    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ModelNotFoundError(f"{missing} The hub said: {str(error).splitlines()[0][:200]}") from error
