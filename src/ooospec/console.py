"""What the command line shares: progress bars, and errors as one line with exit code 2."""

from __future__ import annotations

import contextlib
import errno
import functools
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any, ParamSpec

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from ooospec.errors import OooSpecError, UsageError

if TYPE_CHECKING:
    from ooospec.placement import Placement
    from ooospec.runtime import Decoder

P = ParamSpec("P")

Target = Annotated[str, typer.Option(help="Target: hub id, local folder, .gguf file or embedded name.")]
Sidecar = Annotated[
    str,
    typer.Option(
        help="Sidecar: hub id, folder, .gguf file, embedded name, auto = the default one where it pays, none, tcp://HOST:PORT."
    ),
]
Adapter = Annotated[
    str, typer.Option(help="Trained adapter for the sidecar: auto = the one that ships for it, none, or a folder.")
]
Dtype = Annotated[
    str, typer.Option(help="auto = bfloat16 where the device computes in it; bfloat16, float16, float32.")
]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, mps; default: the best there is.")]
PlacementName = Annotated[str, typer.Option(help="shared: all cores for everything; split: half of them each.")]

SOURCE_COLOURS = {
    "hint": "green3", "schema": "deep_sky_blue1", "retrieval": "medium_purple1", "recycling": "orange3",
    "lookup": "gold1", "target": "grey62",
}  # fmt: skip
"""Colour of a committed token by where it came from."""


class ProgressBars:
    """Draws one bar per kind of work on standard error."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._tasks: dict[str, TaskID] = {}

    def update(self, what: str, done: float, total: float, note: str = "") -> None:
        """Show that `done` of `total` units of `what` are finished."""
        if what not in self._tasks:
            self._tasks[what] = self._progress.add_task(what, total=total)
        self._progress.update(self._tasks[what], completed=done, description=f"{what} {note}".rstrip())


@contextlib.contextmanager
def progress_bars() -> Iterator[ProgressBars]:
    """Draw progress while the block runs."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=False) as progress:
        yield ProgressBars(progress)


@contextlib.contextmanager
def _insistent_interrupt() -> Iterator[None]:
    """Raise KeyboardInterrupt again every second after Ctrl-C until it gets through.

    One that lands in a finalizer (`__del__` of some library, while models load) is swallowed by Python.
    """
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 1.0)
        raise KeyboardInterrupt

    before = [(number, signal.signal(number, interrupt)) for number in (signal.SIGINT, signal.SIGALRM)]
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        for number, handler in before:
            signal.signal(number, handler)


def clean_errors(command: Callable[P, None]) -> Callable[P, None]:
    """Turn the package's errors, and those of files and disks, into one line on standard error and exit code 2."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            with _insistent_interrupt():
                command(*args, **kwargs)
        except (OooSpecError, OSError) as error:
            sys.stderr.write(f"ooospec: {_told(error)}\n")
            raise typer.Exit(2) from None
        except KeyboardInterrupt:
            sys.stderr.write("ooospec: interrupted\n")
            raise typer.Exit(130) from None

    return run


def _told(error: OooSpecError | OSError) -> str:
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        place = f" for {error.filename}" if error.filename else ""
        return f"no space left on the disk{place}; make room, then start the command again"
    return str(error)


def read_placement(name: str) -> Placement:
    """Return the placement of that name. Raises UsageError."""
    from ooospec.placement import Placement

    makers = {"shared": Placement.shared, "split": Placement.split}
    if name not in makers:
        raise UsageError(f"Unknown placement {name!r}; choose one of {', '.join(makers)}.")
    return makers[name]()


def open_decoder(target: str, sidecar: str, **options: Any) -> Decoder:
    """Load the models with progress bars; `sidecar` none = without one. Raises OooSpecError."""
    from ooospec.runtime import Decoder

    options["placement"] = read_placement(options.pop("placement", "shared"))
    with progress_bars() as progress:
        decoder = Decoder(target, None if sidecar == "none" else sidecar, progress=progress, **options)
    if decoder.left_out:
        sys.stderr.write(f"{decoder.left_out}\n")
    return decoder
