"""The smoke suite, tests/smoke: started in a container or here, and read into a Verdict."""

import contextlib
import os
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from muster import finding, process, size, steps
from muster.engine import Ask, AskRefused, Container, ContainerSpec, Engine
from muster.errors import (
    ImageNotBuilt,
    MoreProcessesThanGpus,
    NotAPython,
    NotMustersImage,
    ShmSizeWithoutContainer,
    SuiteDidNotReport,
    WrongPython,
)
from muster.explain.explanation import with_cause
from muster.finding import Finding, Outcome, Severity, Verdict
from muster.node import Node
from muster.pins import LABEL_VARIANT, Accelerator, Pins, Variant
from muster.progress import Progress
from muster.steps import Log, Step
from muster.topology import Topology, positive

SCHEMA = 1
DEFAULT_NPROC_PER_NODE = 2
SHM_FLAG = "--shm-size"
# a backstop inside the container; every step has its own, shorter limit
SUITE_LIMIT_S = 3600
_NEEDED = ("torch", "pytest", "pytest_timeout", "pytest_reportlog")


@dataclass(frozen=True, kw_only=True)
class Result:
    """What the suite found. `run` says where and with which flags it ran."""

    verdict: Verdict
    run: Mapping[str, Any]
    steps: tuple[Step, ...]
    findings: tuple[Finding, ...]
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        return {"schema": SCHEMA, "command": "smoke", **asdict(self)}


@dataclass(frozen=True)
class Settings:
    """What the user chose. `shm_named_by` says where `shm_bytes` comes from."""

    topology: Topology
    shm_bytes: int
    shm_named_by: str
    step_timeout_s: int | None


@dataclass(frozen=True)
class Wish:
    """What the user wrote for the run, unread; None where nothing was."""

    nproc_per_node: str | None = None
    shm_size: str | None = None
    step_timeout: str | None = None


def settings(pinned: Pins, variant: Variant, node: Node, wish: Wish) -> Settings:
    """What `wish` and the defaults come to on this node."""
    nproc_per_node = _number("--nproc-per-node", wish.nproc_per_node)
    step_timeout_s = _number("--step-timeout", wish.step_timeout)
    place = _topology(nproc_per_node, node, variant)
    if wish.shm_size is None:
        return Settings(place, pinned.shm_bytes, "docker/pins.toml", step_timeout_s)
    return Settings(place, size.parse(wish.shm_size), SHM_FLAG, step_timeout_s)


def _number(flag: str, text: str | None) -> int | None:
    return None if text is None else positive(flag, text)


def _topology(nproc_per_node: int | None, node: Node, variant: Variant) -> Topology:
    """One node with `nproc_per_node` ranks: by default one a GPU, on a CPU two."""
    if variant.accelerator is Accelerator.CPU or node.gpus == 0:
        return Topology(1, nproc_per_node or DEFAULT_NPROC_PER_NODE)
    if nproc_per_node is not None and nproc_per_node > node.gpus:
        raise MoreProcessesThanGpus(nproc_per_node, node.gpus)
    return Topology(1, nproc_per_node or node.gpus)


# ---- in a container ----------------------------------------------------------------------------


def in_container(
    engine: Engine,
    variant: Variant,
    ref: str,
    node: Node,
    settings: Settings,
    progress: Progress,
) -> Result:
    """Run the suite in a container of `ref`, a `variant`; ask for the limits, go on without."""
    started = time.monotonic()
    image = engine.image(ref)
    if image is None:
        raise ImageNotBuilt(ref, variant.name)
    if LABEL_VARIANT not in image.labels:
        raise NotMustersImage(ref, LABEL_VARIANT)
    if swept := engine.sweep():
        progress.say(f"removed {swept} containers of commands that were killed")
    findings: list[Finding] = []
    spec = _spec(variant, ref, node, settings)
    log = Log(progress)
    with contextlib.ExitStack() as stack:
        container, spec = _start(stack, engine, spec, findings)
        flags = _flags(spec, settings)
        progress.say(f"{image.ref} with {', '.join(f'{k}: {v}' for k, v in flags.items())}")
        for line in container.lines():
            log.read_line(line)
        ending = container.ending("the smoke suite")
        errors = list(container.stderr)
    run = {"image": image.ref, "id": image.id, "engine": engine.version, **flags}
    return _result(log, ending, errors, findings, run, started)


def _spec(variant: Variant, ref: str, node: Node, settings: Settings) -> ContainerSpec:
    """The one place that says how a container of Muster's is run.

    The stack limit is left alone: unlimited makes glibc give every thread 2 MB.
    """
    asks = {Ask.MEMLOCK}
    if node.gpus and variant.accelerator is Accelerator.CUDA:
        asks.add(Ask.GPUS)
    if node.infiniband:
        asks.add(Ask.INFINIBAND)
    suite = _pytest("python", Path("/opt/muster"), "smoke", settings, node.infiniband)
    return ContainerSpec(
        image=ref,
        command=(
            *("timeout", "--kill-after=10", str(SUITE_LIMIT_S)),
            *steps.reporting(suite),
        ),
        shm_bytes=settings.shm_bytes,
        asks=frozenset(asks),
        cap_add=("IPC_LOCK",),
    )


def _start(
    stack: contextlib.ExitStack, engine: Engine, spec: ContainerSpec, findings: list[Finding]
) -> tuple[Container, ContainerSpec]:
    """The started container, without what the Engine refused; a Finding for each refusal."""
    while True:
        try:
            return stack.enter_context(engine.run(spec)), spec
        except AskRefused as refused:
            findings.append(_refusal(refused))
            spec = replace(spec, asks=spec.asks - {refused.ask})
            if refused.ask is Ask.MEMLOCK:
                # IPC_LOCK lifts the limit too, but only for root: other users do not inherit it
                spec = replace(spec, user="0:0")


def _refusal(refused: AskRefused) -> Finding:
    what, remedy, severity = {
        Ask.MEMLOCK: (
            "the Engine refuses --ulimit memlock=-1; the suite ran as root with IPC_LOCK instead",
            "give dockerd the right: LimitMEMLOCK=infinity in its unit, or CAP_SYS_RESOURCE",
            # step memlock decides whether memory can be locked all the same
            Severity.WARNING,
        ),
        Ask.GPUS: (
            "the Engine cannot give GPUs to a container; the suite ran without",
            "install nvidia-container-toolkit, run nvidia-ctk runtime configure, restart dockerd",
            Severity.ERROR,
        ),
        Ask.INFINIBAND: (
            "the Engine cannot give /dev/infiniband to a container; the suite ran without",
            "check that the Engine runs on this node and may pass devices",
            Severity.ERROR,
        ),
    }[refused.ask]
    return Finding(
        severity=severity,
        what=what,
        where="the Docker Engine",
        evidence=refused.evidence,
        cause="this Engine or the machine it runs on lacks the right or the device",
        remedy=remedy,
    )


def _flags(spec: ContainerSpec, settings: Settings) -> dict[str, str]:
    """The run's flags in words, as the output and the report state them."""
    return {
        "shm": f"{size.binary(spec.shm_bytes)} ({settings.shm_named_by})",
        "memlock": "unlimited" if Ask.MEMLOCK in spec.asks else "refused, so root with IPC_LOCK",
        "gpus": "all" if Ask.GPUS in spec.asks else "none",
        "infiniband": "/dev/infiniband" if Ask.INFINIBAND in spec.asks else "none",
        "nproc_per_node": str(settings.topology.nproc_per_node),
    }


# ---- without a container -----------------------------------------------------------------------


def here(root: Path, python: str, node: Node, settings: Settings, progress: Progress) -> Result:
    """Run the same suite under the interpreter `python` of this machine."""
    started = time.monotonic()
    if settings.shm_named_by == SHM_FLAG:
        raise ShmSizeWithoutContainer
    _check_python(python)
    log = Log(progress)
    suite = _pytest(python, root, "tests/smoke", settings, node.infiniband)
    environment = {**os.environ, "PYTHONPATH": str(root / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    # torchrun leaves a folder of logs behind in TMPDIR at every start
    with tempfile.TemporaryDirectory(prefix="muster-smoke-") as folder:
        environment["TMPDIR"] = folder
        done = process.run(steps.reporting(suite), env=environment, on_line=log.read_line)
    errors = [line for line in done.last_lines(40) if not line.startswith("{")]
    run = {"python": python, "nproc_per_node": str(settings.topology.nproc_per_node)}
    return _result(log, done.ending, errors, [], run, started)


def _check_python(python: str) -> None:
    """That `python` runs and has what the suite needs; WrongPython names what is missing."""
    code = (
        "import importlib.util as u, sys\n"
        f"print(' '.join(n for n in {_NEEDED!r} if u.find_spec(n) is None))"
    )
    try:
        found = process.run([python, "-c", code], limit_s=60)
    except OSError as error:
        raise NotAPython(python, error.strerror or str(error)) from None
    if not found.ok:
        raise NotAPython(python, found.ending)
    if missing := found.output.split():
        raise WrongPython(python, [name.replace("_", "-") for name in missing])


# ---- the suite's own words ---------------------------------------------------------------------


def _pytest(python: str, root: Path, suite: str, settings: Settings, infiniband: bool) -> list[str]:
    argv = [
        *(python, "-m", "pytest", str(root / suite), "-p", "no:terminal"),
        *("--report-log", steps.REPORT, "--train", str(root / "train")),
        *("--nproc-per-node", str(settings.topology.nproc_per_node)),
        *("--shm-bytes", str(settings.shm_bytes)),
    ]
    if infiniband:
        argv += ["--infiniband"]
    if settings.step_timeout_s is not None:
        argv += ["--step-timeout", str(settings.step_timeout_s)]
    return argv


def _result(
    log: Log,
    ending: str,
    errors: list[str],
    findings: list[Finding],
    run: dict[str, Any],
    started: float,
) -> Result:
    if not log.is_whole:
        if not log.steps and log.running is None:
            raise SuiteDidNotReport(ending, [*errors, *log.complaints][-10:])
        findings.append(_broken_off(log, ending, errors))
    done = tuple(_with_causes(step) for step in log.steps)
    findings += [each for step in done for each in step.findings]
    return Result(
        verdict=finding.verdict(findings),
        run=run,
        steps=done,
        findings=tuple(findings),
        seconds=round(time.monotonic() - started, 3),
    )


def _with_causes(step: Step) -> Step:
    """`step`, and of one that failed the cause that its ranks' output shows."""
    if step.outcome is not Outcome.FAILED:
        return step
    return replace(step, findings=tuple(with_cause(each, step.output) for each in step.findings))


def _broken_off(log: Log, ending: str, errors: list[str]) -> Finding:
    where = log.running or "between two steps"
    return Finding(
        severity=Severity.ERROR,
        what=f"the suite broke off during {where} ({ending})",
        where=where,
        evidence="\n".join(errors[-5:]) or ending,
        cause="it was ended from outside: by the kernel when memory ran out, or by somebody",
        remedy="look at the node's memory (dmesg), then run the suite again",
    )
