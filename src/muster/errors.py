"""Every error a user can meet: what happened, the value in question, what to do, the exit code."""

from collections.abc import Sequence
from enum import IntEnum
from pathlib import Path
from typing import ClassVar


class ExitCode(IntEnum):
    """What a command's exit status says (0 is success)."""

    FINDINGS = 1
    WRONG_INPUT = 2
    MACHINE_LACKS = 3


class MusterError(Exception):
    """An error with its remedy; tasks.py prints it and exits with `exit_code`."""

    exit_code: ClassVar[ExitCode]

    def __init__(self, what: str, remedy: str) -> None:
        super().__init__(what)
        self.what = what
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.what}\n  do: {self.remedy}"


class WrongInput(MusterError):
    """What the user gave is wrong."""

    exit_code = ExitCode.WRONG_INPUT


class MachineLacks(MusterError):
    """The machine, its Engine or its network lacks something."""

    exit_code = ExitCode.MACHINE_LACKS


# ---- what the user gave ------------------------------------------------------------------------


class UnknownVariant(WrongInput):
    def __init__(self, variant: str, known: Sequence[str]) -> None:
        super().__init__(
            f"there is no variant {variant!r}", f"use one of: {', '.join(sorted(known))}"
        )


class VariantWithoutLock(WrongInput):
    def __init__(self, variant: str, lock: Path, buildable: Sequence[str]) -> None:
        super().__init__(
            f"variant {variant!r} has its pins but no lock of wheels yet ({lock})",
            f"build one that has: {', '.join(buildable) or 'none has'}",
        )


class PinsBroken(WrongInput):
    def __init__(self, path: Path, why: str) -> None:
        super().__init__(f"{path}: {why}", "correct it, or restore it with git checkout")


class LockBroken(WrongInput):
    def __init__(self, path: Path, line: int, why: str) -> None:
        super().__init__(f"{path}:{line}: {why}", "correct it, or restore it with git checkout")


class UnknownEnginePolicy(WrongInput):
    def __init__(self, value: str) -> None:
        super().__init__(
            f"MUSTER_ENGINE is {value!r}",
            "set it to existing (never install or start an Engine), or unset it",
        )


class NotASize(WrongInput):
    def __init__(self, text: str) -> None:
        super().__init__(
            f"{text!r} is not a size", "write a number and a unit as Docker does: 64m, 1g, 16g"
        )


class NotANumber(WrongInput):
    def __init__(self, flag: str, text: str) -> None:
        super().__init__(f"{flag} {text!r} is not a whole number above 0", f"write e.g. {flag} 2")


class MoreProcessesThanGpus(WrongInput):
    def __init__(self, nproc_per_node: int, gpus: int) -> None:
        super().__init__(
            f"--nproc-per-node {nproc_per_node} on a node with {gpus} GPUs: NCCL refuses two ranks"
            " on one GPU",
            f"use --nproc-per-node {gpus} or fewer, or leave it out to use every GPU",
        )


class MoreRanksThanGpus(WrongInput):
    def __init__(self, nnodes: int, nproc_per_node: int, gpus: int) -> None:
        super().__init__(
            f"--nnodes {nnodes} with --nproc-per-node {nproc_per_node} on a machine with {gpus}"
            " GPUs: NCCL refuses two ranks on one GPU",
            f"choose the two so that there are {gpus} ranks or fewer in all",
        )


class MoreNodesThanHosts(WrongInput):
    def __init__(self, nnodes: int, hosts: int) -> None:
        super().__init__(
            f"--nnodes {nnodes}, and the file has {hosts} hosts",
            "name more hosts, or leave --nnodes out to use all of them",
        )


class RanksOfHostsUnknown(WrongInput):
    def __init__(self, variant: str) -> None:
        super().__init__(
            f"how many GPUs the hosts have is not known here, and {variant} runs a rank on each",
            "say it: --nproc-per-node 8",
        )


class HostsAndHere(WrongInput):
    def __init__(self) -> None:
        super().__init__(
            "--hosts runs the suite in a container on each host, and --here without one",
            "leave out one of the two",
        )


class FabricWithoutHosts(WrongInput):
    def __init__(self, flag: str) -> None:
        super().__init__(
            f"{flag} is about the hosts of --hosts, and there are none",
            f"give --hosts FILE, or leave {flag} out",
        )


class NotAFloor(WrongInput):
    def __init__(self, text: str) -> None:
        super().__init__(
            f"--floor {text!r} is not a bandwidth that can be reached",
            "give GB/s above 0, e.g. --floor 300, or a file as src/muster/bandwidth/floors.toml",
        )


class NoSuchStep(WrongInput):
    def __init__(self, name: str, known: Sequence[str]) -> None:
        super().__init__(
            f"the smoke suite has no step {name!r}", f"its steps are: {', '.join(known)}"
        )


class StepNeedsNodes(WrongInput):
    def __init__(self, name: str) -> None:
        super().__init__(
            f"the step {name} is between nodes, and there is one",
            "give it several: --nnodes 2, which are containers on this machine",
        )


class NoStepLeft(WrongInput):
    def __init__(self) -> None:
        super().__init__("no step of the smoke suite is left to run", "skip fewer of them")


class ImageNotBuilt(WrongInput):
    def __init__(self, ref: str, variant: str) -> None:
        super().__init__(
            f"the image {ref} is not on this Engine",
            f"run ./invokew build --variant {variant}{' --slim' if ref.endswith('-slim') else ''}",
        )


class NotMustersImage(WrongInput):
    def __init__(self, ref: str, label: str) -> None:
        super().__init__(
            f"{ref} is not an image of Muster's: it has no label {label}",
            "name one that ./invokew build made, or that was built on one",
        )


class BaseNotFound(WrongInput):
    def __init__(self, ref: str, evidence: str) -> None:
        super().__init__(
            f"--base {ref} is neither on this Engine nor to be pulled ({evidence})",
            "give an image that `docker images` lists, or leave --base out to use the pinned one",
        )


class DigestGone(WrongInput):
    def __init__(self, ref: str) -> None:
        super().__init__(
            f"the registry answers, but no longer has {ref}",
            "pin a digest that exists in docker/pins.toml, or give --base REF",
        )


class CannotWrite(WrongInput):
    def __init__(self, path: Path, why: str) -> None:
        super().__init__(f"cannot write {path}: {why}", "give a path in a folder you can write to")


class NotThePinnedCommit(WrongInput):
    def __init__(self, folder: Path, commit: str) -> None:
        super().__init__(
            f"--nccl-tests-source {folder} is no git repository that has the pinned commit"
            f" {commit}",
            "fetch that commit there, or leave the flag out",
        )


class NotArchitectures(WrongInput):
    def __init__(self, text: str) -> None:
        super().__init__(
            f"--arch {text!r} is not a list of compute capabilities",
            "write them with commas and without the point: --arch 90, --arch 80,90",
        )


class ArchiveUnreadable(WrongInput):
    def __init__(self, archive: str, why: str) -> None:
        super().__init__(
            f"cannot read {archive} as an image: {why}",
            "give what `docker save IMAGE` writes, with one image in it",
        )


class WheelYanked(WrongInput):
    def __init__(self, wheel: str, variant: str) -> None:
        super().__init__(
            f"{wheel}, which variant {variant!r} needs, was yanked from its index",
            "find out why; nothing was written",
        )


class UnknownDigestKind(WrongInput):
    def __init__(self, image: str, digest: str, evidence: str) -> None:
        super().__init__(
            f"{image} is {digest} now, and what that names is not clear: {evidence}",
            "pin it by hand when you know; nothing was written",
        )


class TagMoved(WrongInput):
    def __init__(self, tag: str, pinned: str, found: str) -> None:
        super().__init__(
            f"the tag {tag} of nccl-tests is commit {found} now, pinned {pinned}",
            "a tag does not move by itself: find out why; nothing was written",
        )


class NodesWithoutContainers(WrongInput):
    def __init__(self, nnodes: int) -> None:
        super().__init__(
            f"--nnodes {nnodes} stands for nodes by containers, and --here has none",
            "leave out one of the two",
        )


class ShmSizeWithoutContainer(WrongInput):
    def __init__(self) -> None:
        super().__init__(
            "--shm-size with --here: there is no container to give it to",
            "leave one of them out; this machine's own /dev/shm is what --here checks",
        )


class WrongPython(WrongInput):
    def __init__(self, python: str, missing: Sequence[str]) -> None:
        super().__init__(
            f"--here: {python} cannot import {', '.join(missing)}",
            f"name an interpreter that can (--here=/path/to/python),"
            f" or install: {python} -m pip install {' '.join(missing)}",
        )


class NotAPython(WrongInput):
    def __init__(self, python: str, why: str) -> None:
        super().__init__(
            f"--here: {python} does not run ({why})",
            "name a Python interpreter that has torch: --here=/path/to/python",
        )


# ---- what the machine lacks --------------------------------------------------------------------


class MissingTool(MachineLacks):
    def __init__(self, tool: str, remedy: str) -> None:
        super().__init__(f"{tool} is not on PATH", remedy)


class PackagesNotInstalled(MachineLacks):
    def __init__(self, packages: Sequence[str], last_lines: Sequence[str]) -> None:
        super().__init__(
            "\n".join(
                [
                    f"apt-get could not install {' '.join(packages)}",
                    *(f"  | {line}" for line in last_lines),
                ]
            ),
            "make Debian's packages reachable, or install what is named by hand",
        )


class NoEngine(MachineLacks):
    def __init__(self, tried: Sequence[str], remedy: str) -> None:
        super().__init__(f"no Docker Engine answers ({'; '.join(tried)})", remedy)
        self.tried = tried


class EngineRefusesUser(MachineLacks):
    def __init__(self, address: str) -> None:
        super().__init__(
            f"the Docker Engine at {address} does not admit this user (permission denied)",
            "join the docker group (sudo usermod -aG docker $USER, then log in again), or use sudo",
        )


class EngineLost(MachineLacks):
    def __init__(self, during: str, evidence: str) -> None:
        super().__init__(
            f"the Docker Engine stopped answering during {during} ({evidence})",
            "look at dockerd's log, start it (./invokew engine) and run the command again",
        )


class EngineRefused(MachineLacks):
    def __init__(self, doing: str, evidence: str) -> None:
        super().__init__(
            f"the Docker Engine refused {doing}: {evidence}",
            "what it names is missing or forbidden on this node; correct that and run again",
        )


class DockerdNotStopped(MachineLacks):
    def __init__(self, pid: int) -> None:
        super().__init__(
            f"this user may not stop the dockerd that Muster started (process {pid})",
            "run ./invokew engine --stop as root",
        )


class DockerdFailed(MachineLacks):
    def __init__(self, evidence: str, log: Path) -> None:
        super().__init__(f"dockerd did not start: {evidence}", f"read {log}")


class NotOurEngine(MachineLacks):
    def __init__(self, why: str) -> None:
        super().__init__(
            f"there is no dockerd here that Muster started ({why})",
            "stop a dockerd the way it was started; Muster stops only its own",
        )


class NoBuildKitClient(MachineLacks):
    def __init__(self, found: Sequence[str]) -> None:
        super().__init__(
            f"no docker client here can build with BuildKit ({'; '.join(found) or 'none on PATH'})",
            "install buildx: docker-buildx on Debian 13, docker-buildx-plugin from Docker's own"
            " packages; on Debian 12 docker.io, whose client has the builder inside dockerd",
        )


class DiskFull(MachineLacks):
    def __init__(self, where: str, evidence: str) -> None:
        super().__init__(
            f"the disk is full: {where} ({evidence})",
            "make room (docker system df shows what the Engine holds; the wheelhouse can be"
            " deleted whole) and run the command again; nothing half-made was kept",
        )


class WheelhouseIncomplete(MachineLacks):
    def __init__(self, missing: Sequence[str], wheelhouse: Path) -> None:
        super().__init__(
            f"--offline, and the wheelhouse {wheelhouse} lacks {len(missing)} of the lock's wheels:"
            f" {', '.join(missing)}",
            "run build once without --offline, or copy the wheels there",
        )


class WheelsNotFetched(MachineLacks):
    def __init__(self, missing: Sequence[str], evidence: str) -> None:
        super().__init__(
            f"pip could not fetch {', '.join(missing)}: {evidence}",
            "check the network and pip's own configuration (pip config list). A version that ends"
            " in +cpu is not on PyPI: it needs PyTorch's index as an extra index, or a folder with"
            " the wheel as find-links",
        )


class WheelHashDiffers(MachineLacks):
    def __init__(self, wheel: str, expected: str, actual: str) -> None:
        super().__init__(
            f"{wheel} is not the wheel that the lock pins: sha256 {actual}, pinned {expected}",
            "if it lies in the wheelhouse, delete it and build again; if it comes back, the index"
            " serves another file under that name: do not use it",
        )


class NcclTestsUnreachable(MachineLacks):
    def __init__(self, repository: str, evidence: str) -> None:
        super().__init__(
            f"the source of nccl-tests cannot be had from {repository}: {evidence}",
            "make it reachable, set a mirror (git config url.MIRROR.insteadOf REPOSITORY), or give"
            " a clone with --nccl-tests-source DIR",
        )


class DriverTooOld(MachineLacks):
    def __init__(self, driver: str, oldest: int) -> None:
        super().__init__(
            f"the NVIDIA driver {driver} is older than any variant runs on",
            f"install driver {oldest} or newer, or name a variant with --variant",
        )


class DriverNotUnderstood(MachineLacks):
    def __init__(self, driver: str) -> None:
        super().__init__(
            f"the NVIDIA driver calls its version {driver!r}, which begins with no number",
            "name a variant with --variant",
        )


class BuildFailed(MachineLacks):
    def __init__(self, step: str, last_lines: Sequence[str]) -> None:
        super().__init__(
            "\n".join([f"the build failed at {step}", *(f"  | {line}" for line in last_lines)]),
            "the last lines above name the cause; nothing was tagged",
        )


class BaseNotMade(MachineLacks):
    def __init__(self, suite: str, last_lines: Sequence[str]) -> None:
        super().__init__(
            "\n".join(
                [
                    f"mmdebstrap could not make Debian {suite}",
                    *(f"  | {line}" for line in last_lines),
                ]
            ),
            "make Debian's packages reachable, or give an image with --base REF",
        )


class WrongArchitecture(MachineLacks):
    def __init__(self, engine: str, pinned: str) -> None:
        super().__init__(
            f"this Engine runs {engine} images, and the wheels are pinned for {pinned}",
            f"use an Engine on {pinned}",
        )


class SuiteDidNotReport(MachineLacks):
    def __init__(self, exit_status: str, last_lines: Sequence[str]) -> None:
        super().__init__(
            "\n".join(
                [
                    f"the smoke suite ended without a report ({exit_status})",
                    *(f"  | {line}" for line in last_lines),
                ]
            ),
            "if it was killed, look at the node's memory; else ./invokew verify names what in the"
            " image is not as it was built",
        )


class ProofsDidNotReport(MachineLacks):
    def __init__(self, ref: str, ending: str, last_lines: Sequence[str]) -> None:
        super().__init__(
            "\n".join(
                [
                    f"the proofs in {ref} ended before the last of them ({ending})",
                    *(f"  | {line}" for line in last_lines),
                ]
            ),
            "if it was killed, look at the node's memory; else build the image again, so that it"
            " has this checkout's proofs",
        )


# ---- render and rehearse -----------------------------------------------------------------------


class SpecWrong(WrongInput):
    """`where` is a flag or FILE:LINE, `wanted` what would fit there."""

    def __init__(self, where: str, value: object, wanted: str) -> None:
        shown = repr(value) if len(repr(value)) <= 80 else f"{repr(value)[:80]}…"
        super().__init__(f"{where} is {shown}" if value != "" else where, f"give {wanted}")


class PodImageMissing(WrongInput):
    def __init__(self, image: str, pod: str) -> None:
        super().__init__(
            f"the image {image} of {pod} is not on this Engine",
            "docker pull it, or rehearse with another one: --image muster:cpu",
        )


class TooManyPods(WrongInput):
    def __init__(self, pods: int, most: int) -> None:
        super().__init__(
            f"the manifest makes {pods} pods, and a rehearsal plays at most {most}",
            "render the same job with fewer nodes, and rehearse that",
        )


class UnknownFault(WrongInput):
    def __init__(self, text: str, known: Sequence[str]) -> None:
        super().__init__(
            f"there is no fault {text!r}",
            f"use one of: {', '.join(known)}; those that take seconds as NAME:SECONDS",
        )


class FaultNeedsNodes(WrongInput):
    def __init__(self, fault: str, why: str) -> None:
        super().__init__(f"the fault {fault} cannot be played: {why}", "choose another fault")


# ---- manifests ---------------------------------------------------------------------------------


class ManifestUnreadable(WrongInput):
    def __init__(self, file: str, line: int | None, what: str) -> None:
        where = file if line is None else f"{file}:{line}"
        super().__init__(f"{where}: {what}", "correct it; kubectl apply would refuse it too")


class NoTorchrun(WrongInput):
    def __init__(self, file: str, kinds: Sequence[str]) -> None:
        super().__init__(
            f"{file}: no container here runs torchrun ({', '.join(kinds)})",
            "give the manifest of a training job; torchrun is looked for in command and args, also"
            " in the script of sh -c",
        )


class UnknownKubernetes(WrongInput):
    def __init__(self, version: str, known: Sequence[str]) -> None:
        super().__init__(
            f"there are no schemas for Kubernetes {version!r}", f"use one of: {', '.join(known)}"
        )


# ---- launch ------------------------------------------------------------------------------------


class NotNodes(WrongInput):
    def __init__(self, flag: str, text: str, why: str) -> None:
        super().__init__(
            f"{flag} {text!r} {why}",
            f"write a number of nodes ({flag} 4), or MIN:MAX for an elastic job ({flag} 2:4)",
        )


class NoCompletionIndex(WrongInput):
    def __init__(self, found: str, nodes: str) -> None:
        super().__init__(
            f"JOB_COMPLETION_INDEX is {found}, with --nnodes={nodes}",
            "run the launcher in the pods of a Job with completionMode: Indexed and as many"
            " completions as nodes; without Kubernetes, ./invokew torchrun prints what to run on"
            " each node",
        )


class NoRendezvous(WrongInput):
    def __init__(self, flag: str, found: str) -> None:
        super().__init__(
            f"the launcher needs {flag} among torchrun's flags, and {found}",
            "give --nnodes=N --rdzv-backend=c10d --rdzv-endpoint=NAME-OF-POD-0:29400, then the"
            " script",
        )


class NoScript(WrongInput):
    def __init__(self, script: str, folder: str) -> None:
        super().__init__(
            f"there is no script {script!r} (looked for from {folder})",
            "name a script that the image or a volume of the pod holds, by its full path",
        )


# ---- fabrics -----------------------------------------------------------------------------------


class UnknownFabric(WrongInput):
    """`nearest` are those that the user may have meant: near in spelling, or its shapes."""

    def __init__(self, fabric: str, nearest: Sequence[str], known: Sequence[str]) -> None:
        meant = f"did you mean {' or '.join(nearest)}? " if nearest else ""
        super().__init__(f"there is no fabric {fabric!r}", f"{meant}use one of: {', '.join(known)}")


class FabricWrong(WrongInput):
    def __init__(self, path: Path, line: int, key: str, why: str) -> None:
        what = f"{key} {why}" if key else why
        super().__init__(f"{path}:{line}: {what}", "correct it, or restore it with git checkout")


# ---- explain -----------------------------------------------------------------------------------


class NoLog(WrongInput):
    def __init__(self) -> None:
        super().__init__(
            "there is no log: standard input is this terminal",
            "give a file, a directory or a quoted glob, or pipe a log in:"
            " kubectl logs POD | ./invokew explain",
        )


class LogMissing(WrongInput):
    def __init__(self, word: str) -> None:
        super().__init__(
            f"there is no log {word!r}",
            "give a file, a directory with files in it, a quoted glob, or pipe the log in",
        )


class LogUnreadable(WrongInput):
    def __init__(self, file: str, why: str) -> None:
        super().__init__(f"cannot read {file}: {why}", "give a file that you may read")
        self.file, self.why = file, why


class CatalogueBroken(WrongInput):
    def __init__(self, path: Path, why: str) -> None:
        super().__init__(f"{path}: {why}", "correct it, or restore it with git checkout")


# ---- bisect ------------------------------------------------------------------------------------


class NoCommand(WrongInput):
    def __init__(self) -> None:
        super().__init__(
            "there is no command to run",
            "give it after --: ./invokew bisect -- torchrun --nproc-per-node=2 train/all_reduce.py",
        )


class CommandNotStarted(WrongInput):
    def __init__(self, program: str, why: str) -> None:
        super().__init__(
            f"cannot run {program!r}: {why}",
            "give a program and its arguments, each a word of its own; what a shell is to read goes"
            " into sh -c '...'",
        )


# ---- several hosts -----------------------------------------------------------------------------


class HostsUnreadable(WrongInput):
    def __init__(self, path: Path, why: str) -> None:
        super().__init__(
            f"cannot read {path}: {why}",
            "give a file of text with one host a line: [user@]name[:port]",
        )


class HostsWrong(WrongInput):
    def __init__(self, path: Path, line: int, why: str) -> None:
        super().__init__(
            f"{path}:{line}: {why}",
            "write one host a line as [user@]name[:port], by the name that the others reach it by",
        )


class NoHosts(WrongInput):
    def __init__(self, path: Path) -> None:
        super().__init__(f"{path} names no host", "write one host a line: [user@]name[:port]")


class HostsNotReady(MachineLacks):
    """`problems` are "host: what is wrong", one a line; `remedies` fit their kinds."""

    def __init__(self, problems: Sequence[str], remedies: Sequence[str]) -> None:
        lines = [
            "not every host is ready; nothing was started",
            *(f"  | {each}" for each in problems),
        ]
        super().__init__("\n".join(lines), "; ".join(remedies))


class HostsDisagree(MachineLacks):
    """`ids` are "image id: hosts", one a line."""

    def __init__(self, ref: str, ids: Sequence[str]) -> None:
        lines = [
            f"{ref} is not one and the same image on all hosts",
            *(f"  | {each}" for each in ids),
        ]
        super().__init__(
            "\n".join(lines),
            f"copy one of them to all: docker save {ref} | ssh HOST docker load; or push it to a"
            " registry, and docker pull it on every host",
        )


# ---- reports -----------------------------------------------------------------------------------


class ReportUnreadable(WrongInput):
    def __init__(self, path: Path, why: str) -> None:
        super().__init__(f"cannot read {path}: {why}", "give a file that smoke --json FILE wrote")


class ReportBroken(WrongInput):
    def __init__(self, path: Path, why: str) -> None:
        super().__init__(f"{path}: {why}", "give a file as smoke --json FILE wrote it, whole")


class ReportOfOtherSchema(WrongInput):
    def __init__(self, path: Path, found: object, wanted: int) -> None:
        super().__init__(
            f"{path} has schema {found!r:.40}, this Muster reads {wanted}",
            "make the report anew with this Muster, or read it with the one that wrote it",
        )


class TooFewReports(WrongInput):
    def __init__(self, nodes: int) -> None:
        super().__init__(
            f"there is nothing to compare: the reports hold {nodes} nodes with results",
            "give reports of two nodes or more: ./invokew compare -- A.json B.json",
        )


class ReportsOfDifferentImages(WrongInput):
    def __init__(self, first: Path, one: str, second: Path, other: str) -> None:
        super().__init__(
            f"{first} is of {one}, {second} of {other}: what differs may be the image",
            "run smoke on every node with one and the same image",
        )


class NoPodLog(WrongInput):
    def __init__(self) -> None:
        super().__init__(
            "there is no log to read",
            "give the logs of a preflight's pods: ./invokew report -- demo.log, made by"
            " kubectl logs --prefix --tail=-1 -l app.kubernetes.io/name=demo -c preflight",
        )


class PodLogWithoutResults(WrongInput):
    def __init__(self, file: str) -> None:
        super().__init__(
            f"{file} has no results of a preflight",
            "give the whole log of the container preflight: kubectl logs --prefix --tail=-1 -l"
            f" app.kubernetes.io/name=NAME -c preflight; of other logs: ./invokew explain {file}",
        )


class PodLogBroken(WrongInput):
    def __init__(self, file: str, line: int, why: str) -> None:
        super().__init__(
            f"{file}:{line}: {why}",
            "give the log as the pod wrote it, and read it with the Muster of the pod's image",
        )


# ---- bandwidth ---------------------------------------------------------------------------------


class FloorsWrong(WrongInput):
    def __init__(self, path: Path, why: str) -> None:
        super().__init__(
            f"{path}: {why}",
            "correct it; src/muster/bandwidth/floors.toml shows what a file of floors looks like",
        )
