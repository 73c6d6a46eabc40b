"""Verify on a real Engine: the image agrees with its pins, each planted damage is named alone."""

import io
import json
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import docker
import pytest
from tests.image.harness import Recorder

from muster import image, pins, proofs, verify
from muster.engine import ContainerSpec, Engine
from muster.errors import ImageNotBuilt, NotMustersImage, ProofsDidNotReport
from muster.finding import Outcome, Verdict
from muster.node import Node
from muster.pins import Pins, Variant
from muster.smoke import nodes
from muster.smoke import settings as wishes
from muster.verify import Promise, Result

pytestmark = pytest.mark.usefixtures("built")

REF = "muster-test:verify"
SITE = "/opt/venv/lib/python3.11/site-packages"
NOT_FOR_CPU = {"one_nccl", "nccl_tests", "mlx5_symbol"}

# written in the image, so that no key stands in this file
PLANT_KEY = """
import base64, os
from pathlib import Path
body = base64.encodebytes(os.urandom(96)).decode()
Path("/root/.ssh").mkdir()
Path("/root/.ssh/id_rsa").write_text("-----BEGIN RSA PRIVATE " + "KEY-----\\n" + body)
"""

# what is done to the image, the proof that sees it, and what that is to name
DAMAGES = {
    "private key": (["python", "-c", PLANT_KEY], "secrets", "/root/.ssh/id_rsa"),
    "password": (["touch", "/home/muster/.netrc"], "secrets", "/home/muster/.netrc"),
    "wheel": (
        ["sh", "-c", f"echo '# changed' >> {SITE}/filelock/_api.py"],
        "wheels",
        f"{SITE}/filelock/_api.py",
    ),
    "stray": (["touch", f"{SITE}/sitecustomize.py"], "wheels", f"{SITE}/sitecustomize.py"),
    "second nccl": (
        ["cp", "/usr/lib/x86_64-linux-gnu/libefa.so.1", "/usr/local/lib/libnccl.so.2"],
        "one_nccl_file",
        "/usr/local/lib/libnccl.so.2",
    ),
    "setuid": (
        ["install", "--mode=4755", "/usr/bin/id", "/usr/local/bin/id"],
        "setuid",
        "/usr/local/bin/id",
    ),
    "compiler": (["cp", "/bin/true", "/usr/local/bin/gcc"], "compilers", "/usr/local/bin/gcc"),
    "package file": (
        ["sh", "-c", "echo >> /usr/bin/ibv_devinfo"],
        "debian_files",
        "/usr/bin/ibv_devinfo",
    ),
    "apt list": (
        ["touch", "/var/lib/apt/lists/mirror_Packages"],
        "caches",
        "/var/lib/apt/lists/mirror_Packages",
    ),
}

Derive = Callable[..., str]


@pytest.fixture
def derive(client: docker.DockerClient, cpu: Variant) -> Iterator[Derive]:
    """Builds a small image on the cpu image by further lines of a Dockerfile; its reference."""

    def build(*lines: str) -> str:
        dockerfile = "\n".join([f"FROM {cpu.image_ref}", "USER 0:0", *lines])
        client.images.build(fileobj=io.BytesIO(dockerfile.encode()), tag=REF, rm=True)
        return REF

    yield build
    client.images.remove(REF, force=True)


@pytest.fixture
def foreign(client: docker.DockerClient) -> Iterator[str]:
    """An image that Muster did not make."""
    tar = io.BytesIO()
    with tarfile.open(fileobj=tar, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("empty"))
    client.api.import_image_from_data(tar.getvalue(), *REF.split(":"))
    yield REF
    client.images.remove(REF)


def named(result: Result) -> dict[str, str]:
    """What each failed proof names."""
    return {proof.name: proof.finding.where for proof in result.proofs if proof.finding}


def test_the_image_agrees_with_its_pins(engine: Engine, pinned: Pins, cpu: Variant) -> None:
    progress = Recorder()
    result = verify.verify(engine, pinned, cpu, progress)
    assert named(result) == {}
    assert result.verdict is Verdict.READY
    inside, outside = ([each.name for each in claims] for claims in (proofs.CLAIMS, verify.CLAIMS))
    assert [proof.name for proof in result.proofs] == [*inside, *outside]
    apart = {each.name for each in result.proofs if each.outcome is Outcome.NOT_APPLICABLE}
    assert apart == NOT_FOR_CPU
    assert progress.said == [verify.proof_line(proof) for proof in result.proofs]
    document = json.loads(json.dumps(result.to_dict()))
    assert document["command"] == "verify"
    assert len(document["proofs"]) == len(result.proofs)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damage_is_named_and_nothing_else(
    engine: Engine, pinned: Pins, cpu: Variant, derive: Derive, damage: str
) -> None:
    argv, proof, where = DAMAGES[damage]
    ref = derive(f"RUN {json.dumps(argv)}", "USER 1000:1000")
    result = verify.verify(engine, pinned, cpu, Recorder(), ref)
    assert named(result) == {proof: where}
    assert result.verdict is Verdict.NOT_READY


def test_the_smoke_suite_names_it_too_and_as_an_ordinary_user(
    engine: Engine, pinned: Pins, derive: Derive
) -> None:
    stray = f"{SITE}/sitecustomize.py"
    ref = derive(f"RUN touch {stray} && cp /bin/true /usr/local/bin/gcc", "USER 1000:1000")
    suite = (
        "python -m pytest /opt/muster/smoke --steps image -p no:terminal --nproc-per-node 1"
        " --train /opt/muster/train --report-log /tmp/log; cat /tmp/log"
    )
    spec = ContainerSpec(image=ref, command=("sh", "-c", suite), shm_bytes=pinned.shm_bytes)
    with engine.run(spec) as container:
        entries = [json.loads(line) for line in container.lines() if line.startswith("{")]
    (call,) = (each for each in entries if each.get("when") == "call")
    found = [value["where"] for key, value in call["user_properties"] if key == "finding"]
    assert found == [stray, "/usr/local/bin/gcc"]


def test_what_the_image_promises_on_its_outside_is_compared(
    engine: Engine, pinned: Pins, cpu: Variant, derive: Derive
) -> None:
    ref = derive('ENTRYPOINT ["/bin/sh"]', f"LABEL {image.LABEL_VARIANT}=cu99")
    result = verify.verify(engine, pinned, cpu, Recorder(), ref)
    assert named(result) == {
        "labels": image.LABEL_VARIANT,
        "user": "USER",
        "entrypoint": "ENTRYPOINT",
    }


def test_another_lock_is_named_by_its_wheels(
    engine: Engine, pinned: Pins, cpu: Variant, tmp_path: Path
) -> None:
    lock = tmp_path / "cpu.txt"
    lock.write_text(cpu.lock_path.read_text().replace("pip==26.3 ", "pip==26.4 "))
    other = replace(cpu, lock_path=lock)
    result = verify.verify(engine, pinned, other, Recorder())
    assert named(result) == {"lock": "pip"}
    assert "is 26.3 sha256:" in result.findings[0].what
    assert "26.4 sha256:" in result.findings[0].what


def test_other_pins_are_named(built: image.Result, pinned: Pins, cpu: Variant) -> None:
    bom = {"variant": "cpu", "torch": "2.12.0+cpu", "nccl": "2.30.7"}
    promise = Promise(built.image, cpu, pins.read_lock(pinned, cpu), bom)
    (claim,) = (each for each in verify.CLAIMS if each.name == "versions")
    finding = proofs.proof(claim, promise).finding
    assert finding is not None
    assert [line.partition(":")[0] for line in finding.evidence.splitlines()] == ["torch", "nccl"]


def test_an_image_that_is_not_there_is_not_built(
    engine: Engine, pinned: Pins, cpu: Variant
) -> None:
    with pytest.raises(ImageNotBuilt, match="muster-test:missing"):
        verify.verify(engine, pinned, cpu, Recorder(), "muster-test:missing")


def test_an_image_of_somebody_elses_is_refused(
    engine: Engine, pinned: Pins, cpu: Variant, foreign: str
) -> None:
    with pytest.raises(NotMustersImage, match=image.LABEL_VARIANT):
        verify.verify(engine, pinned, cpu, Recorder(), foreign)
    here = Node(gpus=0, infiniband=False)
    settings = wishes.settings(pinned, cpu, here, wishes.Wish())
    with pytest.raises(NotMustersImage, match=image.LABEL_VARIANT):
        nodes.in_containers(engine, cpu, foreign, here, settings, "", Recorder())


def test_proofs_that_break_off_are_no_verdict(
    engine: Engine, pinned: Pins, cpu: Variant, derive: Derive
) -> None:
    ref = derive("RUN rm /opt/muster/lib/muster/proofs.py")
    with pytest.raises(ProofsDidNotReport, match=r"exit code 1(.|\n)*No module named muster\.proo"):
        verify.verify(engine, pinned, cpu, Recorder(), ref)
