"""Keeps one command: runs it, and ends all that it started, wherever that has gone.

Run as a program of its own: `python -I keeper.py LIFELINE OUTPUT COMMAND...`. It adopts what the
command leaves behind, so that neither a session of its own nor a parent that is gone takes a
process out of reach. It begins to end them when the command ends, or when LIFELINE, the read end of
a pipe, closes: whoever holds the other end waits no longer, or is dead. It writes an Ended as JSON.
"""

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

# seconds that processes have to end by themselves, and that the kernel has to end them
TERM_GRACE_S = 5.0
_KILL_GRACE_S = 10.0
_STEP_S = 0.05
# https://github.com/torvalds/linux/blob/master/include/uapi/linux/prctl.h
_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True, kw_only=True)
class Ended:
    """`returncode` is negative for a signal; None where the command could not start, and `why`.

    `cut`: it was ended, and did not end by itself. `left` processes still ran when it had; those in
    `stuck` obey no signal.
    """

    returncode: int | None
    why: str = ""
    cut: bool = False
    seconds: float = 0.0
    left: int = 0
    stuck: tuple[int, ...] = ()

    @classmethod
    def of(cls, fields: dict[str, Any]) -> "Ended":
        """The Ended that asdict() and JSON have made `fields` of."""
        return cls(**{**fields, "stuck": tuple(fields["stuck"])})


def keep(lifeline: int, output: Path, command: list[str]) -> Ended:
    """Run `command` to its end or to the lifeline's."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    started = time.monotonic()
    with output.open("ab") as file:
        try:
            child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            return Ended(returncode=None, why=error.strerror or str(error))
    while child.poll() is None and not select.select([lifeline], [], [], _STEP_S)[0]:
        pass
    seconds = time.monotonic() - started
    cut = child.returncode is None
    running = _running()
    _end()
    child.poll()
    return Ended(
        returncode=child.returncode,
        cut=cut,
        seconds=seconds,
        left=0 if cut else len(running),
        stuck=tuple(each.pid for each in _running()),
    )


def _end() -> None:
    """SIGTERM to every process once, then SIGKILL until there are none."""
    told: set[psutil.Process] = set()
    asked = time.monotonic()
    while (running := _running()) and time.monotonic() < asked + TERM_GRACE_S:
        for each in set(running) - told:
            _signal(each, signal.SIGTERM)
        told.update(running)
        time.sleep(_STEP_S)
    killed = time.monotonic()
    while (running := _running()) and time.monotonic() < killed + _KILL_GRACE_S:
        for each in running:
            _signal(each, signal.SIGKILL)
        time.sleep(_STEP_S)


def _signal(process: psutil.Process, number: signal.Signals) -> None:
    with contextlib.suppress(psutil.Error):
        process.send_signal(number)


def _running() -> list[psutil.Process]:
    """All below this process, without those that are only waiting to be asked how they ended."""
    return [each for each in psutil.Process().children(recursive=True) if _runs(each)]


def _runs(process: psutil.Process) -> bool:
    try:
        return process.status() not in {psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD}
    except psutil.Error:
        return False


def main() -> None:
    lifeline, output, *command = sys.argv[1:]
    # who ends this closes the lifeline first; a handler, for what is ignored a child inherits
    signal.signal(signal.SIGTERM, lambda _number, _frame: None)
    ended = keep(int(lifeline), Path(output), command)
    sys.stdout.write(json.dumps(asdict(ended)))
    sys.stdout.flush()
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


if __name__ == "__main__":
    main()
