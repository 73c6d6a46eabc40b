"""One run of a command: with a limit, its output in a file, and nothing left of it."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from muster import process
from muster.bisect import keeper
from muster.bisect.keeper import Ended
from muster.errors import CommandNotStarted
from muster.explain.lines import Part

OUTPUT = "output.log"


@dataclass(frozen=True)
class Run:
    """How it ended, and what of its logs was written before it was told to end, where it was.

    What comes after that is of our own doing: torchrun, for one, writes that it was preempted.
    """

    ended: Ended
    log: tuple[Part, ...]


def run(command: Sequence[str], environ: Mapping[str, str], folder: Path, limit_s: float) -> Run:
    """Run `command` with `environ`, both its streams into a file of `folder`.

    At `limit_s` seconds, on a signal, and when this process dies, all that it started is ended.
    Raises CommandNotStarted.
    """
    reading, writing = map(os.fdopen, os.pipe(), ("rb", "wb"))
    argv = [sys.executable, "-I", keeper.__file__, str(reading.fileno()), str(folder / OUTPUT)]
    until: tuple[Part, ...] = ()
    with (
        reading,
        writing,
        process.start([*argv, *command], env=environ, pass_fds=[reading.fileno()]) as keeping,
    ):
        try:
            keeping.wait(limit_s)
        except subprocess.TimeoutExpired:
            until = tuple(Part(path, 0, path.stat().st_size) for path in sorted(folder.iterdir()))
        finally:
            writing.close()
            keeping.wait()
        assert keeping.stdout is not None
        said = keeping.stdout.read()
    ended = Ended.of(json.loads(said))
    if ended.why:
        raise CommandNotStarted(command[0], ended.why)
    return Run(ended, until if ended.cut else tuple(map(Part, sorted(folder.iterdir()))))


def ending(ended: Ended, limit_s: float) -> str:
    """How it ended, in words: "exit code 1", "signal SIGSEGV", "not done after 120 s"."""
    if ended.cut:
        return f"not done after {limit_s:g} s"
    assert ended.returncode is not None
    return process.ending(ended.returncode)
