"""The machine itself: memory, limits, control groups, the clock."""

import ctypes
import os
import platform
import resource
import socket
import sys
from pathlib import PurePosixPath

from muster import process
from muster.doctor.facts import Clock, Limits, Locked, Machine, Memory
from muster.doctor.files import Files, clean

LOCK_BYTES = 64 * 2**20
LOCK_LIMIT_S = 5.0
SHM = "/dev/shm"

# https://github.com/torvalds/linux/blob/master/include/uapi/linux/capability.h
_CAP_IPC_LOCK = 14
# https://man7.org/linux/man-pages/man2/adjtimex.2.html
_TIME_ERROR = 5
_STA_UNSYNC = 0x40
# a limit of cgroup v1 that is none: the largest page-aligned number of 63 bits, or near it
_NO_LIMIT = 2**62

# in a process of its own: where a control group is smaller than this, the kernel ends who locks it
_LOCK = """
import ctypes, mmap, os, sys
size = int(sys.argv[1])
memory = mmap.mmap(-1, size)
libc = ctypes.CDLL(None, use_errno=True)
start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
failed = libc.mlock(ctypes.c_void_p(start), ctypes.c_size_t(size))
print(os.strerror(ctypes.get_errno()) if failed else "")
"""


def machine(files: Files) -> Machine:
    status = _fields(files.text("/proc/self/status"))
    capabilities = files.attempt("capabilities", lambda: int(status["CapEff"], 16), None)
    nodes = [name for name in files.names("/sys/devices/system/node") if _is_node(name)]
    balancing = files.number("/proc/sys/kernel/numa_balancing")
    return Machine(
        hostname=clean(socket.gethostname()),
        kernel=platform.release(),
        container=_container(files),
        uid=os.getuid(),
        may_lock=None if capabilities is None else bool(capabilities >> _CAP_IPC_LOCK & 1),
        cpus=len(os.sched_getaffinity(0)),
        numa_nodes=max(1, len(nodes)),
        numa_balancing=None if balancing is None else balancing > 0,
    )


def _is_node(name: str) -> bool:
    return name.startswith("node") and name[4:].isdecimal()


def _fields(text: str | None) -> dict[str, str]:
    """The lines "Name: value" of a file of /proc."""
    pairs = (line.partition(":") for line in (text or "").splitlines())
    return {name: value.strip() for name, _, value in pairs}


def _container(files: Files) -> str | None:
    """What says that this is a container; None on a host, or where nothing says so."""
    for name in ("/.dockerenv", "/run/.containerenv"):
        if files.exists(name):
            return name
    if files.exists("/var/run/secrets/kubernetes.io"):
        return "/var/run/secrets/kubernetes.io"
    return "a PID namespace of its own" if has_own_pids(files) else None


def has_own_pids(files: Files) -> bool:
    """Whether this is not the first PID namespace: processes of others are out of sight.

    https://github.com/torvalds/linux/blob/master/include/linux/proc_ns.h: PROC_PID_INIT_INO
    """
    try:
        name = str(files.path("/proc/self/ns/pid").readlink())
    except OSError:
        return False
    return name != "pid:[4026531836]"


# ---- memory -------------------------------------------------------------------------------------


def memory(files: Files) -> Memory:
    meminfo = _fields(files.text("/proc/meminfo"))
    shm = files.attempt("shm", lambda: os.statvfs(files.path(SHM)), None)
    return Memory(
        total=_kib(meminfo.get("MemTotal")),
        shm_total=None if shm is None else shm.f_frsize * shm.f_blocks,
        shm_free=None if shm is None else shm.f_frsize * shm.f_bavail,
        shm_writable=None if shm is None else os.access(files.path(SHM), os.W_OK | os.X_OK),
        hugepages=_count(meminfo.get("HugePages_Total")),
        hugepages_free=_count(meminfo.get("HugePages_Free")),
        hugepage_size=_kib(meminfo.get("Hugepagesize")),
    )


def _count(text: str | None) -> int:
    word = (text or "").partition(" ")[0]
    return int(word) if word.isascii() and word.isdigit() and len(word) < 19 else 0


def _kib(text: str | None) -> int:
    return _count(text) * 1024


def locked(size: int = LOCK_BYTES) -> Locked:
    """Whether mlock takes `size` bytes: the limit alone does not tell, nor does the capability."""
    argv = [sys.executable, "-ISBc", _LOCK, str(size)]
    done = process.run(argv, limit_s=LOCK_LIMIT_S)
    said = clean(" ".join(done.last_lines(1)))
    return Locked(size, said if done.ok else f"its process ended: {done.ending} {said}".rstrip())


# ---- limits -------------------------------------------------------------------------------------


def limits(files: Files) -> Limits:
    open_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    quota = files.attempt("cgroup cpu", lambda: _cpus(files), None)
    return Limits(
        locked_memory=_finite(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]),
        open_files=_finite(open_files[0]),
        open_files_hard=_finite(open_files[1]),
        processes=_finite(resource.getrlimit(resource.RLIMIT_NPROC)[0]),
        cgroup_memory=_least(files, "memory", ("memory.max", "memory.limit_in_bytes")),
        cgroup_pids=_least(files, "pids", ("pids.max",)),
        cgroup_cpus=quota,
    )


def _finite(limit: int) -> int | None:
    return None if limit == resource.RLIM_INFINITY else limit


def groups(files: Files, controller: str) -> list[str]:
    """The folders of this process's control groups that may limit `controller`, inmost first.

    https://man7.org/linux/man-pages/man7/cgroups.7.html
    """
    folders: list[str] = []
    for line in (files.text("/proc/self/cgroup") or "").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and controllers == "":
            roots = ("/sys/fs/cgroup", "/sys/fs/cgroup/unified")
        elif controller in controllers.split(","):
            roots = (f"/sys/fs/cgroup/{controllers}", f"/sys/fs/cgroup/{controller}")
        else:
            continue
        inside = PurePosixPath(path.lstrip("/"))
        folders += [f"{root}/{each}" for root in roots for each in (inside, *inside.parents)]
    return [folder for folder in folders if ".." not in folder]


def _least(files: Files, controller: str, names: tuple[str, ...]) -> int | None:
    """The lowest limit of all groups around this process; None when none has one."""
    found = (
        files.number(f"{folder}/{name}") for folder in groups(files, controller) for name in names
    )
    return min((limit for limit in found if limit is not None and limit < _NO_LIMIT), default=None)


def _cpus(files: Files) -> float | None:
    """The lowest quota, in CPUs."""
    quotas: list[float] = []
    for folder in groups(files, "cpu"):
        quota, _, period = (files.word(f"{folder}/cpu.max") or "").partition(" ")
        if not period:
            quota = files.word(f"{folder}/cpu.cfs_quota_us") or ""
            period = files.word(f"{folder}/cpu.cfs_period_us") or ""
        if quota.isdecimal() and period.isdecimal() and int(period):
            quotas.append(round(int(quota) / int(period), 2))
    return min(quotas, default=None)


# ---- the clock ----------------------------------------------------------------------------------


class _Timex(ctypes.Structure):
    """struct timex as far as it is looked at; the kernel writes no more than 208 bytes."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("frequency", ctypes.c_long),
        ("most_error", ctypes.c_long),
        ("likely_error", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_char * 256),
    )


def clock() -> Clock:
    """What adjtimex says; it changes nothing with modes 0, and needs no right for that."""
    libc = ctypes.CDLL(None, use_errno=True)
    state = _Timex()
    code = libc.adjtimex(ctypes.byref(state))
    if code < 0:
        raise OSError(ctypes.get_errno(), "adjtimex")
    synchronised = code != _TIME_ERROR and not state.status & _STA_UNSYNC
    return Clock(synchronised, state.most_error / 1e6)
