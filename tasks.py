"""Muster's commands. `./invokew --list` shows them, `./invokew --help TASK` the flags of one."""

import errno
import os
import shlex
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from muster.dossier import Dossier
    from muster.explain.explanation import Explanation
    from muster.pins import Variant
    from muster.smoke.settings import Settings, Wish

ROOT = Path(__file__).resolve().parent


def _package_missing(error: ModuleNotFoundError) -> str:
    package = str(error.name).partition(".")[0]
    return f"the package {package} is missing: run ./invokew in place of invoke"


# What only some commands need, each of them imports itself: render is done before the docker SDK
# would be loaded.
try:
    from invoke.context import Context
    from invoke.exceptions import Exit
    from invoke.tasks import task
    from rich.console import Console
    from rich.status import Status

    from muster import launch, node, pins, report
    from muster.errors import (
        DiskFull,
        ExitCode,
        FabricWithoutHosts,
        HostsAndHere,
        MusterError,
        NoLog,
        NoPodLog,
    )
    from muster.finding import Verdict
    from muster.finding import verdict as finding_verdict
    from muster.topology import NodeRange, positive
except ModuleNotFoundError as missing:
    sys.stderr.write(f"muster: {_package_missing(missing)}\n")
    sys.exit(3)


# ---- how it looks -------------------------------------------------------------------------------


class Output(Console):
    """The terminal, or the file or pipe in its place."""

    def on_broken_pipe(self) -> None:
        """End as other programs do whose reader has gone: 128 + SIGPIPE, without a word."""
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(128 + signal.SIGPIPE)


class Terminal:
    """Progress: lines that stay for milestones, one line that changes for the rest."""

    def __init__(self) -> None:
        self.console = Output(highlight=False, soft_wrap=True)
        self.errors = Console(highlight=False, soft_wrap=True, stderr=True)
        self.interactive = self.console.is_terminal and "CI" not in os.environ
        self._status: Status | None = None

    def say(self, text: str) -> None:
        self.console.print(text, markup=False)

    def detail(self, text: str) -> None:
        if not self.interactive:
            return
        line = text.strip()[: self.console.width - 4].replace("[", r"\[")
        if self._status is None:
            self._status = self.console.status(line)
            self._status.start()
        self._status.update(line)

    def detailed(self) -> "Details":
        """The same, with milestones that need no line of their own."""
        return Details(self)

    def quiet(self) -> None:
        """Take the changing line away."""
        if self._status is not None:
            self._status.stop()
            self._status = None

    def confirm(self, question: str) -> bool:
        """Ask on a terminal, where Enter is yes; without one the answer is yes."""
        if not (self.interactive and sys.stdin.isatty()):
            return True
        self.quiet()
        return self.console.input(f"{question} \\[Y/n] ").strip().lower() in ("", "y", "yes")


class Details:
    """Progress that leaves no lines behind."""

    def __init__(self, terminal: Terminal) -> None:
        self.say = self.detail = terminal.detail


class Interrupted(KeyboardInterrupt):
    """A signal that ends Muster as Ctrl-C does: everything is cleaned up on the way out."""


def _interrupt(number: int, _frame: FrameType | None) -> None:
    raise Interrupted(number)


@contextmanager
def command() -> Iterator[Terminal]:
    """Every error becomes one message with its remedy and the exit code; never a traceback."""
    terminal = Terminal()
    for number in (signal.SIGTERM, signal.SIGHUP):
        # nohup has SIGHUP ignored: that stays
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _interrupt)
    try:
        yield terminal
    except Exit:
        raise
    except MusterError as error:
        raise _exit(terminal, str(error), error.exit_code) from None
    except KeyboardInterrupt as error:
        number = error.args[0] if isinstance(error, Interrupted) else signal.SIGINT
        raise _exit(terminal, "interrupted; nothing was left behind", 128 + number) from None
    except ModuleNotFoundError as error:
        message = _package_missing(error)
        raise _exit(terminal, message, ExitCode.MACHINE_LACKS) from None
    except Exception as error:  # noqa: BLE001  no traceback reaches a user
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            full = DiskFull(str(error.filename or "this machine's"), error.strerror or "")
            raise _exit(terminal, str(full), full.exit_code) from None
        raise _exit(terminal, _unforeseen(error), ExitCode.MACHINE_LACKS) from None
    finally:
        terminal.quiet()


def _exit(terminal: Terminal, message: str, code: int) -> Exit:
    terminal.quiet()
    terminal.errors.print(f"muster: {message}", markup=False)
    return Exit(code=code)


def _unforeseen(error: Exception) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({frame.filename}:{frame.lineno})"


# ---- the commands -------------------------------------------------------------------------------

VARIANT = {"variant": "a row of docker/pins.toml (default: by this node's NVIDIA driver)"}
FABRICS = ROOT / "k8s/fabrics"
SLIM = {"slim": "the image that build --slim made"}
JSON = {"json": "also write the result as JSON to this file"}


@task(help={"stop": "stop the dockerd that Muster started", **JSON})
def engine(_c: Context, stop: bool = False, json: str | None = None) -> None:
    """Find a Docker Engine that answers, or install and start one. Half a minute at most."""
    with command() as terminal:
        from muster import dockerd
        from muster import engine as engines

        path = _writable(json)
        if stop:
            dockerd.stop(terminal)
            facts: dict[str, Any] = {"stopped": True}
        else:
            found = engines.ensure(terminal.confirm, terminal)
            terminal.say(f"Docker Engine {found.version} ({found.address}) answers")
            facts = {"version": found.version, "address": str(found.address)}
        _write_json(path, {"command": "engine", **facts})


@task(
    help={
        "base": "build on this image instead of the pinned Debian",
        "offline": "take wheels and source from the cache alone",
        "no-cache": "run every step again, also when nothing changed",
        "slim": "leave out triton and what only torch.compile needs",
        "arch": "compute capabilities for nccl-tests, e.g. 90 (default: the pinned ones)",
        "nccl-tests-source": "a git clone that has the pinned commit of nccl-tests",
        "sbom": "also write the bill of materials as CycloneDX JSON to this file",
        **VARIANT,
        **JSON,
    }
)
def build(
    _c: Context,
    variant: str | None = None,
    base: str | None = None,
    offline: bool = False,
    no_cache: bool = False,
    slim: bool = False,
    arch: str | None = None,
    nccl_tests_source: str | None = None,
    sbom: str | None = None,
    json: str | None = None,
) -> None:
    """Build the pinned image of a variant. Minutes the first time, no time when up to date."""
    with command() as terminal:
        from muster import bom, context, image
        from muster import engine as engines
        from muster import sbom as cyclonedx
        from muster import verify as proving

        path, sbom_path = _writable(json), _writable(sbom)
        checkout = context.Checkout(ROOT)
        pinned, machine = pins.read(checkout.docker), node.look()
        row, why = _variant(pinned, machine, variant)
        request = image.Request(
            row,
            pins.read_lock(pinned, row),
            base=base,
            offline=offline,
            no_cache=no_cache,
            slim=slim,
            archs=image.archs(arch),
            nccl_tests_source=Path(nccl_tests_source) if nccl_tests_source else None,
            on_gpu_node=machine.gpus > 0,
        )
        found = engines.ensure(terminal.confirm, terminal)
        terminal.say(f"variant {row.name} ({why})")
        built = image.build(found, checkout, pinned, request, terminal.confirm, terminal)
        terminal.quiet()
        terminal.say(report.build(built))
        _write_json(path, built.to_dict())
        if built.built or sbom_path is not None:
            facts = bom.read(found.read_file(request.ref, str(bom.PATH)))
            terminal.console.print(report.largest(facts))
            if sbom_path is not None:
                report.write(sbom_path, cyclonedx.cyclonedx(facts))
        if built.built and not built.same_ground:
            proved = proving.verify(found, pinned, row, terminal.detailed(), request.ref)
            terminal.quiet()
            terminal.say(report.proved(proved))
            if proved.verdict is not Verdict.READY:
                terminal.console.print(report.verify(proved))
            _end(proved.verdict)


@task(help={**SLIM, **VARIANT, **JSON})
def verify(
    _c: Context, variant: str | None = None, slim: bool = False, json: str | None = None
) -> None:
    """Prove that an image is what its pins and its lock say, on a CPU. A quarter of a minute."""
    with command() as terminal:
        from muster import engine as engines
        from muster import image
        from muster import verify as proving

        path = _writable(json)
        pinned = pins.read(ROOT / "docker")
        row, _ = _variant(pinned, node.look(), variant)
        found = engines.ensure(terminal.confirm, terminal)
        ref = image.Request(row, (), slim=slim).ref
        result = proving.verify(found, pinned, row, terminal, ref)
        terminal.quiet()
        terminal.console.print(report.verify(result))
        _write_json(path, result.to_dict())
        _end(result.verdict)


@task(help=JSON)
def doctor(_c: Context, json: str | None = None) -> None:
    """Look at this node: GPUs, memory, limits, network, leftovers. A few seconds, no Engine."""
    with command() as terminal:
        from muster.doctor import examine as examining

        path = _writable(json)
        result = examining.doctor()
        terminal.console.print(report.doctor(result))
        _write_json(path, result.to_dict())
        _end(result.verdict)


@task(help={"check": "write nothing, and exit with 1 when a pin is behind", **JSON})
def lock(_c: Context, check: bool = False, json: str | None = None) -> None:
    """Bring docker/pins.toml and the locks up to the registries. Minutes, needs the network."""
    with command() as terminal:
        from muster import engine as engines
        from muster import lock as locking

        path = _writable(json)

        def digest_of(image: str) -> tuple[str, str, tuple[str, ...]]:
            return engines.ensure(terminal.confirm, terminal).registry_digest(image)

        result = locking.lock(ROOT / "docker", digest_of, terminal, check=check)
        terminal.quiet()
        terminal.console.print(report.lock(result))
        _write_json(path, result.to_dict())
        if result.exit_code:
            raise Exit(code=result.exit_code)


@task
def compare_images(_c: Context, left: str, right: str, times: bool = False) -> None:
    """Compare two images layer by layer, to the first difference. Half a minute a gigabyte."""
    with command() as terminal:
        from muster import engine as engines
        from muster import layers

        found = engines.ensure(terminal.confirm, terminal)
        archives = [layers.Chunks(found.save(ref)) for ref in (left, right)]
        comparison = layers.compare(archives[0], archives[1], ignore_times=not times)
        terminal.say(report.comparison(comparison))
        if not comparison.equal:
            raise Exit(code=ExitCode.FINDINGS)


@task(help=JSON)
def compare(_c: Context, json: str | None = None) -> None:
    """Rank the nodes of the smoke reports after --, and name the odd one out. A second."""
    with command() as terminal:
        from muster import compare as comparing

        path = _writable(json)
        found = comparing.compare([Path(each) for each in _after_dashes()])
        terminal.console.print(report.compare(found))
        _write_json(path, found.to_dict())
        _end(finding_verdict(found.findings))


@task(
    help={
        "nproc-per-node": "ranks on each node (default: one a GPU, 2 without)",
        "nnodes": "as many containers that stand for nodes, on one network (default: 1)",
        "shm-size": "the container's /dev/shm (default: docker/pins.toml's)",
        "step-timeout": "seconds that every step may take, in place of its own limit",
        "only": "just these steps, with commas between them",
        "skip": "without these steps",
        "quick": "the steps that take seconds",
        "floor": "busbw that all_reduce must reach in GB/s, or a file like floors.toml",
        "here": "without a container; --here=PYTHON names the interpreter that has torch",
        "hosts": "a file of machines, [user@]name[:port] in each line: one container on each",
        "fabric": "what joins the hosts: ./invokew fabrics lists them",
        "print": "print what each of the hosts is to run, and run nothing",
        "junit": "also write the steps as JUnit XML to this file",
        "html": "also write a report for people to this file",
        **SLIM,
        **VARIANT,
        **JSON,
    },
    optional=["here"],
)
def smoke(
    _c: Context,
    variant: str | None = None,
    nproc_per_node: str | None = None,
    nnodes: str | None = None,
    shm_size: str | None = None,
    step_timeout: str | None = None,
    only: str | None = None,
    skip: str | None = None,
    quick: bool = False,
    floor: str | None = None,
    here: str | None = None,
    hosts: str | None = None,
    fabric: str | None = None,
    print: bool = False,  # noqa: A002  the flag's name
    slim: bool = False,
    json: str | None = None,
    junit: str | None = None,
    html: str | None = None,
) -> None:
    """Run the smoke suite in the image, and say READY or NOT READY. Two minutes; --quick: less."""
    with command() as terminal:
        from muster.smoke import settings as wishes

        kept = Kept.of(json, junit, html)
        pinned, machine = pins.read(ROOT / "docker"), node.look()
        row, why = _variant(pinned, machine, variant)
        wish = wishes.Wish(
            nproc_per_node=nproc_per_node,
            shm_size=shm_size,
            step_timeout=step_timeout,
            nnodes=nnodes,
            only=only,
            skip=skip,
            quick=quick,
            floor=floor,
        )
        where = Where(row, why, slim=slim, here=here, hosts=hosts, fabric=fabric)
        if hosts is not None:
            result = _smoke_on_hosts(where, pinned, wish, terminal, print_only=print)
        elif print or fabric is not None:
            raise FabricWithoutHosts("--print" if print else "--fabric")
        else:
            settings = wishes.settings(pinned, row, machine, wish, where.words)
            result = _smoke_on(machine, where, settings, terminal)
        if result is None:
            return
        terminal.quiet()
        terminal.console.print(report.smoke(result))
        kept.write(result)
        _end(result.verdict)


@task(
    help={
        "name": "of the job: a DNS label",
        "image": "REGISTRY/NAME@sha256:DIGEST",
        "nnodes": "pods, one a node; MIN:MAX for an elastic job",
        "nproc-per-node": "ranks in each pod: one a GPU",
        "fabric": "what joins the nodes: ./invokew fabrics lists them (default: tcp)",
        "kind": "job, jobset or trainjob (default: job)",
        "kubernetes": "the cluster's version, 1.34 to 1.37 (default: 1.37)",
        "namespace": "default: default",
        "script": "what the ranks run (default: train/ddp_demo.py); its arguments follow --",
        "code": "image: the script is in it; configmap: the manifest carries it",
        "cpu": "nodes without GPUs",
        "memory": "limit of a pod, e.g. 64g",
        "shm-size": "its /dev/shm, within that limit",
        "max-restarts": "of the ranks, and of a node (default: 3)",
        "checkpoint": "pvc:NAME, mounted at /checkpoint",
        "checkpoint-s": "seconds that the ranks have to save their work when told to end",
        "deadline-s": "seconds after which Kubernetes ends the job",
        "ttl-s": "seconds after which it removes the ended job",
        "queue": "Kueue's LocalQueue",
        "topology": "label of the level that all pods are to share, with --queue or --gang",
        "gang": "schedule all pods or none, by Kubernetes 1.37 itself",
        "preflight": "a gate before training: the node's steps, and an all_reduce of all nodes",
        "priority-class": "of the pods",
        "node-selector": "KEY=VALUE, again for more",
        "tolerations": "KEY[=VALUE][:EFFECT], again for more",
        "env": "NAME=VALUE for every rank, again for more",
        "spec": "a TOML or YAML file with these fields; flags go before it",
        "output": "the file to write, - for standard output (default: NAME.yaml)",
        **JSON,
    },
    iterable=["node_selector", "tolerations", "env"],
)
def render(
    _c: Context,
    name: str | None = None,
    image: str | None = None,
    nnodes: str | None = None,
    nproc_per_node: str | None = None,
    fabric: str | None = None,
    kind: str | None = None,
    kubernetes: str | None = None,
    namespace: str | None = None,
    script: str | None = None,
    code: str | None = None,
    cpu: bool = False,
    memory: str | None = None,
    shm_size: str | None = None,
    max_restarts: str | None = None,
    checkpoint: str | None = None,
    checkpoint_s: str | None = None,
    deadline_s: str | None = None,
    ttl_s: str | None = None,
    queue: str | None = None,
    topology: str | None = None,
    gang: bool = False,
    preflight: bool = False,
    priority_class: str | None = None,
    node_selector: list[str] | None = None,
    tolerations: list[str] | None = None,
    env: list[str] | None = None,
    spec: str | None = None,
    output: str | None = None,
    json: str | None = None,
) -> None:
    """Write the Kubernetes manifest of a training job, checked. A second, no cluster."""
    given = {key: value for key, value in locals().items() if key not in _NOT_OF_A_SPEC}
    with command() as terminal:
        from muster.manifests import documents
        from muster.manifests import lint as linting
        from muster.manifests import render as rendering
        from muster.manifests import spec as specs

        path = _writable(json)
        asked = specs.from_flags({**given, "arguments": _after_dashes()})
        if spec is not None:
            asked = {**specs.from_file(Path(spec)), **asked}
        wanted = specs.build(asked, FABRICS)
        target = output or f"{wanted.name}.yaml"
        manifest = rendering.render(wanted, ROOT)
        objects = documents.parse(manifest, target)
        findings = linting.lint(objects, kubernetes=wanted.kubernetes, fabric=wanted.fabric)
        if target == "-":
            terminal.say(manifest.rstrip("\n"))
        else:
            report.write(_writable(target) or Path(target), manifest.encode())
            terminal.errors.print(report.findings(findings))
            terminal.say(report.rendered(target, wanted))
        _write_json(path, report.lint("render", target, findings))
        _end(finding_verdict(findings))


_NOT_OF_A_SPEC = frozenset({"_c", "spec", "output", "json"})


def _after_dashes() -> list[str]:
    """The words after --, each on its own: Invoke joins them."""
    return sys.argv[sys.argv.index("--") + 1 :] if "--" in sys.argv else []


@task(
    name="lint-manifest",
    help={
        "file": "the manifest of a training job, Muster's or another's",
        "kubernetes": "the cluster's version, 1.34 to 1.37 (default: 1.37)",
        "fabric": "also compare it with what this fabric needs",
        **JSON,
    },
)
def lint_manifest(
    _c: Context,
    file: str,
    kubernetes: str | None = None,
    fabric: str | None = None,
    json: str | None = None,
) -> None:
    """Check a manifest before it is applied: schema and meaning. A second, no cluster."""
    with command() as terminal:
        from muster import fabric as fabrics_
        from muster.manifests import documents
        from muster.manifests import lint as linting
        from muster.manifests import spec as specs

        path = _writable(json)
        objects = documents.read(Path(file))
        linting.require_torchrun(objects)
        meant = fabrics_.read(FABRICS, fabric) if fabric else None
        version = kubernetes or specs.KUBERNETES[-1]
        findings = linting.lint(objects, kubernetes=version, fabric=meant)
        terminal.console.print(report.findings(findings))
        verdict = finding_verdict(findings)
        terminal.say(verdict)
        _write_json(path, report.lint("lint-manifest", file, findings))
        _end(verdict)


@task(help=JSON)
def fabrics(_c: Context, json: str | None = None) -> None:
    """List what may join nodes, and what each asks of a pod. A second, no cluster."""
    with command() as terminal:
        from muster import fabric as fabrics_

        path = _writable(json)
        known = [fabrics_.read(FABRICS, name) for name in fabrics_.names(FABRICS)]
        terminal.console.print(report.fabrics(known))
        _write_json(
            path, {"command": "fabrics", "fabrics": [report.fabric(each) for each in known]}
        )


@task(
    help={
        "nnodes": "machines, or MIN:MAX",
        "nproc-per-node": "ranks on each: one a GPU",
        "host": "name or address of machine 0, as the others reach it",
        "rdzv-id": "the job's name (default: muster)",
        "script": "what the ranks run; its arguments follow --",
    }
)
def torchrun(
    _c: Context,
    nnodes: str,
    nproc_per_node: str,
    host: str,
    script: str = "train/ddp_demo.py",
    rdzv_id: str = "muster",
) -> None:
    """Print the command that starts each machine of a job, without Kubernetes. A second."""
    with command() as terminal:
        nodes = NodeRange.parse("--nnodes", nnodes)
        ranks = positive("--nproc-per-node", nproc_per_node)
        meeting = launch.Rendezvous(rdzv_id, host)
        for index in range(nodes.most):
            terminal.say(f"# machine {index}{': ' + host if index == 0 else ''}")
            terminal.say(launch.by_hand(nodes, ranks, meeting, script, _after_dashes(), index))


@task(
    help={
        "file": "the manifest: of a Job, a JobSet, a TrainJob or of plain pods",
        "fault": "what goes wrong, e.g. leader-killed; any other word lists them",
        "image": "an image on this Engine in the place of the manifest's",
        "nproc-per-node": "ranks in each pod (default: as many as this machine can)",
        "limit": "seconds that the job may take (default: 300)",
        **JSON,
    }
)
def rehearse(
    _c: Context,
    file: str,
    fault: str | None = None,
    image: str | None = None,
    nproc_per_node: str | None = None,
    limit: str | None = None,
    json: str | None = None,
) -> None:
    """Play a manifest's pods on this Engine, and say READY or NOT READY. Half a minute."""
    with command() as terminal:
        from muster import engine as engines
        from muster.manifests import documents
        from muster.rehearse import faults
        from muster.rehearse import rehearsal as rehearsals

        path = _writable(json)
        wish = rehearsals.Wish(
            image=image,
            nproc_per_node=positive("--nproc-per-node", nproc_per_node) if nproc_per_node else None,
            limit_s=positive("--limit", limit) if limit else rehearsals.LIMIT_S,
            plan=faults.parse(fault) if fault else faults.Plan(),
        )
        objects = documents.read(Path(file))
        found = engines.ensure(terminal.confirm, terminal)
        result = rehearsals.rehearse(found, objects, wish, terminal)
        terminal.quiet()
        terminal.console.print(report.rehearsal(result))
        _write_json(path, result.to_dict())
        _end(result.verdict)


def _words_of(command: str) -> list[str]:
    """The bare words that follow `command`, before --."""
    words = sys.argv[sys.argv.index(command) + 1 :] if command in sys.argv else []
    words = words[: words.index("--")] if "--" in words else words
    pairs = zip(["", *words], words, strict=False)
    bare = [word for before, word in pairs if before not in _VALUED]
    return [word for word in bare if word == "-" or not word.startswith("-")]


_VALUED = frozenset({"--json", "-j"})


@task(
    # Invoke knows no positional argument that may lack
    positional=["log"] if _words_of("explain") else [],
    help={
        "log": "a file, a directory or a quoted glob; several after --; standard input for none",
        "follow": "stay, and tell what goes wrong as it is written; Ctrl-C ends it",
        **JSON,
    },
)
def explain(
    _c: Context, log: str | None = None, follow: bool = False, json: str | None = None
) -> None:
    """Name what went wrong in the logs of a job, and the remedy. Some seconds a gigabyte."""
    with command() as terminal:
        from muster.explain import explanation as explanations
        from muster.explain import lines

        path = _writable(json)
        words = [*filter(None, [log]), *_after_dashes()]
        if not words and sys.stdin.isatty():
            raise NoLog
        files = lines.files(words)
        found = _followed(files, terminal) if follow else explanations.explain(files)
        terminal.quiet()
        terminal.console.print(report.explanation(found))
        _write_json(path, found.to_dict())
        _end(finding_verdict(found.findings))


def _followed(files: tuple[Path, ...], terminal: Terminal) -> "Explanation":
    """Tell of each fault when it comes, until Ctrl-C; what all of it came to."""
    from muster.explain.watch import Watch

    watch = Watch(lambda each: terminal.console.print(report.findings([each.finding()])))
    try:
        watch.follow(files)
    except Interrupted:
        raise
    except KeyboardInterrupt:
        terminal.say("")
    return watch.explanation()


@task(
    name="report",
    help={
        "junit": "also write the steps as JUnit XML to this file",
        "html": "also write a report for people to this file",
        **JSON,
    },
)
def read_back(
    _c: Context, json: str | None = None, junit: str | None = None, html: str | None = None
) -> None:
    """Report what a preflight's pods found, from their logs after --. A second, no cluster."""
    with command() as terminal:
        from muster import podlogs
        from muster.explain import lines

        kept = Kept.of(json, junit, html)
        words = _after_dashes()
        if not words:
            raise NoPodLog
        result = podlogs.read(lines.files(words))
        terminal.console.print(report.smoke(result))
        kept.write(result)
        _end(result.verdict)


@task(
    help={
        "timeout": "seconds that each run may take (default: 120)",
        "logs": "keep the logs in a new folder in this one (default: a temporary one)",
        **JSON,
    }
)
def bisect(
    _c: Context, timeout: str | None = None, logs: str | None = None, json: str | None = None
) -> None:
    """Run the command after -- under one NCCL switch at a time. Minutes, 15 runs and more."""
    with command() as terminal:
        from muster.bisect import bisection

        path = _writable(json)
        result = bisection.bisect(
            _after_dashes(),
            os.environ,
            terminal,
            limit_s=positive("--timeout", timeout) if timeout else bisection.LIMIT_S,
            logs=Path(logs) if logs else None,
        )
        terminal.quiet()
        terminal.console.print(report.bisection(result))
        _write_json(path, result.to_dict())
        if not result.passes:
            raise Exit(code=ExitCode.FINDINGS)


@task
def examples(_c: Context) -> None:
    """Render k8s/examples anew, after a change of k8s/ or of render. A few seconds."""
    with command() as terminal:
        from muster.manifests import examples as exemplary

        for name, text in exemplary.examples(ROOT).items():
            report.write(ROOT / "k8s/examples" / name, text.encode())
            terminal.say(f"k8s/examples/{name}")


@task
def lint(_c: Context) -> None:
    """Check style, types, floors, shell and Dockerfile. Half a minute, no Engine."""
    _run_all(
        ["ruff", "check"],
        ["ruff", "format", "--check"],
        ["mypy"],
        ["lint-imports"],
        ["shellcheck", "invokew", ".ci/run", *map(str, ROOT.glob("docker/*.sh"))],
        ["hadolint", "docker/Dockerfile"],
    )


@task(lint)
def test(_c: Context) -> None:
    """Run every test, those on the real Engine included. Needs root or Docker; 40 minutes."""
    _run_all(
        ["pytest", "--numprocesses=2", "--dist=loadfile", "--durations=10", "tests/unit"],
        ["pytest", "--durations=25", "tests/image", "tests/rehearse"],
    )


@task(name="test-cluster")
def on_cluster(_c: Context) -> None:
    """Run a rendered job on your kubeconfig's cluster. Minutes; without a cluster, no time."""
    _run_all(["pytest", "-rs", "tests/cluster"])


@task
def bench(_c: Context) -> None:
    """Measure the speed goals side by side with plain docker. An hour, 20 GB of disk."""
    names = ("image", "sizes", "smoke", "kubernetes", "explain")
    _run_all(*(["python", "-m", f"bench.{name}"] for name in names))


def _run_all(*programs: list[str]) -> None:
    """Run each under this interpreter's environment, tell its time, and fail if one did."""
    failed: list[str] = []
    folder = Path(sys.executable).parent
    for program in programs:
        started = time.monotonic()
        done = subprocess.run([str(folder / program[0]), *program[1:]], cwd=ROOT, check=False)
        Terminal().say(
            f"{' '.join(program)}: {time.monotonic() - started:.1f} s, exit {done.returncode}"
        )
        if done.returncode:
            failed.append(program[0])
    if failed:
        raise Exit(f"failed: {', '.join(failed)}", code=ExitCode.FINDINGS)


def _end(verdict: Verdict) -> None:
    """A command that found something ends with status 1."""
    if verdict is not Verdict.READY:
        raise Exit(code=ExitCode.FINDINGS)


def _variant(pinned: pins.Pins, machine: node.Node, name: str | None) -> tuple[pins.Variant, str]:
    """The variant that is named, else the one for this node's driver; and why it is that one."""
    if name is not None:
        return pinned.variant(name), "as asked"
    row = pinned.for_driver(machine.driver)
    return row, f"NVIDIA driver {machine.driver}" if machine.driver else "no NVIDIA driver here"


def _writable(path: str | None) -> Path | None:
    if path is None:
        return None
    report.check_writable(Path(path))
    return Path(path)


@dataclass(frozen=True)
class Kept:
    """The files that a run of the suite is kept in."""

    json: Path | None
    junit: Path | None
    html: Path | None

    @classmethod
    def of(cls, json: str | None, junit: str | None, html: str | None) -> "Kept":
        return cls(_writable(json), _writable(junit), _writable(html))

    def write(self, dossier: "Dossier") -> None:
        _write_json(self.json, dossier.to_dict())
        if self.junit is not None:
            report.write(self.junit, report.junit(dossier))
        if self.html is not None:
            from muster.page import page

            report.write(self.html, page.page(dossier))


@dataclass(frozen=True)
class Where:
    """Where the suite runs: which image, and on which machines."""

    variant: "Variant"
    why: str
    slim: bool
    here: str | None
    hosts: str | None
    fabric: str | None

    @property
    def words(self) -> list[str]:
        """The flags that say the same."""
        words = [f"--variant={self.variant.name}", *(["--slim"] if self.slim else [])]
        if self.here is not None:
            words.append(f"--here={self.python}")
        return [*words, *_flag("--hosts", self.hosts), *_flag("--fabric", self.fabric)]

    @property
    def python(self) -> str:
        # Invoke gives True for a flag without its value
        return self.here if isinstance(self.here, str) and self.here else sys.executable

    @property
    def ref(self) -> str:
        from muster import image

        return image.Request(self.variant, (), slim=self.slim).ref


def _smoke_on(
    machine: node.Node, where: Where, settings: "Settings", terminal: Terminal
) -> "Dossier":
    """The suite on this machine, in containers or without."""
    if where.here is not None:
        from muster.smoke import here

        return here.here(ROOT, where.python, machine, settings, _command_line(), terminal)
    from muster import engine as engines
    from muster.smoke import nodes

    found = engines.ensure(terminal.confirm, terminal)
    terminal.say(f"variant {where.variant.name} ({where.why})")
    return nodes.in_containers(
        found, where.variant, where.ref, machine, settings, _command_line(), terminal
    )


def _smoke_on_hosts(
    where: Where, pinned: pins.Pins, wish: "Wish", terminal: Terminal, *, print_only: bool
) -> "Dossier | None":
    """The suite on the hosts of a file; None where its commands were only printed."""
    from muster import fabric as fabrics_
    from muster.smoke import hosts as files
    from muster.smoke import remote
    from muster.smoke import settings as wishes

    assert where.hosts is not None
    if where.here is not None:
        raise HostsAndHere
    asked = None if wish.nnodes is None else positive("--nnodes", wish.nnodes)
    meant = None if where.fabric is None else fabrics_.read(FABRICS, where.fabric)
    hosts = remote.Hosts.of(files.read(Path(where.hosts)), meant, asked)
    wish = replace(wish, nnodes=str(len(hosts.hosts)))
    machine = remote.node_of(where.variant, hosts, wish)
    settings = wishes.settings(pinned, where.variant, machine, wish, where.words)
    if meant is not None and meant.docker.note:
        terminal.say(f"{meant.name}: {meant.docker.note}")
    if not print_only:
        return remote.on_hosts(where.variant, where.ref, hosts, settings, _command_line(), terminal)
    for each in remote.commands(where.variant, where.ref, hosts, settings, {}):
        terminal.say(f"# on {each.host.name}")
        # not wrapped, so that it can be pasted
        terminal.console.print(shlex.join(each.argv), markup=False, soft_wrap=True)
    return None


def _command_line() -> str:
    """The command as it was written, to be written again."""
    words = sys.argv[1:]
    # invokew's own, which whoever types it again leaves out
    return shlex.join(["./invokew", *(words[2:] if words[:1] == ["--search-root"] else words)])


def _flag(name: str, value: str | None) -> list[str]:
    return [] if value is None else [name, value]


def _write_json(path: Path | None, document: dict[str, Any]) -> None:
    if path is not None:
        report.write_json(path, document)
