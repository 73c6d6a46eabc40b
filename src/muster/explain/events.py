"""An Event is one thing that a program said in a log, with who said it and what was in it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from muster.explain.lines import Line


class Kind(StrEnum):
    """The program that speaks."""

    NCCL = "nccl"
    TORCHRUN = "torchrun"  # the elastic agent, its rendezvous, its table of failures
    C10D = "c10d"  # torch's C++ side: stores, sockets, the watchdog of ProcessGroupNCCL
    NCCL_TESTS = "nccl_tests"
    CUDA = "cuda"
    DATALOADER = "dataloader"
    PYTHON_TRACEBACK = "python_traceback"  # a traceback's last line, and Python's warnings
    OTHER = "other"


class Severity(StrEnum):
    """How the log itself calls it. WARN is NCCL's word for an error; glog's E and F are ERROR."""

    INFO = "info"
    WARN = "warn"
    ERROR = "error"


class Field(StrEnum):
    """The names in Event.fields; each value is text as it stands in the log."""

    # Enum's own is written in Python, and each line needs a dozen
    __hash__ = str.__hash__

    # NCCL's header
    AT = "at"  # "misc/shmutils.cc:88": where in NCCL's source a WARN or "-> 3" comes from
    FUNCTION = "function"
    # what NCCL says (Event.what names which of them are there)
    VERSION = "version"
    DRIVER = "driver"  # "12080"
    NETWORK = "network"
    VARIABLE = "variable"
    VALUE = "value"
    NRANKS = "nranks"
    COMM = "comm"  # the address of the communicator in its process
    COMM_ID = "comm_id"  # the same for all its ranks; what NCCL 2.23 and newer splits off has none
    BUS_ID = "bus_id"
    NNODES = "nnodes"
    LOCAL_RANK = "local_rank"
    LOCAL_RANKS = "local_ranks"
    SOURCE_RANK = "source_rank"
    TARGET_RANK = "target_rank"
    VIA = "via"  # "P2P/CUMEM", "SHM/direct/direct", "NET/IB/0/GDRDMA"
    RESULT = "result"  # the number after "->"
    CHANNEL = "channel"
    CHANNELS = "channels"
    COLL_CHANNELS = "coll_channels"
    COLLNET_CHANNELS = "collnet_channels"
    NVLS_CHANNELS = "nvls_channels"
    P2P_CHANNELS = "p2p_channels"
    AVAILABLE = "available"
    RING = "ring"
    # torch
    LEVEL = "level"  # glog's letter, or Python's word
    LAST_ENQUEUED = "last_enqueued"
    LAST_COMPLETED = "last_completed"
    GROUP = "group"  # "0", "default_pg"
    SEQUENCE = "sequence"
    OPERATION = "operation"
    NUMEL_IN = "numel_in"
    NUMEL_OUT = "numel_out"
    EXIT_CODE = "exit_code"
    SIGNAL = "signal"
    ROOT_CAUSE = "root_cause"  # there in torchrun's table, under "Root Cause"
    JOINED = "joined"
    EXPECTED = "expected"
    ERROR = "error"  # the class of a traceback's last line
    # nccl-tests
    SIZE = "size"
    ALGBW = "algbw"
    BUSBW = "busbw"
    WRONG = "wrong"  # "0", or "N/A" where nothing was checked


class What(StrEnum):
    """Lines whose fields the reader has taken apart; every other line has What.TEXT."""

    __hash__ = str.__hash__

    TEXT = "text"
    VERSION = "version"
    DRIVER = "driver"
    USING_NETWORK = "using network"
    ENVIRONMENT = "environment"
    INIT_START = "init start"
    INIT_COMPLETE = "init complete"
    TOPOLOGY = "topology"
    CONNECTION = "connection"
    RINGS = "rings"
    TREES = "trees"
    NVLS = "nvls"
    CHANNELS = "channels"
    CONNECTED = "connected"
    GDR = "gdr"
    PROPAGATION = "propagation"  # "init.cc:1089 -> 2": the way of an error upwards, no cause
    WATCHDOG_TIMEOUT = "watchdog timeout"
    WATCHDOG_STATUS = "watchdog status"
    FAILURE = "failure"  # one rank in torchrun's table
    BANDWIDTH = "bandwidth"  # one row of nccl-tests
    AVERAGE_BANDWIDTH = "average bandwidth"
    RANK_DEVICE = "rank device"  # "#  Rank  0 Group  0 Pid .. on node-0 device  0 .."
    CLIENTS_JOINED = "clients joined"


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """`message` is what was said, without header; host, pid and so on are None where not said.

    `device` is the CUDA device of NCCL's header, which is that of a thread: never a rank.
    `rank` of an NCCL line that names none is the one that its process has in its largest
    communicator, as soon as the log has said that.
    """

    line: Line
    kind: Kind
    severity: Severity
    message: str
    what: What = What.TEXT
    host: str | None = None
    pid: int | None = None
    device: int | None = None
    rank: int | None = None
    fields: Mapping[Field, str] = field(default_factory=dict)
