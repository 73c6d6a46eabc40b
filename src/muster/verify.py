"""An image against its pins: the proofs that it makes inside, those that only the host can make."""

import contextlib
import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from muster import finding, pins, proofs
from muster.engine import ContainerSpec, Engine, Image
from muster.errors import ImageNotBuilt, NotMustersImage, ProofsDidNotReport
from muster.finding import Finding, Verdict
from muster.image import LABEL_BASE, LABEL_INPUTS, LABEL_VARIANT
from muster.pins import Pins, Variant, Wheel
from muster.progress import Progress
from muster.proofs import Claim, Fault, Proof, Refuted

SCHEMA = 1
# a backstop inside the container; every program that a proof starts has its own, shorter limit
LIMIT_S = 1800

USER = "1000:1000"
ENTRYPOINT = ("/usr/local/bin/muster-entrypoint",)


@dataclass(frozen=True, kw_only=True)
class Result:
    """What `verify` found. READY means that image, lock and pins agree."""

    verdict: Verdict
    image: Image
    proofs: tuple[Proof, ...]
    findings: tuple[Finding, ...]
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        return {"schema": SCHEMA, "command": "verify", **asdict(self)}


def verify(
    engine: Engine, pinned: Pins, variant: Variant, progress: Progress, ref: str | None = None
) -> Result:
    """Prove the image `ref`, by default `variant`'s own, against the pins and lock of `variant`."""
    started = time.monotonic()
    wheels = pins.read_lock(pinned, variant)
    image = engine.image(ref or variant.image_ref)
    if image is None:
        raise ImageNotBuilt(ref or variant.image_ref, variant.name)
    if LABEL_VARIANT not in image.labels:
        raise NotMustersImage(image.ref, LABEL_VARIANT)
    log = _inside(engine, _spec(image, pinned), progress)
    promise = Promise(image, variant, wheels, log.bom)
    for claim in CLAIMS:
        log.add(proofs.proof(claim, promise))
    findings = tuple(proof.finding for proof in log.proofs if proof.finding is not None)
    return Result(
        verdict=finding.verdict(findings),
        image=image,
        proofs=tuple(log.proofs),
        findings=findings,
        seconds=round(time.monotonic() - started, 3),
    )


def proof_line(proof: Proof) -> str:
    return f"{proof.name}: {proof.outcome}. {proof.evidence}"


# ---- inside ------------------------------------------------------------------------------------


@dataclass
class _Log:
    """What proofs.py prints, line by line."""

    progress: Progress
    bom: Mapping[str, Any] = field(default_factory=dict)
    proofs: list[Proof] = field(default_factory=list)

    def read_line(self, line: str) -> None:
        """One line of its output; what is not its own is passed over."""
        with contextlib.suppress(ValueError, TypeError, KeyError):
            entry = json.loads(line)
            if "bom" in entry:
                self.bom = entry["bom"]
            else:
                self.add(Proof.from_dict(entry["proof"]))

    def add(self, proof: Proof) -> None:
        self.proofs.append(proof)
        self.progress.say(proof_line(proof))


def _inside(engine: Engine, spec: ContainerSpec, progress: Progress) -> _Log:
    """The proofs of proofs.py, made in a container; ProofsDidNotReport when it broke off."""
    log = _Log(progress)
    with engine.run(spec) as container:
        for line in container.lines():
            log.read_line(line)
        ending = container.ending("the proofs")
        errors = list(container.stderr)
    if ending != "exit code 0" or len(log.proofs) != len(proofs.CLAIMS):
        raise ProofsDidNotReport(spec.image, ending, errors[-10:])
    return log


def _spec(image: Image, pinned: Pins) -> ContainerSpec:
    """As root, who can read every file; by the image's Python, whatever its entrypoint is."""
    return ContainerSpec(
        # by id: the name may be another image's by the time that the container starts
        image=image.id,
        entrypoint=("timeout", "--kill-after=10", str(LIMIT_S)),
        # isolated, so that no file of the working folder is imported, and without writing bytecode
        command=("python", "-IBm", "muster.proofs"),
        shm_bytes=pinned.shm_bytes,
        user="0:0",
    )


# ---- from outside ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Promise:
    """What an image of `variant` is to be: its lock's wheels, and what its `bom` says instead."""

    image: Image
    variant: Variant
    wheels: tuple[Wheel, ...]
    bom: Mapping[str, Any]


def labels(promise: Promise) -> str:
    """The labels say the variant, from which inputs and on which base it was built."""
    found = promise.image.labels
    variant = found[LABEL_VARIANT]
    faults = [
        Fault(name, "is a label that the image lacks")
        for name in (LABEL_INPUTS, LABEL_BASE)
        if not found.get(name)
    ]
    if variant != promise.variant.name:
        faults.append(Fault(LABEL_VARIANT, f"says {variant}, asked was {promise.variant.name}"))
    proofs.refute(faults)
    return f"{variant} on a base of {found[LABEL_BASE]}, inputs {found[LABEL_INPUTS][:12]}"


def user(promise: Promise) -> str:
    """It runs as an ordinary user, by number: Kubernetes' runAsNonRoot looks at numbers alone."""
    if promise.image.user != USER:
        raise Refuted([Fault("USER", f"is {promise.image.user or 'root'}, not {USER}")])
    return USER


def entrypoint(promise: Promise) -> str:
    """The program that is given takes PID 1."""
    if promise.image.entrypoint != ENTRYPOINT:
        found = " ".join(promise.image.entrypoint) or "none"
        raise Refuted([Fault("ENTRYPOINT", f"is {found}, not {' '.join(ENTRYPOINT)}")])
    return " ".join(ENTRYPOINT)


def lock(promise: Promise) -> str:
    """The bill of materials lists the lock's wheels, by the lock's hashes."""
    path = promise.variant.lock_path
    locked = {wheel.name: _wheel(asdict(wheel)) for wheel in promise.wheels}
    listed = {wheel["name"]: _wheel(wheel) for wheel in promise.bom["wheels"]}
    proofs.refute(
        Fault(
            name,
            f"is {listed.get(name, 'missing')} in the bill of materials,"
            f" {locked.get(name, 'missing')} in {path}",
        )
        for name in sorted(locked.keys() | listed.keys())
        if locked.get(name) != listed.get(name)
    )
    return f"{len(locked)} wheels as in {path.name}"


def _wheel(fields: Mapping[str, str]) -> str:
    return f"{fields['version']} sha256:{fields['sha256']}"


def versions(promise: Promise) -> str:
    """Variant, torch and NCCL are those of pins.toml."""
    variant = promise.variant
    nccl = variant.cuda.nccl if variant.cuda else None
    pinned = {"variant": variant.name, "torch": variant.torch, "nccl": nccl}
    proofs.refute(
        Fault(key, f"is {promise.bom[key]} in the bill of materials, {value} in pins.toml")
        for key, value in pinned.items()
        if promise.bom[key] != value
    )
    return f"torch {variant.torch}, NCCL {nccl or 'none'}"


CLAIMS: tuple[Claim[Promise], ...] = (
    Claim("labels", labels, "the labels were changed, or the image is another variant's"),
    Claim("user", user, "an image built on it changed USER", "set USER 1000:1000 there"),
    Claim(
        "entrypoint",
        entrypoint,
        "an image built on it changed ENTRYPOINT: signals may not reach the program",
        f"set ENTRYPOINT {json.dumps(ENTRYPOINT)} there",
    ),
    Claim("lock", lock, "the lock changed since the image was built"),
    Claim("versions", versions, "the pins changed since, or the image is another variant's"),
)
