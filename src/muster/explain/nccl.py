"""NCCL's lines, 2.16 to 2.30: their header (src/debug.cc), and the facts in those that hold some.

The formats are NCCL's own strings: https://github.com/NVIDIA/nccl, src/init.cc, src/transport.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from muster.explain.events import Field, Severity, What

# no host's name or path is longer, so the search for a header stays in what is just before it
_LONGEST_HEADER = 400
_LEVELS = re.compile(r"NCCL (INFO|WARN|ERROR|ABORT|CALL|TRACE|VERSION)(?= |$)")
_QUIET = frozenset({"INFO", "CALL", "TRACE", "VERSION"})
# Every part may lack: logs are cut, and reports quote half a line. The bounds and the looks behind
# keep the search linear.
_HEADER = re.compile(
    r"(?:(?<![\w.-])(?P<host>[\w.-]{1,255}):(?P<pid>\d{1,10}):(?P<tid>\d{1,10}) +)?"
    r"(?:\[(?P<device>-?\d{1,5})\] )?"
    # TRACE "12.345678 function:88"; 2.16 to 2.30.4 "misc/shmutils.cc:88"; 2.30.7
    # "plugin/net.cc:334 (ncclNetInit)"; plugins "get_ofi_provider:312"
    r"(?:[\d.]{3,20} )?"
    r"(?:(?<![\w./+-])(?P<at>[\w./+-]{1,200}:\d{1,6}) (?:\((?P<function>[\w:~<>]{1,80})\) )?)?$"
)
# a whole line of information, as nearly all are: it needs no search
_PLAIN = re.compile(
    r"(?P<host>[\w.-]{1,255}):(?P<pid>\d{1,10}):\d{1,10} \[(?P<device>-?\d{1,5})\] NCCL INFO"
    r" (?P<message>.*)"
)


@dataclass(frozen=True, slots=True)
class Said:
    """One thing that NCCL says: of one line, or of several that were written into one."""

    severity: Severity
    message: str
    host: str | None
    pid: int | None
    device: int | None
    fields: Mapping[Field, str]


def said(text: str) -> Iterator[Said]:
    """What NCCL says in `text`; nothing where it does not speak there."""
    plain = _PLAIN.match(text)
    if plain is not None and "NCCL " not in plain["message"]:
        pid, device = int(plain["pid"]), int(plain["device"])
        yield Said(Severity.INFO, plain["message"].strip(), plain["host"], pid, device, {})
    else:
        yield from _several(text)


def _several(text: str) -> Iterator[Said]:
    """The same for text of any form, in which more than one may speak."""
    heads: list[_Head] = []
    begin = 0
    for level in _LEVELS.finditer(text):
        header = _header(text, begin, level.start())
        # a message may name "NCCL INFO" itself
        if header["host"] or (not heads and (header[0] or not text[: level.start()].strip())):
            heads.append(_head(header, level, heads[0].host if heads else None))
        begin = level.end()
    ends = (*(head.begin for head in heads[1:]), len(text))
    for head, end in zip(heads, ends, strict=False):
        message = text[head.end : end].strip()
        yield Said(head.severity, message, head.host, head.pid, head.device, head.fields)


@dataclass(frozen=True, slots=True)
class _Head:
    begin: int
    end: int
    severity: Severity
    host: str | None
    pid: int | None
    device: int | None
    fields: Mapping[Field, str]


def _head(header: re.Match[str], level: re.Match[str], first_host: str | None) -> _Head:
    host, begin = header["host"], header.start()
    if first_host and host.endswith(first_host):
        # the end of the message before, cut off by this one, stands right before the host
        host, begin = first_host, begin + len(host) - len(first_host)
    names = ((Field.AT, header["at"]), (Field.FUNCTION, header["function"]))
    return _Head(
        begin,
        level.end(),
        Severity.INFO if level[1] in _QUIET else Severity.WARN,
        host,
        _number(header["pid"]),
        _number(header["device"]),
        {field: name for field, name in names if name},
    )


def _header(text: str, begin: int, end: int) -> re.Match[str]:
    match = _HEADER.search(text, max(begin, end - _LONGEST_HEADER), end)
    assert match is not None  # an empty one, at least
    return match


def _number(text: str | None) -> int | None:
    return None if text is None else int(text)


# ---- the facts ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Form:
    """`mark` is in every such line, and is looked for first: a regex costs ten times as much."""

    what: What
    mark: str
    pattern: re.Pattern[str]


_COMM = r"comm (?P<comm>0x[0-9a-f]{1,16}|\(nil\)) rank (?P<rank>\d{1,7})"
_INIT = (
    rf"{_COMM} nranks (?P<nranks>\d{{1,7}}) .{{0,80}}?busId (?P<bus_id>\w{{1,16}})"
    r"(?:.{0,80}? commId (?P<comm_id>\w{1,20}))?"
)
_TOPOLOGY = (
    rf"{_COMM} nRanks (?P<nranks>\d{{1,7}}) nNodes (?P<nnodes>\d{{1,7}})"
    r" localRanks (?P<local_ranks>\d{1,5}) localRank (?P<local_rank>\d{1,5})"
)
_CONNECTION = (
    r"Channel (?P<channel>\d{1,4})(?:/\d{1,4})? :"
    r" (?P<source_rank>\d{1,7})\[\w{1,16}\] -> (?P<target_rank>\d{1,7})\[\w{1,16}\]"
    r"(?: \[(?:send|receive)\])? via (?P<via>.{1,80})"
)
_PROPAGATION = (
    r"^(?P<at>[\w./+-]{1,200}:\d{1,6})(?: \((?P<function>[^)]{1,80})\))? -> (?P<result>\d{1,3})\b"
)
_CHANNELS = (
    r"\b(?P<coll_channels>\d{1,4}) coll channels"
    r"(?:, (?P<collnet_channels>\d{1,4}) collnet channels)?"
    r"(?:, (?P<nvls_channels>\d{1,4}) nvls channels)?, (?P<p2p_channels>\d{1,4}) p2p channels"
)
_ENVIRONMENT = (
    r"(?P<variable>NCCL_\w{1,80}|(?<!PROFILER/Plugin: )(?<!TUNER/Plugin: )Plugin name)"
    r" set (?:by env(?:ironment)? )?to (?P<value>-?\d{1,20}(?=\.$)|.{0,400})"
)
_RINGS = r"^Channel (?P<channel>\d{1,4})/(?P<channels>\d{1,4}) :(?P<ring>[ \d]+)$"
_FORMS = tuple(
    _Form(what, mark, re.compile(pattern))
    for what, mark, pattern in (
        (What.CONNECTION, "] via ", _CONNECTION),
        (What.PROPAGATION, " -> ", _PROPAGATION),
        (What.INIT_START, "Init START", _INIT),
        (What.INIT_COMPLETE, "Init COMPLETE", _INIT),
        (What.TOPOLOGY, " nRanks ", _TOPOLOGY),
        (What.USING_NETWORK, "Using network ", r"^Using network (?P<network>.{1,80})"),
        (What.ENVIRONMENT, " set ", _ENVIRONMENT),
        (What.VERSION, "NCCL version ", r"^NCCL version (?P<version>\d[\w.+-]{0,60})"),
        (What.DRIVER, "cudaDriverVersion ", r"cudaDriverVersion (?P<driver>\d{1,9})"),
        (What.CHANNELS, " coll channels, ", _CHANNELS),
        (What.RINGS, "Channel ", _RINGS),
        (What.TREES, "Trees ", r"^Trees \["),
        (What.NVLS, "NVLS multicast ", r"support is (?P<available>(?:not )?available) on dev"),
        (What.CONNECTED, "Connected ", r"^Connected (?:all|binomial|NVLS)"),
        (What.GDR, "GPU Direct RDMA ", r"GPU Direct RDMA (?P<available>Enabled|Disabled)"),
        (What.GDR, "DMA-BUF is ", r"DMA-BUF is (?P<available>available)"),
    )
)
# NCCL to 2.27 does not name the variable, https://github.com/NVIDIA/nccl/blob/v2.25.1-1/src/net.cc
_UNNAMED = {"Plugin name": "NCCL_NET_PLUGIN"}


@dataclass(frozen=True, slots=True)
class Facts:
    what: What
    rank: int | None
    fields: Mapping[Field, str]


# Field(name) takes five times as long
_FIELDS = {field.value: field for field in Field}
_NO_FACTS = Facts(What.TEXT, None, {})


def facts(message: str) -> Facts:
    """What is in a line of NCCL's, taken apart; What.TEXT where it is only text."""
    for form in _FORMS:
        if form.mark in message and (match := form.pattern.search(message)):
            groups = match.groupdict()
            rank = _number(groups.pop("rank", None))
            fields = {_FIELDS[name]: text for name, text in groups.items() if text is not None}
            if variable := fields.get(Field.VARIABLE):
                fields[Field.VARIABLE] = _UNNAMED.get(variable, variable)
            return Facts(form.what, rank, fields)
    return _NO_FACTS
