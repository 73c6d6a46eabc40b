"""Checks of the job's own settings, and of what earlier jobs have left."""

from collections.abc import Iterable, Iterator

from muster import size, switches
from muster.doctor import matching
from muster.doctor.check import Seen, counted, gpu_count, listed, not_here, seen
from muster.doctor.facts import Facts, Listener
from muster.doctor.remains import DEFAULT_PORTS
from muster.finding import Finding, error, warning

# a rank that has just begun holds its files soon
FRESH_S = 60.0


# ---- the rendezvous -----------------------------------------------------------------------------


def master_addr(facts: Facts) -> Seen:
    """MASTER_ADDR leads to an address, and with several nodes to one that all of them reach."""
    host, master = facts.job.environment.get("MASTER_ADDR"), facts.job.master
    if not host or master is None:
        return not_here("MASTER_ADDR is not set")
    if master.why:
        return seen(f"{host}: not resolved", [_unresolved(host, master.why)])
    measure = f"{host}: {listed(master.addresses)}"
    parsed = [matching.ip(address) for address in master.addresses]
    if facts.job.nnodes > 1 and all(each is not None and each.is_loopback for each in parsed):
        return seen(measure, [_inward(facts, host, measure)])
    return seen(measure, [*_not_ours(facts, host, measure), *_other_family(facts, host, measure)])


def _unresolved(host: str, why: str) -> Finding:
    return error(
        what=f"MASTER_ADDR {host} does not resolve",
        where="MASTER_ADDR",
        evidence=why,
        cause="the name is misspelled, its Service is missing or not headless, or its pod is not"
        " there yet",
        remedy=f"getent ahosts {host} on each node; in Kubernetes a headless Service with"
        " publishNotReadyAddresses, and the pods' subdomain",
    )


def _inward(facts: Facts, host: str, measure: str) -> Finding:
    return error(
        what=f"MASTER_ADDR {host} is the loopback, and the job has {facts.job.nnodes} nodes",
        where="MASTER_ADDR",
        evidence=measure,
        cause="each node looks for the rendezvous on itself; Debian's /etc/hosts has the host's own"
        " name at 127.0.1.1",
        remedy="set MASTER_ADDR to an address of node 0 that the others reach",
    )


def _not_ours(facts: Facts, host: str, measure: str) -> Iterator[Finding]:
    """Rank 0 opens the port where it runs, whatever MASTER_ADDR says."""
    if _node_rank(facts) != 0 or facts.job.nnodes < 2 or _is_here(facts):
        return
    yield warning(
        what=f"node 0 is here, and MASTER_ADDR {host} is not",
        where="MASTER_ADDR",
        evidence=measure,
        cause="the ranks are numbered otherwise than the addresses, or an address is translated on"
        " the way",
        remedy="set MASTER_ADDR to this node, or let the node that it names be node 0",
    )


def _other_family(facts: Facts, host: str, measure: str) -> Iterator[Finding]:
    """A name with an AAAA record alone is of no use to a node without IPv6, nor the reverse."""
    theirs = _families(facts.job.master.addresses if facts.job.master else ())
    ours = _families(each.address for each in facts.network.addresses if each.running)
    if facts.job.nnodes < 2 or not ours or not theirs or ours & theirs:
        return
    yield error(
        what=f"MASTER_ADDR {host} has IPv{min(theirs)} alone, and this node IPv{min(ours)}",
        where="MASTER_ADDR",
        evidence=measure,
        cause="the name has no record of the family that this node's interfaces have",
        remedy="give MASTER_ADDR an address that all nodes reach; look at the Service's ipFamilies",
    )


def _families(addresses: Iterable[str]) -> set[int]:
    """4 and 6, as far as there is an address that leads out of the node."""
    parsed = (matching.ip(address) for address in addresses)
    return {
        each.version
        for each in parsed
        if each is not None and not each.is_loopback and not each.is_link_local
    }


def _node_rank(facts: Facts) -> int | None:
    return facts.job.number("GROUP_RANK", "NODE_RANK", "PET_NODE_RANK", "SLURM_NODEID")


def _is_here(facts: Facts) -> bool:
    ours = {each.address.partition("%")[0] for each in facts.network.addresses}
    master = facts.job.master
    if master is None:
        return False
    return any(address.partition("%")[0] in ours for address in master.addresses)


def master_port(facts: Facts) -> Seen:
    """MASTER_PORT is a port, and free where rank 0 will listen on it."""
    text = facts.job.environment.get("MASTER_PORT")
    if not text:
        return not_here("MASTER_PORT is not set")
    if not (text.isascii() and text.isdecimal() and 0 < int(text[:9]) < 2**16 and len(text) < 6):
        return seen(text, [_no_port(text)])
    if "GROUP_RANK" in facts.job.environment:
        return not_here(f"this is a rank of torchrun's, which has {text}")
    if facts.job.environment.get("RANK", "0") != "0" or not (
        _is_here(facts) or facts.job.nnodes < 2
    ):
        return not_here(f"{text} is to be free on another node, or rank 0 has it")
    holder = next((each for each in facts.job.listeners if each.port == int(text)), None)
    if holder is None:
        return seen(f"{text} is free")
    finding = error(
        what=f"MASTER_PORT {text} is taken",
        where="MASTER_PORT",
        evidence=f"{_who(holder)} listens on it",
        cause="another job, or what an earlier one left, has the port: rank 0 ends with EADDRINUSE",
        remedy=f"end that process, or choose another port: ss -ltnp sport = :{text}",
    )
    return seen(f"{text} is taken", [finding])


def _no_port(text: str) -> Finding:
    return error(
        what=f"MASTER_PORT {text} is no port",
        where="MASTER_PORT",
        evidence=f"MASTER_PORT={text}",
        cause="a port is a whole number from 1 to 65535; a Service of that name makes Kubernetes"
        " set MASTER_PORT=tcp://...",
        remedy="set it, e.g. to 29500; in a pod also enableServiceLinks: false",
    )


def _who(listener: Listener) -> str:
    if listener.pid is None:
        return "a process that cannot be seen from here"
    return f"process {listener.pid} ({listener.name or 'unknown'})"


def held_ports(facts: Facts) -> Seen:
    """Torchrun's and torch's default ports are free for the next job."""
    if "listeners" in facts.unread:
        return not_here(f"not known: {facts.why('listeners')}")
    asked = facts.job.environment.get("MASTER_PORT")
    held = [
        each
        for each in facts.job.listeners
        if each.port in DEFAULT_PORTS and str(each.port) != asked
    ]
    ports = " and ".join(map(str, DEFAULT_PORTS))
    if not held:
        return seen(f"{ports} are free")
    finding = warning(
        what=f"port {listed(str(each.port) for each in held)} is taken",
        where="ports",
        evidence=listed(f"{each.port}: {_who(each)}" for each in held),
        cause="a job runs here, or an earlier one left a process: one that starts with the default"
        " port of torchrun or torch ends with EADDRINUSE",
        remedy="end a leftover; else torchrun --standalone, or --rdzv-endpoint with a free port",
    )
    return seen(listed(f"{each.port} is taken" for each in held), [finding])


# ---- ranks and devices --------------------------------------------------------------------------


def ranks(facts: Facts) -> Seen:
    """The job's numbers agree with each other."""
    job = facts.job
    rank, world = job.number("RANK"), job.number("WORLD_SIZE")
    local, count = job.number("LOCAL_RANK"), job.number("LOCAL_WORLD_SIZE")
    if rank is None and world is None and local is None and count is None:
        return not_here("no rank's variables are set")
    pairs = (("RANK", rank, "WORLD_SIZE", world), ("LOCAL_RANK", local, "LOCAL_WORLD_SIZE", count))
    findings = [_out_of_range(*pair) for pair in pairs if _is_out(pair[1], pair[3])]
    if world and count and world % count:
        findings.append(_uneven(world, count))
    named = (("RANK", rank), ("WORLD_SIZE", world), ("LOCAL_RANK", local))
    said = [*named, ("LOCAL_WORLD_SIZE", count)]
    return seen(listed(f"{name} {value}" for name, value in said if value is not None), findings)


def _is_out(rank: int | None, world: int | None) -> bool:
    return rank is not None and world is not None and rank >= world


def _out_of_range(name: str, rank: int | None, size_name: str, world: int | None) -> Finding:
    return error(
        what=f"{name} {rank} is not below {size_name} {world}",
        where=name,
        evidence=f"{name}={rank}, {size_name}={world}",
        cause="the variables are of two jobs, or of a scheduler that numbers from 1",
        remedy="let torchrun set them: start the script with it, and unset them before",
    )


def _uneven(world: int, count: int) -> Finding:
    return warning(
        what=f"WORLD_SIZE {world} is no multiple of LOCAL_WORLD_SIZE {count}",
        where="WORLD_SIZE",
        evidence=f"WORLD_SIZE={world}, LOCAL_WORLD_SIZE={count}",
        cause="the nodes have different numbers of ranks, or WORLD_SIZE counts something else",
        remedy="let torchrun set them: --nnodes and --nproc-per-node",
    )


def visible_devices(facts: Facts) -> Seen:
    """CUDA_VISIBLE_DEVICES names GPUs that are here, and one for each local rank."""
    value = facts.job.environment.get("CUDA_VISIBLE_DEVICES")
    count = gpu_count(facts)
    if not count:
        return not_here("no GPU is known here")
    seen_by_cuda, wrong = visible(value, count)
    measure = f"{len(seen_by_cuda)} of {counted(count, 'GPU')}"
    findings = [*_hidden(value, seen_by_cuda, wrong, count)]
    if not findings:
        findings += _too_many(facts, value, len(seen_by_cuda))
    return seen(measure, findings)


def visible(value: str | None, count: int) -> tuple[tuple[str, ...], str | None]:
    """The devices that CUDA shows under this value, and the word at which it stops reading.

    https://docs.nvidia.com/cuda/cuda-c-programming-guide/index.html#env-vars
    """
    if value is None:
        return tuple(map(str, range(count))), None
    shown: list[str] = []
    for word in value.split(","):
        name = word.strip()
        by_number = name.isascii() and name.isdecimal() and len(name) < 6 and int(name) < count
        by_uuid = name.startswith(("GPU-", "MIG-"))
        if not (by_number or by_uuid) or name in shown:
            return tuple(shown), name
        shown.append(name)
    return tuple(shown), None


def _hidden(
    value: str | None, shown: tuple[str, ...], wrong: str | None, count: int
) -> Iterator[Finding]:
    if value is None or wrong is None:
        return
    twice = wrong in shown
    # "", -1 and NoDevFiles are how people hide all of them
    on_purpose = not shown and wrong in ("", "-1", "NoDevFiles")
    make = warning if on_purpose else error
    yield make(
        what="CUDA_VISIBLE_DEVICES hides every GPU"
        if on_purpose
        else f"CUDA_VISIBLE_DEVICES={value} names {wrong!r}, "
        + ("twice" if twice else "which is not here"),
        where="CUDA_VISIBLE_DEVICES",
        evidence=f"CUDA_VISIBLE_DEVICES={value!r}, {counted(count, 'GPU')} here",
        cause="somebody, or a scheduler, has set it so: torch says that no GPU is available"
        if on_purpose
        else "CUDA stops reading there, and shows no GPU that stands behind",
        remedy="unset it, or name GPUs from 0 on",
    )


def _too_many(facts: Facts, value: str | None, shown: int) -> Iterator[Finding]:
    local, count = facts.job.number("LOCAL_RANK"), facts.job.number("LOCAL_WORLD_SIZE")
    needed = max(count or 0, (local or 0) + 1)
    # this is a rank with one GPU: its launcher or a device plugin has shared them out
    if needed <= shown or (shown == 1 and value is not None and local is not None):
        return
    yield error(
        what=f"{counted(needed, 'rank')} on this node, and CUDA shows {counted(shown, 'GPU')}",
        where="CUDA_VISIBLE_DEVICES",
        evidence=listed(
            f"{name}={facts.job.environment[name]}"
            for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "CUDA_VISIBLE_DEVICES")
            if name in facts.job.environment
        ),
        cause="a rank beyond the last GPU has an invalid device ordinal, or shares one, which NCCL"
        " refuses",
        remedy=f"torchrun --nproc-per-node={shown}, or show as many GPUs as there are ranks",
    )


# ---- leftovers ----------------------------------------------------------------------------------


def leftover_shm(facts: Facts) -> Seen:
    """No segment of a rank that has ended takes room in /dev/shm."""
    files = facts.job.shm_files
    if "shm files" in facts.unread:
        return not_here(f"not known: {facts.why('shm files')}")
    stale = [each for each in files if each.held is False and each.age_s > FRESH_S]
    unknown = sum(each.held is None for each in files)
    measure = f"{counted(len(files), 'file')} of ranks" + (
        f", {unknown} of them perhaps in use" if unknown else ""
    )
    if not stale:
        return seen(measure)
    total = sum(each.size for each in stale)
    finding = warning(
        what=f"{counted(len(stale), 'file')} in /dev/shm of ranks that have ended",
        where="/dev/shm",
        evidence=f"{size.binary(total)}: {listed(each.name for each in stale)}",
        cause="a rank was killed before it could remove its segments: they take memory until then",
        remedy=f"rm {listed((f'/dev/shm/{each.name}' for each in stale), 3).replace(',', '')}"
        if len(stale) < 4
        else "no process has these open or mapped: remove nccl-*, torch_* and cuda.shm.* that fuser"
        " does not know",
    )
    return seen(measure, [finding])


def debug_switches(facts: Facts) -> Seen:
    """No switch that helps to find faults is left on in the environment."""
    environment = facts.job.environment
    left = [name for name, value in environment.items() if switches.left_on(name, value)]
    if not left:
        return seen("none left on")
    finding = warning(
        what=f"{counted(len(left), 'debug switch', 'debug switches')} left on",
        where="environment",
        evidence=listed((f"{name}={environment[name]}" for name in left), 12),
        cause="they were set to find a fault: they slow training, or turn a transport off",
        remedy=f"unset {' '.join(left)}",
    )
    return seen(listed(left), [finding])


def nccl_conf(facts: Facts) -> Seen:
    """No file of NCCL's sets, unseen, what the environment does not show."""
    found = facts.job.configurations
    if not found:
        return seen("no file")
    unread = [each.path for each in found if each.settings is None]
    set_there = [(each.path, *pair) for each in found for pair in each.settings or ()]
    measure = listed(f"{name.strip()} in {path}" for path, name, _ in set_there) or "nothing set"
    if unread:
        measure += f"; cannot read {listed(unread)}"
    return seen(measure, [*_switches_in(facts, set_there), *_misspelled(set_there)])


def _switches_in(facts: Facts, set_there: list[tuple[str, str, str]]) -> Iterator[Finding]:
    left = [each for each in set_there if switches.left_on(each[1], each[2])]
    if left:
        path, name, _ = left[0]
        yield warning(
            what=f"{counted(len(left), 'debug switch', 'debug switches')} left on in {path}",
            where=path,
            evidence=listed(f"{name}={value}" for _, name, value in left),
            cause="NCCL reads the file in every process here, and no environment shows it"
            + ("; the environment's own value stands" if name in facts.job.environment else ""),
            remedy=f"take the lines out of {path}",
        )


def _misspelled(set_there: list[tuple[str, str, str]]) -> Iterator[Finding]:
    odd = [(path, name) for path, name, _ in set_there if name != name.strip() or " " in name]
    if odd:
        path, name = odd[0]
        yield warning(
            what=f"a line of {path} has no effect: {name.strip()}",
            where=path,
            evidence=f"the name that NCCL reads is {name!r}",
            cause="NCCL takes every blank as part of the name; it knows no export and no indent",
            remedy="write NAME=VALUE from the first column, without blanks",
        )
