"""docker/pins.toml and docker/locks/<variant>.txt: the one truth about versions, read strictly."""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

from muster import size
from muster.errors import (
    DriverNotUnderstood,
    DriverTooOld,
    LockBroken,
    NotASize,
    PinsBroken,
    UnknownVariant,
    VariantWithoutLock,
)

SCHEMA = 1
LEAST_SHM_BYTES = 2**30
CPU_VARIANT = "cpu"
# every image of Muster's has this label, and so has one that is built on it
LABEL_VARIANT = "io.muster.variant"
# the locks name wheels of this architecture, in the words of Docker and of wheel tags
ARCHITECTURE = "amd64"

_Kind = TypeVar("_Kind", bound=StrEnum)

_CUDA_KEYS: dict[str, type] = {
    "nccl": str,
    "driver": int,
    "require_cuda": str,
    "archs": list,
    "nvcc": str,
}

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_LOCK_LINE = re.compile(r"([a-z0-9][a-z0-9-]*)==(\S+) --hash=sha256:([0-9a-f]{64})")


class DigestKind(StrEnum):
    """What a digest names: the multi-architecture index, or one architecture's image."""

    INDEX = "index"
    AMD64 = "amd64"
    ARM64 = "arm64"


class Accelerator(StrEnum):
    """What torch computes on."""

    CPU = "cpu"
    CUDA = "cuda"


@dataclass(frozen=True)
class Base:
    """A Debian image by digest; `suite` is its name in Debian's archive, `python` its Python."""

    suite: str
    image: str
    digest: str
    digest_kind: DigestKind
    python: str

    @property
    def ref(self) -> str:
        """The reference to pull, without the tag: the digest alone decides."""
        # a colon before the last slash is a registry's port
        folder, slash, name = self.image.rpartition("/")
        return f"{folder}{slash}{name.partition(':')[0]}@{self.digest}"


@dataclass(frozen=True)
class Wheel:
    """One line of a lock: the one wheel, by hash."""

    name: str
    version: str
    sha256: str

    def __str__(self) -> str:
        return f"{self.name}=={self.version}"


@dataclass(frozen=True)
class NcclTests:
    """The source of nccl-tests: `commit` decides, `tag` is its name, `repository` one place."""

    tag: str
    commit: str
    repository: str


class Nvcc(StrEnum):
    """Where the compiler of nccl-tests comes from."""

    WHEELS = "wheels"
    DEBIAN = "debian"


@dataclass(frozen=True)
class Cuda:
    """What a variant with CUDA has beside: NCCL, the oldest driver branch, the architectures."""

    nccl: str
    driver: int
    require_cuda: str
    archs: tuple[int, ...]
    nvcc: Nvcc


@dataclass(frozen=True)
class Variant:
    """A row of pins.toml with its base; `cuda` is None where torch computes on the CPU."""

    name: str
    base: Base
    torch: str
    cuda: Cuda | None
    lock_path: Path

    @property
    def accelerator(self) -> Accelerator:
        return Accelerator.CUDA if self.cuda else Accelerator.CPU

    @property
    def image_ref(self) -> str:
        return f"muster:{self.name}"

    @property
    def nvcc_lock_path(self) -> Path:
        """The lock of the wheels that compile nccl-tests; there is none for every variant."""
        return self.lock_path.with_name(f"nvcc-{self.lock_path.name}")


@dataclass(frozen=True)
class Pins:
    """What pins.toml says. `shm_bytes` is the default /dev/shm of a container."""

    shm_bytes: int
    nccl_tests: NcclTests
    variants: Mapping[str, Variant]

    def for_driver(self, driver: str | None) -> Variant:
        """The variant that this NVIDIA driver ("580.65.06") runs best; without one, the CPU's."""
        if driver is None:
            return self.variant(CPU_VARIANT)
        branch = driver.partition(".")[0]
        if not (branch.isascii() and branch.isdigit()):
            raise DriverNotUnderstood(driver)
        rows = [(row.cuda.driver, row) for row in self.variants.values() if row.cuda]
        fitting = [(oldest, row) for oldest, row in rows if oldest <= int(branch)]
        if not fitting:
            raise DriverTooOld(driver, min(oldest for oldest, _ in rows))
        return max(fitting, key=lambda pair: pair[0])[1]

    def variant(self, name: str) -> Variant:
        try:
            return self.variants[name]
        except KeyError:
            raise UnknownVariant(name, list(self.variants)) from None


def read(docker: Path) -> Pins:
    """The pins in the folder `docker`; PinsBroken names the key that is wrong."""
    path = docker / "pins.toml"
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise PinsBroken(path, str(error)) from None
    return _Reader(path).pins(document)


def read_lock(pins: Pins, variant: Variant) -> tuple[Wheel, ...]:
    """The wheels of `variant`, in the lock's order; its torch is the one in pins.toml."""
    path = variant.lock_path
    if not path.is_file():
        buildable = [row.name for row in pins.variants.values() if row.lock_path.is_file()]
        raise VariantWithoutLock(variant.name, path, buildable)
    wheels = read_wheels(path)
    torch = next((wheel for wheel in wheels if wheel.name == "torch"), None)
    if torch is None or torch.version != variant.torch:
        raise LockBroken(
            path,
            1,
            f"locks {torch or 'no torch'}, but pins.toml pins torch=={variant.torch} for"
            f" {variant.name}: the lock does not belong to the variant",
        )
    return wheels


def read_wheels(path: Path) -> tuple[Wheel, ...]:
    """The wheels of any lock, in its order; LockBroken names the line that is wrong."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise LockBroken(path, 1, f"not a text: {error}") from None
    wheels: dict[str, Wheel] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip() or line.startswith("#"):
            continue
        match = _LOCK_LINE.fullmatch(line.strip())
        if match is None:
            raise LockBroken(path, number, f"not NAME==VERSION --hash=sha256:HEX: {line!r}")
        wheel = Wheel(*match.groups())
        if wheel.name in wheels:
            raise LockBroken(path, number, f"{wheel.name} is locked twice")
        wheels[wheel.name] = wheel
    return tuple(wheels.values())


class _Reader:
    """Reads tables strictly: a key missing, unknown or of another type is named."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def pins(self, document: object) -> Pins:
        tables = ("run", "bases", "nccl_tests", "variants")
        keys: dict[str, type] = {"schema": int, **dict.fromkeys(tables, dict)}
        top = self._table("the file", document, keys)
        if top["schema"] != SCHEMA:
            raise PinsBroken(self.path, f"schema is {top['schema']}, this Muster reads {SCHEMA}")
        bases = {name: self._base(name, row) for name, row in top["bases"].items()}
        variants = {name: self._variant(name, row, bases) for name, row in top["variants"].items()}
        return Pins(self._shm_bytes(top["run"]), self._nccl_tests(top["nccl_tests"]), variants)

    def _shm_bytes(self, value: object) -> int:
        run = self._table("[run]", value, {"shm_size": str})
        try:
            shm_bytes = size.parse(run["shm_size"])
        except NotASize as error:
            raise PinsBroken(self.path, f"[run] shm_size: {error.what}") from None
        if shm_bytes < LEAST_SHM_BYTES:
            raise PinsBroken(self.path, f"[run] shm_size {run['shm_size']!r} is below 1g")
        return shm_bytes

    def _nccl_tests(self, value: object) -> NcclTests:
        where = "[nccl_tests]"
        row = self._table(where, value, {"tag": str, "commit": str, "repository": str})
        if not _COMMIT.fullmatch(row["commit"]):
            raise PinsBroken(self.path, f"{where} commit {row['commit']!r} is not 40 hex digits")
        return NcclTests(row["tag"], row["commit"], row["repository"])

    def _base(self, suite: str, value: object) -> Base:
        where = f"[bases.{suite}]"
        keys = {"image": str, "digest": str, "digest_kind": str, "python": str}
        row = self._table(where, value, keys)
        if not _DIGEST.fullmatch(row["digest"]):
            raise PinsBroken(
                self.path, f"{where} digest {row['digest']!r} is not sha256: and 64 hex digits"
            )
        kind = self._one_of(where, "digest_kind", DigestKind, row)
        return Base(suite, row["image"], row["digest"], kind, row["python"])

    def _variant(self, name: str, value: object, bases: Mapping[str, Base]) -> Variant:
        where = f"[variants.{name}]"
        keys = {"accelerator": str, "base": str, "torch": str}
        row = self._table(where, value, keys, optional=_CUDA_KEYS)
        accelerator = self._one_of(where, "accelerator", Accelerator, row)
        if row["base"] not in bases:
            raise PinsBroken(self.path, f"{where} base {row['base']!r} is not one of {list(bases)}")
        lock_path = self.path.parent / "locks" / f"{name}.txt"
        cuda = self._cuda(where, row) if accelerator is Accelerator.CUDA else None
        return Variant(name, bases[row["base"]], row["torch"], cuda, lock_path)

    def _cuda(self, where: str, row: Mapping[str, Any]) -> Cuda:
        if missing := _CUDA_KEYS.keys() - row.keys():
            raise PinsBroken(self.path, f"{where} lacks {', '.join(sorted(missing))}")
        if not row["archs"] or not all(type(arch) is int for arch in row["archs"]):
            raise PinsBroken(self.path, f"{where} archs {row['archs']!r} is not a list of numbers")
        nvcc = self._one_of(where, "nvcc", Nvcc, row)
        return Cuda(row["nccl"], row["driver"], row["require_cuda"], tuple(row["archs"]), nvcc)

    def _one_of(self, where: str, key: str, kind: type[_Kind], row: Mapping[str, Any]) -> _Kind:
        try:
            return kind(row[key])
        except ValueError:
            known = ", ".join(member.value for member in kind)
            raise PinsBroken(
                self.path, f"{where} {key} {row[key]!r} is not one of: {known}"
            ) from None

    def _table(
        self,
        where: str,
        value: object,
        required: Mapping[str, type],
        *,
        optional: Mapping[str, type] | None = None,
    ) -> dict[str, Any]:
        """`value` as a table that has the required keys, no unknown ones, and the right types."""
        if not isinstance(value, dict):
            raise PinsBroken(self.path, f"{where} is not a table")
        known = {**required, **(optional or {})}
        if missing := required.keys() - value.keys():
            raise PinsBroken(self.path, f"{where} lacks {', '.join(sorted(missing))}")
        if unknown := value.keys() - known.keys():
            names = ", ".join(sorted(unknown))
            raise PinsBroken(
                self.path, f"{where} has unknown keys: {names}; known: {', '.join(known)}"
            )
        for key, entry in value.items():
            if type(entry) is not known[key]:
                name = known[key].__name__
                raise PinsBroken(self.path, f"{where} {key} is {entry!r}, not of type {name}")
        return value
