"""torchrun's agent under the launcher: each way it can fail becomes an exit status of its own.

python -m muster.agent TORCHRUN'S ARGUMENTS
"""

import socket
import sys
import traceback
from collections.abc import Sequence

from torch.distributed import DistNetworkError, DistStoreError, run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError

from muster.launch import CommandLine, ExitStatus, RankFailure, host_and_port

ANSWER_LIMIT_S = 5.0


def main(arguments: Sequence[str]) -> int:
    try:
        run.main(list(arguments))
    except ChildFailedError as error:
        traceback.print_exc()
        rank, failure = error.get_first_failure()
        what = str(RankFailure(rank, failure.local_rank, failure.exitcode))
        # a leader that is lost takes the ranks of all nodes down: theirs is not the fault
        if gone := _lost_leader(CommandLine.read(arguments)):
            return _ended(ExitStatus.RENDEZVOUS_FAILED, f"{what}, and {gone} is gone")
        return _ended(ExitStatus.WORKER_FAILED, what)
    except SignalException as error:
        return _ended(ExitStatus.PREEMPTED, f"{error.sigval.name} was received")
    except (RendezvousError, DistStoreError, DistNetworkError) as error:
        traceback.print_exc()
        return _ended(ExitStatus.RENDEZVOUS_FAILED, _in_a_line(error))
    return 0


def _lost_leader(line: CommandLine) -> str | None:
    """The endpoint where node 0 hosts the agents' store, if it no longer takes connections."""
    endpoint = line.value("rdzv-endpoint") or ""
    if "is_host=true" in (line.value("rdzv-conf") or ""):
        return None  # this is node 0
    try:
        socket.create_connection(host_and_port(endpoint), timeout=ANSWER_LIMIT_S).close()
    except OSError:
        return endpoint
    return None


def _in_a_line(error: Exception) -> str:
    """The error's name, and the first line of what c10d says below it."""
    text = str(error.__cause__ or error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__


def _ended(status: ExitStatus, what: str) -> int:
    sys.stderr.write(status.line(what))
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
