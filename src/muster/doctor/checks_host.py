"""Checks of memory, limits and the clock."""

from collections.abc import Iterator

from muster import size
from muster.doctor.check import Seen, counted, gpu_count, may_join_others, not_here, seen
from muster.doctor.facts import Facts
from muster.finding import Finding, error, warning

# Docker's own size, which NCCL outgrows with a few GPUs and DataLoader workers with one batch:
# https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html#shared-memory
TOO_SMALL_SHM = 64 * 2**20
SMALL_SHM = 2**30
# sockets, event files and shared tensors of a rank and its workers; many systems begin with 1024
FEW_FILES = 4096
# a rank has some hundred threads: OpenMP's, NCCL's, the loader's
FEW_PROCESSES = 1024


def ranks(facts: Facts) -> int:
    """The ranks that this node would run: as the job says, else one a GPU."""
    return facts.job.number("LOCAL_WORLD_SIZE") or gpu_count(facts) or 1


# ---- memory -------------------------------------------------------------------------------------


def shm(facts: Facts) -> Seen:
    """/dev/shm is there, can be written to, and has room for NCCL and DataLoader workers."""
    memory = facts.memory
    if memory.shm_total is None or memory.shm_free is None:
        return seen("not there", [_no_shm(facts)])
    findings: list[Finding] = []
    if memory.shm_writable is False:
        findings.append(_shm_not_writable(facts))
    if memory.shm_total <= TOO_SMALL_SHM:
        findings.append(_shm_small(facts, memory.shm_total))
    elif memory.shm_free < min(SMALL_SHM, memory.shm_total // 4):
        findings.append(_shm_full(memory.shm_total, memory.shm_free))
    elif memory.shm_total < SMALL_SHM and ranks(facts) > 1:
        findings.append(_shm_small(facts, memory.shm_total))
    return seen(f"{size.binary(memory.shm_free)} free of {size.binary(memory.shm_total)}", findings)


def _no_shm(facts: Facts) -> Finding:
    return error(
        what="there is no /dev/shm to be used",
        where="/dev/shm",
        evidence=facts.why("shm"),
        cause="nothing is mounted there; ranks and DataLoader workers exchange data in it",
        remedy="mount -t tmpfs tmpfs /dev/shm; containers get one from Docker and Kubernetes",
    )


def _shm_not_writable(facts: Facts) -> Finding:
    return error(
        what="/dev/shm cannot be written to",
        where="/dev/shm",
        evidence=f"user id {facts.machine.uid} may not write there",
        cause="its mode is not 1777, or it is mounted read-only",
        remedy="chmod 1777 /dev/shm; in a pod mount an emptyDir with medium: Memory there",
    )


def _shm_small(facts: Facts, total: int) -> Finding:
    # one rank and no worker need none of it
    make = error if total <= TOO_SMALL_SHM and ranks(facts) > 1 else warning
    return make(
        what=f"/dev/shm has {size.binary(total)}",
        where="/dev/shm",
        evidence=f"statvfs: {total} bytes, for {counted(ranks(facts), 'rank')}",
        cause="containers get 64 MiB unless told otherwise: NCCL then fails to extend its segments,"
        " and DataLoader workers die of a bus error",
        remedy="docker run --shm-size=1g or more, or --ipc=host; in a pod an emptyDir with"
        " medium: Memory mounted at /dev/shm",
    )


def _shm_full(total: int, free: int) -> Finding:
    return warning(
        what=f"/dev/shm has {size.binary(free)} left of {size.binary(total)}",
        where="/dev/shm",
        evidence=f"statvfs: {free} bytes free",
        cause="other jobs hold it, or earlier ones left their files there",
        remedy="ls -lS /dev/shm, and remove what belongs to no process",
    )


def locked_memory(facts: Facts) -> Seen:
    """Memory can be locked, as every buffer of InfiniBand and RoCE must be."""
    locked, limit = facts.locked, facts.limits.locked_memory
    said = "unlimited" if limit is None else size.binary(limit)
    if locked is None:
        return not_here(f"not tried: {facts.why('locked memory')}")
    if not locked.why:
        return seen(f"{size.binary(locked.size)} locked (limit {said})")
    measure = f"{size.binary(locked.size)} not locked (limit {said})"
    if not facts.network.hcas:
        return seen(f"{measure}; no HCA here needs it")
    inert = facts.machine.may_lock is False and facts.machine.uid != 0
    finding = error(
        what=f"mlock of {size.binary(locked.size)} fails",
        where="locked memory",
        evidence=f"mlock: {locked.why}; limit {said}, user id {facts.machine.uid}",
        cause="the limit is low: ibv_reg_mr fails with ENOMEM, and NCCL goes on over sockets or"
        " ends" + (". IPC_LOCK does nothing for a user who is not root" if inert else ""),
        remedy="docker run --ulimit memlock=-1; for pods LimitMEMLOCK=infinity in the unit of"
        " containerd, or root with IPC_LOCK; on a host LimitMEMLOCK= of the unit, or limits.conf",
    )
    return seen(measure, [finding])


def hugepages(facts: Facts) -> Seen:
    """Not much of the memory is set aside as huge pages that nothing uses."""
    memory = facts.memory
    if not memory.total:
        return not_here("the memory's size is not known")
    unused = memory.hugepages_free * memory.hugepage_size
    measure = f"{memory.hugepages} of {size.binary(memory.hugepage_size)}"
    if not memory.hugepages:
        return seen("none set aside")
    if unused * 4 < memory.total:
        return seen(measure)
    finding = warning(
        what=f"{size.binary(unused)} of memory are set aside as huge pages, and unused",
        where="huge pages",
        evidence=f"{memory.hugepages_free} of {memory.hugepages} pages are free",
        cause="nothing else can have that memory: loaders and checkpoints run out sooner",
        remedy="lower vm.nr_hugepages; EFA needs few of them, and none with FI_EFA_USE_HUGE_PAGE=0",
    )
    return seen(measure, [finding])


def numa(facts: Facts) -> Seen:
    """On a machine of several NUMA nodes the kernel does not move a rank's memory about."""
    machine = facts.machine
    measure = counted(machine.numa_nodes, "node")
    if machine.numa_nodes < 2:
        return seen(measure)
    if machine.numa_balancing is None:
        return seen(f"{measure}, balancing not known")
    if not machine.numa_balancing or not gpu_count(facts):
        return seen(f"{measure}, balancing {'on' if machine.numa_balancing else 'off'}")
    finding = warning(
        what="automatic NUMA balancing is on",
        where="NUMA",
        evidence="/proc/sys/kernel/numa_balancing is not 0",
        cause="the kernel unmaps pages to see who uses them: steps take now shorter, now longer",
        remedy="sysctl -w kernel.numa_balancing=0, on the host",
    )
    return seen(f"{measure}, balancing on", [finding])


# ---- limits -------------------------------------------------------------------------------------


def open_files(facts: Facts) -> Seen:
    """Ranks may open as many files and sockets as NCCL and DataLoader workers need."""
    soft, hard = facts.limits.open_files, facts.limits.open_files_hard
    measure = f"{_said(soft)} (hard {_said(hard)})"
    # a machine without a GPU has few ranks, and torch keeps within 1024 there
    if soft is None or soft >= (FEW_FILES if gpu_count(facts) else 1024):
        return seen(measure)
    finding = warning(
        what=f"a process may have {soft} files open",
        where="open files",
        evidence=f"RLIMIT_NOFILE: {measure}",
        cause="each peer and each shared tensor takes some: then it is Too many open files, or"
        " received 0 items of ancdata",
        remedy="ulimit -n 65536; docker run --ulimit nofile=65536; LimitNOFILE= of the unit",
    )
    return seen(measure, [finding])


def processes(facts: Facts) -> Seen:
    """The threads of all ranks and workers fit into what user and control group may have."""
    user, group = facts.limits.processes, facts.limits.cgroup_pids
    limits = [limit for limit in (user, group) if limit is not None]
    measure = f"user {_said(user)}, control group {_said(group)}"
    needed = FEW_PROCESSES * ranks(facts)
    if not limits or min(limits) >= needed:
        return seen(measure)
    finding = warning(
        what=f"{min(limits)} processes and threads at most, for {counted(ranks(facts), 'rank')}",
        where="processes",
        evidence=f"limits: {measure}",
        cause="OpenMP, NCCL and the loaders start some hundred threads a rank; beyond the limit it"
        " is Resource temporarily unavailable",
        remedy="ulimit -u; docker run --pids-limit; podPidsLimit of the kubelet; or fewer threads:"
        " OMP_NUM_THREADS",
    )
    return seen(measure, [finding])


def control_group(facts: Facts) -> Seen:
    """The control group's memory and CPUs are enough for what the node would run."""
    limits = facts.limits
    memory = "unlimited" if limits.cgroup_memory is None else size.binary(limits.cgroup_memory)
    cpus = facts.machine.cpus
    if limits.cgroup_cpus is not None:
        cpus = min(cpus, max(1, int(limits.cgroup_cpus)))
    return seen(
        f"memory {memory}, {counted(cpus, 'CPU')}",
        [*_shm_in_group(facts), *_few_cpus(facts, cpus)],
    )


def _shm_in_group(facts: Facts) -> Iterator[Finding]:
    limit, shm_total = facts.limits.cgroup_memory, facts.memory.shm_total
    # on a host /dev/shm is half of the memory, and its groups are of services
    if limit is None or shm_total is None or facts.machine.container is None:
        return
    if shm_total >= limit:
        yield warning(
            what=f"/dev/shm may grow to {size.binary(shm_total)}, and memory ends at"
            f" {size.binary(limit)}",
            where="control group",
            evidence=f"memory limit {limit}, /dev/shm {shm_total} bytes",
            cause="what is in /dev/shm counts as memory of the container: a full one gets ranks"
            " killed (exit code 137)",
            remedy="give the container more memory than /dev/shm, or the emptyDir a sizeLimit",
        )


def _few_cpus(facts: Facts, cpus: int) -> Iterator[Finding]:
    count = gpu_count(facts)
    if cpus < count:
        yield warning(
            what=f"{counted(cpus, 'CPU')} for {counted(count, 'GPU')}",
            where="control group",
            evidence=f"quota {facts.limits.cgroup_cpus or 'none'}, affinity"
            f" {counted(facts.machine.cpus, 'CPU')}",
            cause="every rank needs a CPU for itself, one for NCCL's proxy, and some to load data",
            remedy="docker run --cpus or --cpuset-cpus; the pod's CPU limit; srun --cpus-per-task",
        )


def _said(limit: int | None) -> str:
    return "unlimited" if limit is None else str(limit)


# ---- the clock ----------------------------------------------------------------------------------


def clock(facts: Facts) -> Seen:
    """The clock is kept right, so that nodes agree on who is late and logs can be read together."""
    if facts.clock is None:
        return not_here(f"not known: {facts.why('clock')}")
    if facts.clock.synchronised or not may_join_others(facts):
        return seen("synchronised" if facts.clock.synchronised else "not synchronised")
    finding = warning(
        what="nothing keeps the clock right",
        where="clock",
        evidence=f"adjtimex: not synchronised, off by up to {facts.clock.error_s:g} s",
        cause="torchrun's nodes judge by their clocks who still lives, and certificates and log"
        " lines of several nodes do not fit together",
        remedy="systemctl enable --now chrony, or timedatectl set-ntp true, on the host",
    )
    return seen("not synchronised", [finding])
