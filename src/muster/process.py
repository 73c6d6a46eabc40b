"""The one door to other programs: argv as a list, a time limit, and no process left behind."""

import contextlib
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

TERM_GRACE_S = 5.0
# Python warns of a Popen that is dropped while its program runs; a daemon is meant to run on
_daemons: list[subprocess.Popen[bytes]] = []


@dataclass(frozen=True)
class Completed:
    """A program that ended: `returncode` is negative for a signal, as in subprocess."""

    argv: tuple[str, ...]
    returncode: int
    output: str
    timed_out: bool
    seconds: float

    @property
    def ok(self) -> bool:
        return self.returncode == 0 and not self.timed_out

    @property
    def ending(self) -> str:
        """How it ended, in words: "exit code 1", "signal SIGKILL", "time limit"."""
        if self.timed_out:
            return "time limit"
        return ending(self.returncode)

    def last_lines(self, count: int = 15) -> list[str]:
        return [line for line in self.output.splitlines() if line.strip()][-count:]


def ending(returncode: int) -> str:
    """How a program ended: "exit code 1", "signal SIGKILL"; a real-time signal by its number."""
    if returncode >= 0:
        return f"exit code {returncode}"
    number = -returncode
    return f"signal {next((each.name for each in signal.Signals if each == number), number)}"


def run(
    argv: Sequence[str],
    *,
    limit_s: float | None = None,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    on_line: Callable[[str], None] | None = None,
) -> Completed:
    """Run `argv` to its end, standard error into standard output, each line also to `on_line`.

    At `limit_s` seconds, and when `on_line` or a signal raises, the program and all that it
    started are ended first. Raises FileNotFoundError when argv[0] is no program.
    """
    started = time.monotonic()
    lines: list[str] = []
    with start(argv, env=env, cwd=cwd) as child:
        timed_out = False
        try:
            for line in _lines_until(child, None if limit_s is None else started + limit_s):
                lines.append(line)
                if on_line is not None:
                    on_line(line)
            # it may go on with its output closed
            child.wait(None if limit_s is None else max(0.0, started + limit_s - time.monotonic()))
        except (TimeoutError, subprocess.TimeoutExpired):
            timed_out = True
            end(child)
        returncode = child.wait()
    return Completed(
        tuple(argv), returncode, "\n".join(lines), timed_out, time.monotonic() - started
    )


@contextlib.contextmanager
def start(
    argv: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    pass_fds: Sequence[int] = (),
    stdin: int = subprocess.DEVNULL,
    stderr: int = subprocess.STDOUT,
) -> Iterator[subprocess.Popen[bytes]]:
    """The program `argv` with its output on one pipe; ended, whatever happens, on leaving."""
    child = subprocess.Popen(
        argv,
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=stderr,
        env=None if env is None else dict(env),
        cwd=cwd,
        pass_fds=pass_fds,
        # a session of its own: Ctrl-C reaches us alone, and we end the child in order
        start_new_session=True,
    )
    try:
        yield child
    finally:
        end(child)
        for pipe in filter(None, (child.stdin, child.stdout, child.stderr)):
            pipe.close()


def spawn(argv: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    """A daemon that outlives this command, its output appended to `log`."""
    with log.open("ab") as output:
        daemon = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    _daemons.append(daemon)
    return daemon


def end(child: subprocess.Popen[bytes]) -> None:
    """End `child` and all that it started: SIGTERM, then SIGKILL after TERM_GRACE_S seconds."""
    if child.poll() is not None:
        # its group has its number for as long as one that it started lives there
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        return
    family = _family(child)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(TERM_GRACE_S)
    _kill(family)
    child.wait()


def kill(child: subprocess.Popen[bytes]) -> None:
    """End `child` and all that it started at once, as a machine does that loses its power."""
    _kill(_family(child))
    child.wait()


def _family(child: subprocess.Popen[bytes]) -> list[int]:
    # torchrun gives each rank a session of its own, so the process group is not enough
    return [child.pid, *_descendants(child.pid)]


def _kill(pids: Iterable[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def _lines_until(child: subprocess.Popen[bytes], deadline: float | None) -> Iterator[str]:
    """Lines of the child's output until it closes; TimeoutError at `deadline` (monotonic)."""
    found: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    threading.Thread(target=_read_into, args=(child, found), daemon=True).start()
    while True:
        remaining = None if deadline is None else max(0.0, deadline - time.monotonic())
        try:
            line = found.get(timeout=remaining)
        except queue.Empty:
            raise TimeoutError from None
        if line is None:
            return
        yield line


def _read_into(child: subprocess.Popen[bytes], found: "queue.SimpleQueue[str | None]") -> None:
    assert child.stdout is not None
    # a pipe that end() closed under us is the end of the output, not an error
    with contextlib.suppress(ValueError, OSError):
        for raw in child.stdout:
            found.put(raw.decode(errors="replace").rstrip("\r\n"))
    found.put(None)


def _descendants(pid: int) -> list[int]:
    """Every process below `pid`, from /proc; none where there is no /proc."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # the name in parentheses may hold spaces: the parent is the 2nd field after it
            parent = int(stat.read_text(errors="replace").rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(stat.parent.name))
    below: list[int] = []
    waiting = [pid]
    while waiting:
        waiting.extend(young := children.get(waiting.pop(), []))
        below.extend(young)
    return below
