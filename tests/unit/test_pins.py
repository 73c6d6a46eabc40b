"""pins.toml and the locks: read strictly, every mistake named."""

from pathlib import Path

import pytest
from tests.unit.conftest import ROOT

from muster import pins
from muster.errors import (
    DriverNotUnderstood,
    DriverTooOld,
    LockBroken,
    MusterError,
    PinsBroken,
    UnknownVariant,
    VariantWithoutLock,
)
from muster.pins import Accelerator, Cuda, DigestKind, Nvcc, Pins, Wheel

DIGEST = f"sha256:{'a1' * 32}"
HASH = "b2" * 32

TOML = f"""
schema = 1
[run]
shm_size = "1g"
[bases.trixie]
image = "debian:trixie-slim"
digest = "{DIGEST}"
digest_kind = "index"
python = "3.13"
[nccl_tests]
tag = "v2"
commit = "{"b2" * 20}"
repository = "https://example.org/nccl-tests"
[variants.cpu]
accelerator = "cpu"
base = "trixie"
torch = "2.0+cpu"
[variants.gpu]
accelerator = "cuda"
base = "trixie"
torch = "2.1"
nccl = "2.30"
driver = 580
require_cuda = "cuda>=13.0"
archs = [80, 90]
nvcc = "wheels"
"""

LOCK = f"""# a comment

torch==2.0+cpu --hash=sha256:{HASH}
typing-extensions==4.1 --hash=sha256:{HASH}
"""


@pytest.fixture
def docker(tmp_path: Path) -> Path:
    """A folder docker/ that is right, for tests to break."""
    (tmp_path / "locks").mkdir()
    (tmp_path / "pins.toml").write_text(TOML)
    (tmp_path / "locks/cpu.txt").write_text(LOCK)
    return tmp_path


def read_lock(docker: Path, text: str | bytes, variant: str = "cpu") -> tuple[Wheel, ...]:
    content = text if isinstance(text, bytes) else text.encode()
    (docker / f"locks/{variant}.txt").write_bytes(content)
    found = pins.read(docker)
    return pins.read_lock(found, found.variant(variant))


@pytest.mark.parametrize("variant", ["cpu", "cu13", "cu12"])
def test_this_repository_has_a_lock_for_every_variant(variant: str) -> None:
    found = pins.read(ROOT / "docker")
    wheels = {w.name: w for w in pins.read_lock(found, found.variant(variant))}
    assert {"torch", "pip", "pytest", "pytest-reportlog"} <= wheels.keys()
    cuda = found.variant(variant).cuda
    if cuda:
        # one NCCL, and it is the pinned one
        (nccl,) = (wheel for name, wheel in wheels.items() if name.startswith("nvidia-nccl-"))
        assert nccl.version == cuda.nccl


@pytest.mark.parametrize(
    ("driver", "variant"),
    [
        (None, "cpu"),
        ("610.10", "cu13"),
        ("580.65.06", "cu13"),
        ("579.99", "cu12"),
        ("570.124.06", "cu12"),
        ("525.60.13", "cu12"),
    ],
)
def test_the_driver_decides_the_variant(driver: str | None, variant: str) -> None:
    assert pins.read(ROOT / "docker").for_driver(driver).name == variant


@pytest.mark.parametrize(
    ("driver", "error"),
    [("524.1", DriverTooOld), ("N/A", DriverNotUnderstood)],
)
def test_a_driver_that_fits_no_variant_is_said(driver: str, error: type[MusterError]) -> None:
    with pytest.raises(error, match=driver):
        pins.read(ROOT / "docker").for_driver(driver)


def test_every_key_of_pins_toml_is_read(docker: Path) -> None:
    found = pins.read(docker)
    assert found.shm_bytes == 2**30
    cpu, gpu = found.variant("cpu"), found.variant("gpu")
    assert (cpu.accelerator, cpu.torch, cpu.cuda) == (Accelerator.CPU, "2.0+cpu", None)
    assert (gpu.accelerator, gpu.torch) == (Accelerator.CUDA, "2.1")
    assert gpu.cuda == Cuda("2.30", 580, "cuda>=13.0", (80, 90), Nvcc.WHEELS)
    assert found.nccl_tests.commit == "b2" * 20
    assert (gpu.base.suite, gpu.base.python) == ("trixie", "3.13")
    assert gpu.base.digest_kind is DigestKind.INDEX
    assert gpu.image_ref == "muster:gpu"
    assert gpu.lock_path == docker / "locks/gpu.txt"


@pytest.mark.parametrize(
    ("image", "ref"),
    [
        ("debian:trixie-slim", "debian"),
        ("debian", "debian"),
        ("mirror.test:5000/library/debian:trixie-slim", "mirror.test:5000/library/debian"),
    ],
)
def test_a_base_is_pulled_by_its_digest_alone(docker: Path, image: str, ref: str) -> None:
    (docker / "pins.toml").write_text(TOML.replace("debian:trixie-slim", image))
    assert pins.read(docker).variant("cpu").base.ref == f"{ref}@{DIGEST}"


def test_an_unknown_variant_is_named_with_the_known_ones(docker: Path) -> None:
    with pytest.raises(UnknownVariant, match=r"(?s)'tpu'.*cpu, gpu"):
        pins.read(docker).variant("tpu")


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("schema = 1", "schema = ", r"line 2"),
        ("schema = 1", "", r"the file lacks schema"),
        ("schema = 1", "schema = 2", r"schema is 2, this Muster reads 1"),
        ("schema = 1", "schema = true", r"schema is True, not of type int"),
        ("schema = 1", "schema = 1\nextra = 1", r"the file has unknown keys: extra"),
        ('[run]\nshm_size = "1g"', "", r"the file lacks run"),
        ('shm_size = "1g"', "", r"\[run\] lacks shm_size"),
        (
            'shm_size = "1g"',
            "shm_size = 1073741824",
            r"\[run\] shm_size is 1073741824, not of type str",
        ),
        ('shm_size = "1g"', 'shm_size = "big"', r"\[run\] shm_size: 'big' is not a size"),
        ('shm_size = "1g"', 'shm_size = "1023m"', r"\[run\] shm_size '1023m' is below 1g"),
        (DIGEST, "sha256:abc", r"\[bases.trixie\] digest 'sha256:abc' is not"),
        (DIGEST, DIGEST.upper(), r"\[bases.trixie\] digest 'SHA256:"),
        (DIGEST, f"{DIGEST}0", r"\[bases.trixie\] digest 'sha256:"),
        ('"index"', '"riscv"', r"digest_kind 'riscv' is not one of: index, amd64, arm64"),
        ('python = "3.13"', "", r"\[bases.trixie\] lacks python"),
        ('python = "3.13"', "python = 3.13", r"\[bases.trixie\] python is 3.13, not of type str"),
        ("[bases.trixie]", "[bases]\nsid = 1\n[bases.trixie]", r"\[bases.sid\] is not a table"),
        ('"cuda"', '"tpu"', r"\[variants.gpu\] accelerator 'tpu' is not one of: cpu, cuda"),
        ('base = "trixie"', 'base = "sid"', r"\[variants.cpu\] base 'sid' is not one of"),
        ('torch = "2.1"', "", r"\[variants.gpu\] lacks torch"),
        ('torch = "2.1"', "torch = 2.1", r"\[variants.gpu\] torch is 2.1, not of type str"),
        ('nccl = "2.30"', "nccl = 2.30", r"\[variants.gpu\] nccl is 2.3, not of type str"),
        ("nccl =", "ncll =", r"\[variants.gpu\] has unknown keys: ncll; known: .*nccl"),
    ],
)
def test_broken_pins_are_refused_naming_file_and_key(
    docker: Path, old: str, new: str, says: str
) -> None:
    assert old in TOML
    (docker / "pins.toml").write_text(TOML.replace(old, new))
    with pytest.raises(PinsBroken, match=rf"pins\.toml: .*{says}"):
        pins.read(docker)


def test_pins_that_are_missing_or_not_text_are_refused(docker: Path) -> None:
    path = docker / "pins.toml"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(PinsBroken, match=r"pins\.toml: 'utf-8' codec"):
        pins.read(docker)
    path.unlink()
    with pytest.raises(PinsBroken, match=r"pins\.toml: .*No such file"):
        pins.read(docker)


def test_a_lock_is_read_in_its_order(docker: Path) -> None:
    assert read_lock(docker, LOCK) == (
        Wheel("torch", "2.0+cpu", HASH),
        Wheel("typing-extensions", "4.1", HASH),
    )


def test_a_variant_without_lock_is_refused_naming_those_that_have_one(docker: Path) -> None:
    found: Pins = pins.read(docker)
    with pytest.raises(VariantWithoutLock, match=r"(?s)'gpu'.*gpu\.txt.*do: .*: cpu$"):
        pins.read_lock(found, found.variant("gpu"))


@pytest.mark.parametrize(
    "line",
    [
        "torch==2.0+cpu",
        "torch",
        f"torch>=2.0 --hash=sha256:{HASH}",
        f"Torch==2.0+cpu --hash=sha256:{HASH}",
        f"torch==2.0+cpu --hash=md5:{HASH}",
        f"torch==2.0+cpu --hash=sha256:{HASH[1:]}",
        f"torch==2.0+cpu --hash=sha256:{HASH.upper()}",
        f"torch==2.0+cpu --hash=sha256:{HASH} --hash=sha256:{HASH}",
        "--index-url file:///elsewhere",
    ],
)
def test_a_malformed_lock_line_is_refused_with_its_number(docker: Path, line: str) -> None:
    with pytest.raises(LockBroken, match=r"cpu\.txt:2: not NAME==VERSION") as caught:
        read_lock(docker, f"# first\n{line}\n")
    assert repr(line) in caught.value.what


def test_a_wheel_locked_twice_is_refused(docker: Path) -> None:
    with pytest.raises(LockBroken, match=r"cpu\.txt:5: typing-extensions is locked twice"):
        read_lock(docker, f"{LOCK}typing-extensions==4.2 --hash=sha256:{HASH}\n")


def test_a_lock_that_is_not_text_is_refused(docker: Path) -> None:
    with pytest.raises(LockBroken, match=r"cpu\.txt"):
        read_lock(docker, b"\xff\xfe")


@pytest.mark.parametrize(
    ("text", "locked"),
    [
        (LOCK, r"torch==2\.0\+cpu"),
        (f"pip==1 --hash=sha256:{HASH}", "no torch"),
        ("", "no torch"),
    ],
)
def test_the_lock_of_another_variant_is_refused(docker: Path, text: str, locked: str) -> None:
    with pytest.raises(LockBroken, match=rf"gpu\.txt.*{locked}.*pins torch==2\.1 for gpu"):
        read_lock(docker, text, variant="gpu")
