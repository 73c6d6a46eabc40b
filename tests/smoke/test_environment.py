"""The environment: is what the image and the run promise really there?"""

import ctypes
import hashlib
import os
import platform
import resource
from collections import Counter
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Step, StepFailed, conclude

from muster import bom, proofs, size
from muster.doctor import examine
from muster.finding import Outcome
from muster.switches import DEBUG_SWITCHES

LOCK_BYTES = 64 * 2**20

RDMA_LIBRARIES = ("libibverbs.so.1", "librdmacm.so.1", "libmlx5.so.1", "libefa.so.1")

# the doctor's checks that a step of the suite makes, knowing what the run asked for
ASKED_BY_STEPS = {"shm", "locked_memory", "debug_switches", "nccl_conf"}

NCCL_CONF = (Path("/etc/nccl.conf"), Path("~/.nccl.conf"))


def test_versions(step: Step) -> None:
    """Python, torch and every wheel are those of the bill of materials."""
    if not bom.PATH.exists():
        pytest.skip(f"not in Muster's image: no {bom.PATH}")
    image = proofs.around()
    wheels = proofs.listed_wheels(image)
    differ = [
        f"{name} is {found or 'missing'}, bom.json says {listed}"
        for name, listed, found in _versions(image.bom, wheels)
        if listed != found
    ]
    if differ:
        step.fail(
            what=f"{len(differ)} versions are not those of {bom.PATH}",
            evidence="\n".join(differ),
            cause="something was installed over the image, or the image was not built by Muster",
            remedy="build the image again: ./invokew build",
        )
    _tell(step, image.bom)
    step.measure(f"Python {image.bom['python']}, torch {torch.__version__}, {len(wheels)} wheels")


def _tell(step: Step, facts: Mapping[str, Any]) -> None:
    for name, known in (("Python", "python"), ("torch", "torch"), ("NCCL", "nccl")):
        if facts[known]:
            step.version(name, str(facts[known]))
    step.version("variant", str(facts["variant"]))
    step.hash("bom.json", hashlib.sha256(bom.PATH.read_bytes()).hexdigest())
    step.hash("base", str(facts["base"]["id"]).removeprefix("sha256:"))


def _versions(
    facts: Mapping[str, object], wheels: Mapping[str, str]
) -> Iterator[tuple[str, str, str | None]]:
    """Name, version in the bill of materials, version found here."""
    yield "Python", str(facts["python"]), platform.python_version()
    # a wheel from PyPI is called 2.14.1 and calls itself 2.14.1+cu130
    known = str(facts["torch"])
    imported = str(torch.__version__)
    yield "torch (as imported)", known, imported if "+" in known else imported.partition("+")[0]
    for name, version in wheels.items():
        try:
            found: str | None = metadata.version(name)
        except metadata.PackageNotFoundError:
            found = None
        yield name, version, found


def test_image(step: Step) -> None:
    """The files of the image are those that its bill of materials names, with one NCCL."""
    if not bom.PATH.exists():
        pytest.skip(f"not in Muster's image: no {bom.PATH}")
    image = proofs.around()
    made = [proofs.proof(claim, image) for claim in proofs.CLAIMS]
    for proof in made:
        step.note(f"{proof.name}: {proof.outcome}. {proof.evidence}")
    if findings := [proof.finding for proof in made if proof.finding is not None]:
        raise StepFailed(findings)
    counts = Counter(proof.outcome for proof in made)
    step.measure(", ".join(f"{counts[each]} {each}" for each in Outcome if counts[each]))


def test_doctor(step: Step) -> None:
    """Nothing that the doctor sees of this node stops training."""
    result = examine.doctor()
    for each in result.examinations:
        step.note(f"{each.name}: {each.outcome}. {each.measure}")
        step.fact(each.name, each.measure)
    found = [
        finding
        for each in result.examinations
        if each.name not in ASKED_BY_STEPS
        for finding in each.findings
    ]
    counts = Counter(each.outcome for each in result.examinations)
    step.measure(", ".join(f"{counts[each]} {each}" for each in Outcome if counts[each]))
    conclude(step, found)


def test_shm_size(step: Step, request: pytest.FixtureRequest) -> None:
    """/dev/shm has the size that the run asked for."""
    shm = os.statvfs("/dev/shm")
    found = shm.f_frsize * shm.f_blocks
    step.measure(size.binary(found))
    asked = request.config.getoption("--shm-bytes")
    if asked is not None and found < asked:
        step.fail(
            what=f"/dev/shm has {size.binary(found)}, the run asked for {size.binary(asked)}",
            evidence=f"statvfs(/dev/shm): {found} bytes",
            cause="the Engine did not apply --shm-size, or something is mounted over /dev/shm",
            remedy="start the container with --shm-size, or with --ipc=host",
        )


def test_memlock(step: Step, request: pytest.FixtureRequest) -> None:
    """Memory can be locked, as InfiniBand and RoCE need for every buffer."""
    errno = _mlock(LOCK_BYTES)
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limit = "unlimited" if soft == resource.RLIM_INFINITY else size.binary(soft)
    if errno == 0:
        step.measure(f"{size.binary(LOCK_BYTES)} locked (limit {limit})")
        return
    texts = {
        "what": f"mlock of {size.binary(LOCK_BYTES)} fails",
        "evidence": f"mlock: {os.strerror(errno)}; limit {limit}, user id {os.getuid()}",
        "cause": "the memlock limit is low, and IPC_LOCK is missing or not root's",
        "remedy": "give --ulimit memlock=-1, and let dockerd have it: LimitMEMLOCK=infinity",
    }
    if request.config.getoption("--infiniband"):
        step.fail(**texts)
    step.measure(f"limit {limit}; no InfiniBand here to need more")
    step.warn(**texts)


def _mlock(count: int) -> int:
    """The errno of locking `count` bytes, 0 when they were locked."""
    libc = ctypes.CDLL(None, use_errno=True)
    memory = ctypes.create_string_buffer(count)
    if libc.mlock(memory, ctypes.c_size_t(count)) != 0:
        return ctypes.get_errno()
    libc.munlock(memory, ctypes.c_size_t(count))
    return 0


def test_rdma_libraries(step: Step, request: pytest.FixtureRequest) -> None:
    """The libraries that NCCL opens at run time for InfiniBand, RoCE and EFA load."""
    if not bom.PATH.exists() and not request.config.getoption("--infiniband"):
        pytest.skip("not in Muster's image, and no InfiniBand here to need them")
    failed: list[str] = []
    for name in RDMA_LIBRARIES:
        try:
            ctypes.CDLL(name)
        except OSError as error:
            failed.append(str(error))
    providers = sorted(path.stem for path in Path("/etc/libibverbs.d").glob("*.driver"))
    if failed or not providers:
        step.fail(
            what="the RDMA user space is not whole: NCCL would fall back to sockets in silence",
            evidence="\n".join(failed) or "no provider in /etc/libibverbs.d",
            cause="ibverbs-providers, libibverbs1 or librdmacm1 is missing",
            remedy="apt-get install libibverbs1 ibverbs-providers librdmacm1",
        )
    step.measure(f"{len(RDMA_LIBRARIES)} libraries, {len(providers)} verbs providers")


def test_nccl_switches(step: Step, request: pytest.FixtureRequest) -> None:
    """No debug switch of NCCL or torch is left on."""
    on_purpose = request.config.getoption("--on-purpose")
    set_here = [name for name in DEBUG_SWITCHES if name in os.environ and name not in on_purpose]
    # names alone: a value may be anything
    left = [f"{name} in the environment" for name in set_here]
    for path in NCCL_CONF:
        if path.expanduser().exists():
            text = path.expanduser().read_text(errors="replace")
            left += [f"{name} in {path}" for name in DEBUG_SWITCHES if f"{name}=" in text]
    if left:
        step.fail(
            what="debug switches are left on",
            evidence=", ".join(left),
            cause="they were set to find a fault, and slow training or turn a transport off",
            remedy="unset them, here and in /etc/nccl.conf",
        )
    step.measure(f"none of {len(DEBUG_SWITCHES)} set")
