"""How torchrun is told to meet: its flags among themselves and against the pods."""

import difflib
from collections.abc import Iterator
from typing import Final

from muster.finding import Finding, error, warning
from muster.launch import RDZV_PORT
from muster.manifests.documents import mappings
from muster.manifests.invocation import (
    BARE,
    VALUED,
    Flag,
    Invocation,
    Program,
    references,
)
from muster.manifests.rules import (
    C10D,
    Manifest,
    Rule,
    at_container,
    at_flag,
    backend,
    endpoint,
    is_known,
    many_by,
)
from muster.manifests.workloads import INDEX_VARIABLE, PodGroup

# torch's defaults in seconds; https://docs.pytorch.org/docs/stable/elastic/rendezvous.html
_JOIN_TIMEOUT_S: Final = 600
_READ_TIMEOUT_S: Final = 60
# CoreDNS keeps "no such name" for 30 s, and a store's client gives up after 2.3 x read_timeout
LEAST_READ_TIMEOUT_S: Final = 120
# what c10d's handler and backend look up, in torch/distributed/elastic/rendezvous
_CONF_KEYS: Final = frozenset(
    {
        "is_host",
        "store_type",
        "read_timeout",
        "join_timeout",
        "last_call_timeout",
        "close_timeout",
        "heartbeat_timeout",
        "keep_alive_interval",
        "keep_alive_max_attempt",
    }
)
_TRUE: Final = frozenset({"1", "true", "t", "yes", "y"})
_FALSE: Final = frozenset({"0", "false", "f", "no", "n"})


def _names_a_flag(group: PodGroup, invocation: Invocation, name: str) -> bool:
    """Whether the flag is given in the manifest, and not set by Kubeflow's plugin."""
    return name in invocation.flags and not (
        group.kind == "TrainJob" and invocation.flags[name].path[-1] == "envFrom"
    )


# ---- the command line --------------------------------------------------------------------------


def torchrun_flag(manifest: Manifest) -> Iterator[Finding]:
    known = sorted(f"--{name.replace('_', '-')}" for name in VALUED | BARE)
    for group, invocation in manifest.trainers:
        for flag in invocation.unknown:
            close = difflib.get_close_matches(flag.value.replace("_", "-"), known, n=1)
            yield error(
                _at(group, flag),
                f"torchrun has no flag {flag.value}",
                evidence=flag.value,
                cause="torchrun ends with exit code 2 before it starts a worker",
                remedy=f"write {close[0]}" if close else "put the script's own flags behind it",
            )


def _at(group: PodGroup, flag: Flag) -> str:
    return group.document.where(*flag.path, row=flag.row)


def script_missing(manifest: Manifest) -> Iterator[Finding]:
    for group, invocation in manifest.trainers:
        if invocation.script is None and invocation.complete:
            yield error(
                at_flag(group, invocation, ""),
                "torchrun is given no script",
                evidence=f"{invocation.program} with {len(invocation.flags)} flags and no script",
                cause="torchrun ends with exit code 2",
                remedy="put the training script, or -m and a module, behind torchrun's flags",
            )


def flag_variable(manifest: Manifest) -> Iterator[Finding]:
    """$NAME where no shell reads it, $(NAME) of a variable that there is none of."""
    for group, invocation in manifest.trainers:
        if invocation.in_shell:
            continue
        for name, flag in invocation.flags.items():
            unknown = _unexpanded(group, flag.value)
            if unknown is None:
                continue
            text, cause = unknown
            yield error(
                _at(group, flag),
                f"{text} in --{name.replace('_', '-')} stays as it is",
                evidence=f"--{name.replace('_', '-')} {flag.value}",
                cause=cause,
                remedy="write $(NAME) for a variable of this container's env, or start torchrun by"
                " sh -c",
            )


def _unexpanded(group: PodGroup, value: str) -> tuple[str, str] | None:
    container = group.trainer
    for reference in references(value):
        if reference.shell:
            return reference.text, "no shell is between Kubernetes and torchrun to expand it"
        names = {entry.get("name") for entry in mappings(container.get("env"))}
        is_known_later = container.get("envFrom") or (
            reference.name == INDEX_VARIABLE and group.indexed
        )
        if reference.name not in names and not is_known_later:
            return reference.text, f"the container has no variable {reference.name}"
    return None


def launch_deprecated(manifest: Manifest) -> Iterator[Finding]:
    for group, invocation in manifest.trainers:
        if invocation.program is Program.LAUNCH_MODULE:
            yield warning(
                at_flag(group, invocation, ""),
                "torch.distributed.launch is deprecated",
                evidence=invocation.program,
                cause="it is torchrun with the older defaults: it gives the script --local-rank,"
                " and is to be removed from torch",
                remedy="write torchrun, and read LOCAL_RANK from the environment",
            )


# ---- c10d --------------------------------------------------------------------------------------


def rdzv_id(manifest: Manifest) -> Iterator[Finding]:
    for group, invocation in many_by(manifest, C10D):
        if invocation.rdzv_id is None and invocation.complete:
            yield warning(
                at_flag(group, invocation, "rdzv_endpoint"),
                "the rendezvous has no id",
                evidence="no --rdzv-id",
                cause="without one all jobs are called none: pods of another job, or of an older"
                " run of this one, that reach the store join in",
                remedy=f"give --rdzv-id {group.name or 'NAME'}",
            )


def c10d_static_flags(manifest: Manifest) -> Iterator[Finding]:
    for group, invocation in manifest.trainers:
        if backend(invocation) != C10D:
            continue
        for name in ("node_rank", "master_addr"):
            if _names_a_flag(group, invocation, name):
                spelled = f"--{name.replace('_', '-')}"
                yield warning(
                    at_flag(group, invocation, name),
                    f"{spelled} does nothing with the c10d backend",
                    evidence=f"{spelled} {invocation.value(name)}, --rdzv-backend c10d",
                    cause="it is for the static rendezvous; with c10d the nodes agree on their"
                    " ranks by themselves, sorted by their addresses",
                    remedy=f"leave {spelled} out"
                    + (", or leave --rdzv-backend out" if name == "node_rank" else ""),
                )


def rdzv_conf(manifest: Manifest) -> Iterator[Finding]:
    """Keys that c10d does not look up."""
    for group, invocation in manifest.trainers:
        if backend(invocation) != C10D or not _names_a_flag(group, invocation, "rdzv_conf"):
            continue
        for key, value in invocation.rdzv_conf.items():
            where = at_flag(group, invocation, "rdzv_conf")
            if not is_known(key):
                continue
            if not value:
                yield error(
                    where,
                    f"{key} in --rdzv-conf has no value",
                    evidence=f"--rdzv-conf {invocation.value('rdzv_conf')}",
                    cause="torchrun refuses it",
                    remedy=f"write {key}=VALUE",
                )
            elif key not in _CONF_KEYS:
                close = difflib.get_close_matches(key, sorted(_CONF_KEYS), n=1)
                remedy = close[0] if close and key != "timeout" else "join_timeout or read_timeout"
                yield warning(
                    where,
                    f"{key} in --rdzv-conf has no effect on c10d",
                    evidence=f"--rdzv-conf {key}={value}",
                    cause="c10d does not look it up, and torchrun says nothing of it",
                    remedy=f"write {remedy}",
                )


def is_host(manifest: Manifest) -> Iterator[Finding]:
    """Who holds the store: said for each pod, or guessed by torch from the endpoint's name."""
    for group, invocation in many_by(manifest, C10D):
        said = invocation.rdzv_conf.get("is_host", "").lower()
        place = endpoint(invocation)
        where = at_flag(group, invocation, "rdzv_conf")
        if said in _TRUE and group.replicas > 1:
            yield error(
                where,
                "every pod holds a store of its own",
                evidence=f"is_host={said} in all {group.replicas} pods",
                cause="the nodes then wait for each other at different stores, until join_timeout",
                remedy=f"give is_host=true to the pod of {INDEX_VARIABLE} 0 only",
            )
        elif said in _FALSE and len(manifest.peers(group)) == 1:
            yield error(
                where,
                "no pod holds the store",
                evidence=f"is_host={said} in all {group.replicas} pods",
                cause="all of them wait for one to open it",
                remedy=f"give is_host=true to the pod of {INDEX_VARIABLE} 0",
            )
        elif not said and place is not None and _guesses_wrong(group, invocation, place[0]):
            yield warning(
                where,
                f"whether a pod holds the store is guessed from the name {place[0]}",
                evidence=f"--rdzv-endpoint {invocation.rdzv_endpoint}, no is_host",
                cause="torch compares the endpoint with the pod's own names and addresses, which"
                " fails for a shortened name while DNS does not know the pod; then nobody holds it",
                remedy=f"give --rdzv-conf is_host=true to the pod of {INDEX_VARIABLE} 0 and"
                " is_host=false to the others, and the full name as endpoint",
            )


def _guesses_wrong(group: PodGroup, invocation: Invocation, host: str) -> bool:
    if invocation.program is Program.LAUNCHER:
        return False
    # less than pod, subdomain, namespace, svc and a domain
    return host.count(".") < 4 or group.template.get("hostNetwork") is True


def local_addr(manifest: Manifest) -> Iterator[Finding]:
    for group, invocation in many_by(manifest, C10D):
        is_host_network = group.template.get("hostNetwork") is True
        if not is_host_network or invocation.program is Program.LAUNCHER:
            continue
        if invocation.local_addr is None and invocation.complete:
            yield warning(
                at_flag(group, invocation, ""),
                "torchrun tells the others the host's name, for it is not told its own",
                evidence="hostNetwork: true, no --local-addr",
                cause="MASTER_ADDR is what the node calls itself, and with hostNetwork that is the"
                " machine's name, which the cluster's DNS need not know",
                remedy="give --local-addr with the pod's full name, or its address",
            )


def read_timeout(manifest: Manifest) -> Iterator[Finding]:
    for group, invocation in many_by(manifest, C10D):
        given = invocation.rdzv_conf
        said = given.get("read_timeout", str(_READ_TIMEOUT_S))
        may_be_elsewhere = not invocation.complete or not all(map(is_known, given))
        if not said.isdigit() or int(said) >= LEAST_READ_TIMEOUT_S:
            continue
        if "read_timeout" in given or not may_be_elsewhere:
            yield warning(
                at_flag(group, invocation, "rdzv_conf"),
                f"a node gives up on the store after about {int(int(said) * 2.3)} s",
                evidence=f"read_timeout={said}"
                + ("" if "read_timeout" in given else ", torch's default"),
                cause="pod 0 may still pull its image, and a name that was not found once stays so"
                " in DNS caches for 30 s",
                remedy="give --rdzv-conf read_timeout=900",
            )


def join_timeout(manifest: Manifest) -> Iterator[Finding]:
    for group, invocation in many_by(manifest, C10D):
        said = invocation.rdzv_conf.get("join_timeout", str(_JOIN_TIMEOUT_S))
        deadline = group.job.get("activeDeadlineSeconds") or group.template.get(
            "activeDeadlineSeconds"
        )
        if said.isdigit() and deadline is not None and int(said) >= deadline:
            yield warning(
                at_flag(group, invocation, "rdzv_conf"),
                "the deadline ends the job before the rendezvous can say who is missing",
                evidence=f"join_timeout={said}, activeDeadlineSeconds={deadline}",
                cause="the deadline counts from the start of the Job, with the time that the nodes"
                " wait for each other",
                remedy=f"give join_timeout less than {deadline}, or a later deadline",
            )


def rdzv_port(manifest: Manifest) -> Iterator[Finding]:
    """A containerPort that is called as the rendezvous and is another."""
    for group, invocation in many_by(manifest, C10D):
        place = endpoint(invocation)
        if place is None:
            continue
        port = place[1] or str(RDZV_PORT)
        for index, each in enumerate(mappings(group.trainer.get("ports"))):
            is_it = str(each.get("name", "")) in {"rdzv", "c10d", "rendezvous", "master"}
            if is_it and str(each.get("containerPort")) != port:
                yield warning(
                    at_container(group, "ports", index, "containerPort"),
                    f"the port {each.get('name')!r} is not the endpoint's",
                    evidence=f"containerPort {each.get('containerPort')}, endpoint"
                    f" {invocation.rdzv_endpoint}",
                    cause="a containerPort opens nothing, it only tells: here something else than"
                    " torchrun does",
                    remedy=f"write {port} in both places",
                )


RULES: Final = (
    Rule("torchrun-flag", torchrun_flag),
    Rule("script-missing", script_missing),
    Rule("flag-variable", flag_variable),
    Rule("launch-deprecated", launch_deprecated),
    Rule("rdzv-id", rdzv_id),
    Rule("c10d-static-flags", c10d_static_flags),
    Rule("rdzv-conf", rdzv_conf),
    Rule("is-host", is_host),
    Rule("local-addr", local_addr),
    Rule("read-timeout", read_timeout),
    Rule("join-timeout", join_timeout, fault="rendezvous-timeout"),
    Rule("rdzv-port", rdzv_port),
)
