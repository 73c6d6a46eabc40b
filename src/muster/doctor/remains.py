"""What the environment says of a job, NCCL's own files, and what earlier jobs left behind."""

import os
import re
import stat
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from muster.doctor.facts import Configuration, Job, ShmFile
from muster.doctor.files import Files, clean
from muster.doctor.host import SHM, has_own_pids
from muster.doctor.links import listeners, open_files, resolve

MASK = "***"
# torchrun's own, and torch's default
DEFAULT_PORTS = (29400, 29500)

# what says how a job is laid out or how NCCL and CUDA are to act; no value of any other is kept
_KEPT = re.compile(
    r"(NCCL|CUDA|TORCH|GLOO|MASTER|PET|NVIDIA|TP|FI)_[A-Z0-9_]+|OMP_NUM_THREADS"
    r"|(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|NODE_RANK"
    r"|SLURM_(NNODES|JOB_NUM_NODES|NODEID|LOCALID|PROCID|NTASKS)"
)
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL")
# NCCL's segments, and those in which torch and multiprocessing hand tensors over
_OF_RANKS = re.compile(r"nccl-\w+|torch_\d+_.*|cuda\.shm\..*")
_MOST_SHM_FILES = 10_000
# NCCL reads no more of a name or a value
_MOST_OF_SETTING = 1023


def job(files: Files, environment: Mapping[str, str]) -> Job:
    kept = {
        name: _value(name, value) for name, value in sorted(environment.items()) if _is_kept(name)
    }
    host = kept.get("MASTER_ADDR")
    port = kept.get("MASTER_PORT", "")
    wanted = {*DEFAULT_PORTS, int(port) if port.isdecimal() and len(port) < 6 else 0}
    return Job(
        environment=kept,
        configurations=tuple(_configurations(files, environment)),
        master=resolve(host) if host else None,
        listeners=files.attempt("listeners", lambda: listeners(files, frozenset(wanted)), ()),
        shm_files=files.attempt("shm files", lambda: tuple(_shm_files(files)), ()),
    )


def _is_kept(name: str) -> bool:
    return _KEPT.fullmatch(name) is not None


def _value(name: str, value: str) -> str:
    return MASK if _SECRET.search(name) else clean(value)


# ---- NCCL's files -------------------------------------------------------------------------------


def _configurations(files: Files, environment: Mapping[str, str]) -> Iterator[Configuration]:
    """NCCL_CONF_FILE or else ~/.nccl.conf, then /etc/nccl.conf.

    https://github.com/NVIDIA/nccl/blob/master/src/misc/param.cc
    """
    named = environment.get("NCCL_CONF_FILE")
    own = named or f"{environment.get('HOME') or Path.home()}/.nccl.conf"
    for path in dict.fromkeys((own, "/etc/nccl.conf")):
        if files.exists(path):
            text = files.text(path)
            settings = None if text is None else tuple(settings_of(text))
            yield Configuration(clean(path), settings)


def settings_of(text: str) -> Iterator[tuple[str, str]]:
    """Name and value of each line as NCCL takes them: with every blank, # only as the first."""
    for line in text.split("\n"):
        name, equals, value = line.partition("=")
        if equals and not line.startswith("#"):
            name = clean(name[:_MOST_OF_SETTING])
            kept = _is_kept(name.strip().removeprefix("export "))
            yield name, _value(name, value[:_MOST_OF_SETTING]) if kept else MASK


# ---- /dev/shm -----------------------------------------------------------------------------------


def _shm_files(files: Files) -> Iterator[ShmFile]:
    found = {name: each for name in files.names(SHM) if (each := _shm_file(files, name))}
    if not found:
        return
    held, all_seen = _held(files)
    for name, each in list(found.items())[:_MOST_SHM_FILES]:
        inode = (os.major(each.st_dev), os.minor(each.st_dev), each.st_ino)
        # a process that may not be looked at may hold it
        state = True if inode in held else False if all_seen else None
        age_s = max(0.0, time.time() - each.st_mtime)
        yield ShmFile(clean(name), each.st_size, round(age_s, 1), state)


def _shm_file(files: Files, name: str) -> os.stat_result | None:
    if not _OF_RANKS.fullmatch(name):
        return None
    try:
        found = os.lstat(files.path(SHM) / name)
    except OSError:
        return None
    return found if stat.S_ISREG(found.st_mode) else None


def _held(files: Files) -> tuple[set[tuple[int, int, int]], bool]:
    """Device and inode of every file under /dev/shm that a process has open or mapped.

    And whether every process could be asked.
    """
    held: set[tuple[int, int, int]] = set()
    all_seen = not has_own_pids(files)
    for pid, descriptor, target in open_files(files):
        if target is None:
            all_seen = False
        elif target.startswith(f"{SHM}/"):
            held |= _identity(files.path(f"/proc/{pid}/fd/{descriptor}"))
    for process in filter(str.isdecimal, files.names("/proc")):
        for line in (files.text(f"/proc/{process}/maps") or "").splitlines():
            if f" {SHM}/" in line:
                _, _, _, device, inode, *_ = line.split()
                major, _, minor = device.partition(":")
                held.add((int(major, 16), int(minor, 16), int(inode)))
    return held, all_seen


def _identity(path: Path) -> set[tuple[int, int, int]]:
    try:
        found = path.stat()
    except OSError:
        return set()
    return {(os.major(found.st_dev), os.minor(found.st_dev), found.st_ino)}
