"""The one look at a machine: everything the checks judge is read here, and nothing after it."""

import os
from collections.abc import Mapping
from dataclasses import replace

from muster.doctor import devices, host, links, remains
from muster.doctor.facts import Facts, Gpus, Job, Limits, Machine, Memory, Network, Toolkit
from muster.doctor.files import Files


def look(files: Files | None = None, environment: Mapping[str, str] = os.environ) -> Facts:
    """The facts of the machine whose files these are, this one's if not said otherwise.

    Needs no right: what it may not read, and why, stands in `unread`. Takes well under a second,
    and up to RESOLVE_LIMIT_S longer for each of two names that nobody resolves.
    """
    files = files or Files()
    facts = Facts(
        machine=files.attempt("machine", lambda: host.machine(files), Machine()),
        memory=files.attempt("memory", lambda: host.memory(files), Memory()),
        locked=files.attempt("locked memory", host.locked, None),
        limits=files.attempt("limits", lambda: host.limits(files), Limits()),
        clock=files.attempt("clock", host.clock, None),
        gpus=files.attempt("gpus", lambda: devices.gpus(files), Gpus()),
        bridges=files.attempt("bridges", lambda: devices.bridges(files), ()),
        toolkit=files.attempt("toolkit", lambda: devices.toolkit(files), Toolkit()),
        network=files.attempt("network", lambda: links.network(files), Network()),
        job=files.attempt("job", lambda: remains.job(files, environment), Job()),
    )
    return replace(facts, unread=dict(files.unread))
