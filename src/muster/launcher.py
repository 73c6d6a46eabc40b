"""PID 1 of a training pod: starts torchrun's agent, passes signals on, tells how it ended.

    python -m muster.launcher --nnodes=4 --nproc-per-node=8 --rdzv-id=demo --rdzv-backend=c10d \
        --rdzv-endpoint=demo-0.demo.default.svc.cluster.local:29400 train.py

It takes torchrun's arguments, the same in every pod; what differs from pod to pod comes from
JOB_COMPLETION_INDEX, which Kubernetes sets in an Indexed Job. Its exit statuses: launch.ExitStatus.
"""

import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from muster import launch
from muster.errors import NoCompletionIndex, NoRendezvous, NoScript, WrongInput
from muster.launch import CommandLine, ExitStatus
from muster.topology import NodeRange

AGENT = (sys.executable, "-m", "muster.agent")
PASSED_ON = {
    *(signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT),
    *(signal.SIGUSR1, signal.SIGUSR2),
}
_AWAITED = {*PASSED_ON, signal.SIGCHLD}
# An agent that has not ended this long after its workers were killed hangs in torch's store, where
# it takes no signal. The pod's grace period is longer still.
LAST_WAIT_S = 15
_DIGITS = re.compile(r"[0-9]{1,9}")


def main(arguments: Sequence[str], agent: Sequence[str] = AGENT) -> int:
    # From here on signals wait to be asked for: none is lost, and none comes at a bad moment. The
    # kernel drops what PID 1 neither blocks nor handles.
    signal.pthread_sigmask(signal.SIG_BLOCK, _AWAITED)
    try:
        index, nodes = _node(CommandLine.read(arguments), os.environ)
        argv = [*agent, *launch.for_index(arguments, index)]
    except WrongInput as error:
        sys.stderr.write(f"muster: {error}\n")
        return ExitStatus.USAGE
    if number := _signal_within(launch.start_delay_s(index, nodes.most), PASSED_ON):
        return _ended(ExitStatus.PREEMPTED, f"{number.name} came before the start")
    environment = {**launch.ENVIRONMENT, **os.environ, **writable_cache(os.environ)}
    return _run(argv, environment, _shutdown_timeout_s(arguments, os.environ))


# ---- what it was given ---------------------------------------------------------------------------


def _node(line: CommandLine, environment: Mapping[str, str]) -> tuple[int, NodeRange]:
    """This node's index, and the nodes; all that is sure to fail fails here, before the start."""
    nnodes = line.value("nnodes")
    if nnodes is None:
        raise NoRendezvous("--nnodes", "there is none")
    nodes = NodeRange.parse("--nnodes", nnodes)
    backend = line.value("rdzv-backend")
    if backend != "c10d":
        raise NoRendezvous("--rdzv-backend=c10d", f"it is {backend!r}")
    index = environment.get("JOB_COMPLETION_INDEX", "")
    if not index:
        raise NoCompletionIndex("not set", str(nodes))
    if not _DIGITS.fullmatch(index) or int(index) >= nodes.most:
        raise NoCompletionIndex(repr(index), str(nodes))
    if line.command and not line.has("m", "module", "no-python"):
        script = line.command[0]
        if not Path(script).exists():
            raise NoScript(script, str(Path.cwd()))
    return int(index), nodes


def writable_cache(environment: Mapping[str, str]) -> dict[str, str]:
    """Where triton may write: a copy of its cache, where a pod's read-only root holds the cache.

    What the image has in it is needed: without it torch.compile would ask for a C compiler.
    """
    cache = environment.get("TRITON_CACHE_DIR")
    if cache is None or not Path(cache).is_dir() or os.access(cache, os.W_OK):
        return {}
    copy = Path(tempfile.gettempdir()) / "triton"
    shutil.copytree(cache, copy, dirs_exist_ok=True)
    return {"TRITON_CACHE_DIR": str(copy)}


def _shutdown_timeout_s(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    # what is no number is torchrun's to refuse
    flag = CommandLine.read(arguments).value("shutdown-timeout")
    text = flag or environment.get(launch.SHUTDOWN_VARIABLE, "")
    return int(text) if _DIGITS.fullmatch(text) else launch.SHUTDOWN_TIMEOUT_S


# ---- the agent -----------------------------------------------------------------------------------


def _run(argv: list[str], environment: Mapping[str, str], shutdown_timeout_s: int) -> int:
    """Start the agent and stay until it has ended; the exit status that tells how."""
    # A group of its own: Ctrl-C on a terminal comes to us alone, and goes on once.
    agent = os.posix_spawn(argv[0], argv, environment, setpgroup=0, setsigmask=())
    first: signal.Signals | None = None
    deadline = None
    while True:
        remaining = None if deadline is None else deadline - time.monotonic()
        number = _signal_within(remaining, _AWAITED)
        if number is None:
            os.kill(agent, signal.SIGKILL)
            deadline = None
        elif number is signal.SIGCHLD:
            status = _reaped(agent)
            if status is not None:
                return _exit_status(os.waitstatus_to_exitcode(status), first)
        else:
            os.kill(agent, number)
            if first is None:
                first = number
                deadline = time.monotonic() + shutdown_timeout_s + LAST_WAIT_S


def _signal_within(
    seconds: float | None, awaited: Collection[signal.Signals]
) -> signal.Signals | None:
    """The next of these signals, or None after `seconds` without; with None, however long."""
    if seconds is None:
        return signal.Signals(signal.sigwait(awaited))
    found = signal.sigtimedwait(awaited, max(0.0, seconds))
    return None if found is None else signal.Signals(found.si_signo)


def _reaped(agent: int) -> int | None:
    """Take in every child that has ended, orphans of the ranks too; the agent's status if it did.

    SIGCHLD comes once for several.
    """
    found = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return found
        if pid == 0:
            return found
        if pid == agent:
            found = status


def _exit_status(code: int, received: signal.Signals | None) -> int:
    """The launcher's own, from the agent's exit code, negative for a signal that ended it."""
    if code in {0, ExitStatus.PREEMPTED}:
        return code
    if received is not None:
        return _ended(ExitStatus.PREEMPTED, f"{received.name} was received")
    if code < 0:
        name = signal.Signals(-code).name
        sys.stderr.write(f"muster: torchrun was ended by {name}; exit status {128 - code}\n")
        return 128 - code
    return code


def _ended(status: ExitStatus, what: str) -> int:
    sys.stderr.write(status.line(what))
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
