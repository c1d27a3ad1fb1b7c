"""Start, watch and end a sidecar process of one's own."""

from __future__ import annotations

import atexit
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ooospec.errors import SidecarError

READY = "ooospec-sidecar listening on "
START_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class SidecarSpec:
    """How to run a sidecar."""

    path: Path
    name: str
    adapter: str | None = None
    dtype: str = "auto"
    device: str | None = None
    threads: int = 1
    cores: tuple[int, ...] = ()

    def arguments(self) -> list[str]:
        """Build the command line."""
        command = [sys.executable, "-m", "ooospec.sidecar.server", "--supervised"]
        command += [
            "--path",
            str(self.path),
            "--name",
            self.name,
            "--dtype",
            self.dtype,
            "--threads",
            str(self.threads),
        ]
        for flag, value in (("--adapter", self.adapter), ("--device", self.device)):
            command += [flag, value] if value else []
        return command + (["--cores", ",".join(map(str, self.cores))] if self.cores else [])


class SidecarProcess:
    """A sidecar that lives no longer than this process: it ends when its standard input closes."""

    def __init__(self, spec: SidecarSpec, command: Sequence[str] | None = None) -> None:
        """Start the process and wait until it listens (its model may still be loading). Raises SidecarError."""
        self.spec = spec
        self._command = list(command) if command is not None else spec.arguments()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  # lives as long as this object
        self._process: subprocess.Popen[bytes] | None = None
        self._printed = b""
        self.address = ""
        atexit.register(self.stop)
        self.start()
        if not self.listening(START_TIMEOUT_S):
            words = self.last_words()
            self.stop()
            raise SidecarError(f"The sidecar did not start. Its last words: {words}")

    def start(self) -> None:
        """End the process, if it runs, and start a new one without waiting for it."""
        self._end()
        self._printed, self.address = b"", ""
        # passive waiting: idle OpenMP threads must not spin on cores that the target uses
        environment = {**os.environ, "OMP_NUM_THREADS": str(self.spec.threads), "OMP_WAIT_POLICY": "passive"}
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, env=environment,
            start_new_session=True,
        )  # fmt: skip

    def listening(self, timeout_s: float = 0.0) -> bool:
        """Tell whether the process has said where it listens, waiting for that at most `timeout_s`."""
        end = time.monotonic() + timeout_s
        while not self.address and self._process is not None and self._process.stdout is not None:
            ready, _, _ = select.select([self._process.stdout], [], [], max(0.0, end - time.monotonic()))
            data = os.read(self._process.stdout.fileno(), 4096) if ready else b""
            if not data:
                break
            self._printed += data
            for line in self._printed.decode(errors="replace").split("\n")[:-1]:
                if line.startswith(READY):
                    self.address = line.removeprefix(READY).strip()
        return bool(self.address)

    @property
    def pid(self) -> int:
        """Process id, or 0 when it does not run."""
        return self._process.pid if self._process is not None else 0

    def alive(self) -> bool:
        """Tell whether the process runs."""
        return self._process is not None and self._process.poll() is None

    def last_words(self) -> str:
        """Return the end of what the process wrote to standard error."""
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return lines[-1][-300:] if lines else "(nothing)"

    def stop(self) -> None:
        """End the process for good."""
        self._end()
        self._log.close()
        atexit.unregister(self.stop)

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
        if process.poll() is None:
            process.kill()
        process.wait()
