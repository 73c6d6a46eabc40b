"""The proofs that an image is what its pins say, asked of its files, its linker and dpkg.

Runs inside the image and needs no GPU. Prints one JSON object a line: the bill of materials, then
each proof as it is made; verify.py reads them, and runs it as root so that every file can be read.
The smoke suite makes the same proofs of what its own user can read.
"""

import base64
import csv
import fnmatch
import hashlib
import json
import mmap
import os
import re
import stat
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import Any, Generic, TypeVar

from muster import bom, process
from muster.finding import Finding, Outcome, Severity

CHILD_LIMIT_S = 120
SHOWN_FAULTS = 20

NCCL_HEADER = "nvidia/nccl/include/nccl.h"
NCCL_LIBRARY = "nvidia/nccl/lib/libnccl.so.2"
NCCL_TESTS = tuple(
    f"{name}_perf"
    for name in (
        *("all_reduce", "all_gather", "broadcast", "reduce_scatter", "reduce", "alltoall"),
        *("alltoallv", "scatter", "gather", "sendrecv", "hypercube"),
    )
)

# NCCL looks this up for dma-buf, and without it alltoall and sendrecv hang while all_reduce works:
# https://github.com/sgl-project/sglang/issues/23143
MLX5_SYMBOL = ("libmlx5.so.1", "mlx5dv_reg_dmabuf_mr", "MLX5_1.25")
# InfiniBand and RoCE of NVIDIA, and AWS's adapter: the others depend on the fabric
VERBS_PROVIDERS = ("mlx5", "efa")

# what the packages login, passwd, util-linux, libpam-modules-bin, openssh-client and dbus bring
DEBIAN_SETUID = frozenset(
    {
        *("/usr/bin/chage", "/usr/bin/chfn", "/usr/bin/chsh", "/usr/bin/expiry"),
        *("/usr/bin/gpasswd", "/usr/bin/mount", "/usr/bin/newgrp", "/usr/bin/passwd"),
        *("/usr/bin/ssh-agent", "/usr/bin/su", "/usr/bin/umount", "/usr/sbin/unix_chkpwd"),
        *("/usr/lib/dbus-1.0/dbus-daemon-launch-helper", "/usr/lib/openssh/ssh-keysign"),
    }
)
# where people and build steps leave keys and passwords
SECRET_FOLDERS = ("etc", "home", "opt", "root", "srv", "tmp", "usr/local", "workspace")
CREDENTIAL_FILES = frozenset({".git-credentials", ".netrc", ".pgpass", ".pypirc", "_netrc"})
PIP_CONFIGURATIONS = frozenset({"pip.conf", ".pip.conf"})

# Debian's slim images leave these out, and so does docker/slim.dpkg: dpkg lists them all the same
_LEFT_OUT = re.compile(r"usr/share/(man|info|doc|locale|lintian|groff|linda)/")
_CACHE = re.compile(
    r"/(root|home/[^/]+)/\.cache/.|/var/cache/apt/.*\.(bin|deb)$"
    r"|/var/lib/apt/lists/(?!lock$|auxfiles$|partial$)."
)
_COMPILER = re.compile(
    r"([a-z0-9_]+-linux-gnu-)?(cc|c\+\+|gcc|g\+\+|clang|clang\+\+|nvcc|tcc|ld|ld\.(bfd|gold|lld))"
    r"(-\d+(\.\d+)?)?"
)
# the marker and then a body: a program that only speaks of keys has no body after it
_PRIVATE_KEY = re.compile(
    rb"-----BEGIN (?:[A-Z0-9]+ )*PRIVATE KEY-----(?:\s|\\n|\\r)+"
    rb"(?:[A-Za-z0-9+/=]{32}|Proc-Type:)"
)
_PASSWORD_IN_URL = re.compile(rb"://[^/\s:@]+:[^/\s@]+@")
_NCCL_NAME = re.compile(r"libnccl.*\.so(\..*)?")
_NCCL_TESTS_LINE = re.compile(
    r"^# nccl-tests version (\S+) nccl-headers=(\d+) nccl-library=(\d+)", re.MULTILINE
)
# https://packaging.python.org/en/latest/specifications/name-normalization/
_DASHES = re.compile(r"[-_.]+")

_Subject = TypeVar("_Subject")


# ---- what a proof is ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Proof:
    """A claim and what came of it. `evidence` is what was seen, or why it does not apply."""

    name: str
    outcome: Outcome
    evidence: str
    finding: Finding | None = None

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> "Proof":
        finding = fields["finding"] and Finding.from_dict(fields["finding"])
        return cls(fields["name"], Outcome(fields["outcome"]), fields["evidence"], finding)


@dataclass(frozen=True)
class Fault:
    """One thing that refutes a claim: a file, wheel, package or symbol, and what it is or does."""

    where: str
    what: str


class Refuted(Exception):
    """The claim does not hold."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        super().__init__(f"{len(faults)} faults")
        self.faults = faults


class NotApplicable(Exception):
    """The claim is not about this image."""


@dataclass(frozen=True)
class Claim(Generic[_Subject]):
    """What is to be proved: `prove` returns its evidence, or raises Refuted or NotApplicable."""

    name: str
    prove: Callable[[_Subject], str]
    cause: str
    remedy: str = "build the image again: ./invokew build"


def proof(claim: Claim[_Subject], subject: _Subject) -> Proof:
    """The proof of `claim` about `subject`, or its refutation."""
    try:
        return Proof(claim.name, Outcome.PASSED, claim.prove(subject))
    except NotApplicable as reason:
        return Proof(claim.name, Outcome.NOT_APPLICABLE, str(reason))
    except Refuted as refuted:
        finding = _refutation(claim, refuted.faults)
    except Exception as error:  # noqa: BLE001  an image may be broken in ways that nobody foresaw
        finding = Finding(
            severity=Severity.ERROR,
            what=f"the proof {claim.name} itself broke off: {type(error).__name__}: {error}",
            where=claim.name,
            evidence=f"{type(error).__name__}: {error}",
            cause="not known: the proof did not foresee this",
            remedy=claim.remedy,
        )
    return Proof(claim.name, Outcome.FAILED, finding.evidence, finding)


def _refutation(claim: Claim[_Subject], faults: Sequence[Fault]) -> Finding:
    """The Finding of `claim`: the first fault by name, all of them as evidence."""
    first, *others = faults
    more = [f"and {len(faults) - SHOWN_FAULTS} more"] if len(faults) > SHOWN_FAULTS else []
    lines = [f"{fault.where}: {fault.what}" for fault in faults[:SHOWN_FAULTS]]
    return Finding(
        severity=Severity.ERROR,
        what=f"{first.what} (and {len(others)} more)" if others else first.what,
        where=first.where,
        evidence="\n".join([*lines, *more]),
        cause=claim.cause,
        remedy=claim.remedy,
    )


def refute(faults: Iterable[Fault]) -> None:
    """Refuted, unless there are none."""
    if found := list(faults):
        raise Refuted(found)


# ---- the image ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Entry:
    """A file or link of the image; `mode` as in os.stat."""

    path: Path
    mode: int


@dataclass(frozen=True)
class Record:
    """A file that a wheel brought: `name` and `hash` as its RECORD spells them."""

    wheel: str
    name: str
    path: Path
    hash: str


@dataclass(frozen=True)
class Image:
    """An image from inside: its /, its site-packages, the folders of PATH, what it says it is."""

    root: Path
    site: Path
    path: tuple[Path, ...]
    bom: Mapping[str, Any]

    def pinned_nccl(self) -> str:
        """The version; NotApplicable where torch has no NCCL."""
        version: str | None = self.bom["nccl"]
        if version is None:
            raise NotApplicable(f"torch {self.bom['torch']} has no NCCL")
        return version

    def is_listed(self, key: str, name: str) -> bool:
        """Whether `name`, relative to site, is among the globs "trimmed" or "stripped" of bom."""
        return any(_covers(glob, name) for glob in self.bom.get(key, ()))

    @cached_property
    def entries(self) -> tuple[Entry, ...]:
        """Every file and link on the image's own filesystem."""
        return tuple(_walk(self.root))

    @cached_property
    def wheels(self) -> tuple[metadata.Distribution, ...]:
        return tuple(metadata.distributions(path=[str(self.site)]))

    @cached_property
    def records(self) -> tuple[Record, ...]:
        """https://packaging.python.org/en/latest/specifications/recording-installed-packages/"""
        return tuple(
            Record(brought_by, name, Path(os.path.normpath(self.site / name)), digest)
            for wheel in self.wheels
            # each look at a name parses the METADATA anew
            for brought_by in [wheel.name]
            for name, digest, _size in csv.reader((wheel.read_text("RECORD") or "").splitlines())
        )


def _covers(glob: str, name: str) -> bool:
    """Whether `glob` names the file `name` or a folder above it; ** begins one at any depth."""
    globs, parts = glob.split("/"), name.split("/")
    if globs[0] == "**":
        globs = globs[1:]
        parts = parts[-len(globs) :]
    return len(globs) <= len(parts) and all(map(fnmatch.fnmatchcase, parts, globs))


def _walk(root: Path) -> Iterator[Entry]:
    device = root.stat().st_dev
    waiting = [root]
    while waiting:
        for entry in _entries(waiting.pop()):
            found = entry.stat(follow_symlinks=False)
            # as find -xdev: /proc, /sys, /dev and what is mounted are not the image's
            if stat.S_ISDIR(found.st_mode) and found.st_dev == device:
                waiting.append(Path(entry.path))
            elif stat.S_ISREG(found.st_mode) or stat.S_ISLNK(found.st_mode):
                yield Entry(Path(entry.path), found.st_mode)


def _entries(folder: Path | str) -> list[os.DirEntry[str]]:
    try:
        return list(os.scandir(folder))
    except PermissionError:
        # never root's lot; what another user cannot read he cannot load either
        return []


def _python(code: str, *arguments: str | Path) -> process.Completed:
    """Run `code` in a process of its own: a broken library ends that one alone."""
    return process.run([sys.executable, "-IBc", code, *map(str, arguments)], limit_s=CHILD_LIMIT_S)


def _why(done: process.Completed) -> str:
    return "".join(done.last_lines(1)) or done.ending


# ---- one NCCL -----------------------------------------------------------------------------------

_NCCL_VERSION = """
import ctypes, sys
version = ctypes.c_int()
ctypes.CDLL(sys.argv[1]).ncclGetVersion(ctypes.byref(version))
print(version.value)
"""

_NCCL_OF_TORCH = """
import ctypes, json, sys
sys.path.insert(0, sys.argv[1])
import torch
versions = {}
with open("/proc/self/maps") as maps:
    paths = {line.split(maxsplit=5)[5].strip() for line in maps if "/libnccl.so" in line}
for path in paths:
    version = ctypes.c_int()
    ctypes.CDLL(path).ncclGetVersion(ctypes.byref(version))
    versions[path] = version.value
print(json.dumps({"mapped": versions, "compiled": torch.cuda.nccl.version()}))
"""


def version_code(version: str) -> int:
    """NCCL's own number for "2.30.7", as nccl.h makes it since 2.9: 23007."""
    major, minor, patch = (int(part) for part in version.split("."))
    return major * 10000 + minor * 100 + patch


def one_nccl(image: Image) -> str:
    """The wheel's header, its library and what torch maps are the pinned version and one file."""
    pinned = version_code(image.pinned_nccl())
    library = image.site / NCCL_LIBRARY
    faults = [*_header_faults(image, pinned), *_library_faults(library, pinned)]
    asked = _python(_NCCL_OF_TORCH, image.site)
    if not asked.ok:
        raise Refuted([*faults, Fault("torch", f"does not say its NCCL: {_why(asked)}")])
    of_torch = json.loads(asked.last_lines(1)[0])
    refute([*faults, *_mapped_faults(of_torch["mapped"], library, pinned)])
    # a constant from when torch was compiled: it cannot tell which library is loaded
    compiled = ".".join(map(str, of_torch["compiled"]))
    return (
        f"{pinned}: header, library and the file that torch maps, {library};"
        f" torch was compiled with {compiled}"
    )


def _header_faults(image: Image, pinned: int) -> Iterator[Fault]:
    path = image.site / NCCL_HEADER
    if not path.is_file():
        if not image.is_listed("trimmed", NCCL_HEADER):
            yield Fault(str(path), "NCCL's header is missing")
        return
    code = re.search(r"^#define NCCL_VERSION_CODE (\d+)", path.read_text(), re.MULTILINE)
    if code is None or int(code[1]) != pinned:
        found = code[1] if code else "none"
        yield Fault(str(path), f"the header's NCCL_VERSION_CODE is {found}, pinned is {pinned}")


def _library_faults(path: Path, pinned: int) -> Iterator[Fault]:
    asked = _python(_NCCL_VERSION, path)
    if not asked.ok:
        yield Fault(str(path), f"NCCL's library does not answer ncclGetVersion: {_why(asked)}")
    elif asked.output != str(pinned):
        yield Fault(str(path), f"ncclGetVersion says {asked.output}, pinned is {pinned}")


def _mapped_faults(mapped: Mapping[str, int], library: Path, pinned: int) -> Iterator[Fault]:
    if not mapped:
        yield Fault("torch", "maps no libnccl.so.2 when it is imported")
    for path, code in mapped.items():
        if not library.exists() or not library.samefile(path):
            what = f"torch maps this NCCL, {code}, instead of the wheel's"
            yield Fault(path, f"{what}, {library} of {pinned}")


def one_nccl_file(image: Image) -> str:
    """The filesystem holds one libnccl, the wheel's, or none where none is pinned."""
    wheel = image.site / NCCL_LIBRARY
    pinned = image.bom["nccl"] is not None
    found = {
        entry.path.resolve()
        for entry in image.entries
        if _NCCL_NAME.fullmatch(entry.path.name) and entry.path.exists()
    }
    if pinned and wheel.exists():
        found = {path for path in found if not path.samefile(wheel)}
    what = "a second NCCL beside the wheel's" if pinned else "an NCCL where none is pinned"
    faults = [Fault(str(path), what) for path in sorted(found)]
    if pinned and not wheel.exists():
        faults.append(Fault(str(wheel), "the wheel's NCCL is missing"))
    refute([*faults, *_two_cuda_majors(image)])
    return f"{wheel} alone" if pinned else "no libnccl*.so* in the image, as pinned"


def _two_cuda_majors(image: Image) -> Iterator[Fault]:
    """https://github.com/pytorch/pytorch/issues/186591"""
    names = sorted(path.name for path in image.site.glob("nvidia_nccl_cu*-*.dist-info"))
    if len(names) > 1:
        yield Fault(
            " and ".join(names), "the wheels of two CUDA majors overwrite each other's libnccl.so.2"
        )


# ---- nccl-tests ---------------------------------------------------------------------------------


def nccl_tests(image: Image) -> str:
    """Each binary has the one NCCL, and LD_LIBRARY_PATH cannot lead it to another."""
    code = version_code(image.pinned_nccl())
    built: Mapping[str, str] | None = image.bom.get("nccl_tests")
    if built is None:
        raise NotApplicable("the bill of materials lists no nccl-tests: they were not built")
    version = built["version"].removeprefix("v")
    expected = (version, str(code), str(code))
    with tempfile.TemporaryDirectory(prefix="muster-decoy-") as decoy:
        # ld.so stops at the first file of that name, and says that this one is too short
        (Path(decoy) / "libnccl.so.2").touch()
        binaries = [image.root / "opt/nccl-tests/bin" / name for name in NCCL_TESTS]
        refute(fault for each in binaries for fault in _test_faults(each, expected, decoy))
    return (
        f"{len(NCCL_TESTS)} binaries of {version} with headers and library {code};"
        " LD_LIBRARY_PATH leads none elsewhere (DT_RPATH)"
    )


def _test_faults(binary: Path, expected: tuple[str, str, str], decoy: str) -> Iterator[Fault]:
    try:
        # the line comes before the first look at a GPU; without one the status is 2
        plain = process.run([str(binary)], limit_s=CHILD_LIMIT_S)
    except OSError as error:
        yield Fault(str(binary), f"does not run: {error.strerror}")
        return
    if _header_line(plain) != expected:
        said = _header_line(plain) or _why(plain)
        yield Fault(str(binary), f"says version, headers, library {said}, pinned are {expected}")
        return
    # DT_RPATH comes before LD_LIBRARY_PATH, DT_RUNPATH after it: ld.so(8)
    environment = {**os.environ, "LD_LIBRARY_PATH": decoy}
    led = process.run([str(binary)], limit_s=CHILD_LIMIT_S, env=environment)
    if _header_line(led) != expected:
        what = "LD_LIBRARY_PATH leads it to another libnccl.so.2: it has no DT_RPATH to the wheel"
        yield Fault(str(binary), f"{what} ({_why(led)})")


def _header_line(done: process.Completed) -> tuple[str, ...] | None:
    match = _NCCL_TESTS_LINE.search(done.output)
    return match.groups() if match else None


# ---- the user space of InfiniBand and RoCE ------------------------------------------------------

_OPEN = "import ctypes, sys; ctypes.CDLL(sys.argv[1])"

_LOOK_UP = """
import ctypes, sys
library = ctypes.CDLL(sys.argv[1])
look_up = ctypes.CDLL(None).dlvsym
look_up.restype = ctypes.c_void_p
look_up.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_char_p]
symbol, version = (word.encode() for word in sys.argv[2:])
if look_up(library._handle, symbol, version) is None:
    sys.exit(f"{sys.argv[1]} does not export it")
"""


def mlx5_symbol(image: Image) -> str:
    """libmlx5 exports, at its version, what NCCL looks up there.

    https://github.com/NVIDIA/nccl/blob/v2.30.7-1/src/misc/mlx5dvsymbols.cc
    """
    image.pinned_nccl()
    library, symbol, version = MLX5_SYMBOL
    asked = _python(_LOOK_UP, library, symbol, version)
    if not asked.ok:
        raise Refuted([Fault(f"{symbol}@{version}", _why(asked))])
    return f"{library} exports {symbol}@{version}"


def verbs_providers(image: Image) -> str:
    """Every driver that libibverbs is configured with has its library, and that one loads."""
    drivers: dict[str, Path] = {}
    for path in sorted((image.root / "etc/libibverbs.d").glob("*.driver")):
        lines = [line.split() for line in path.read_text().splitlines()]
        drivers |= {words[1]: path for words in lines if len(words) == 2 and words[0] == "driver"}
    what = "no driver of that name in /etc/libibverbs.d"
    faults = [Fault(name, what) for name in VERBS_PROVIDERS if name not in drivers]
    for name, path in drivers.items():
        faults += _provider_faults(image.root, name, path)
    refute(faults)
    return f"{len(drivers)} load, {' and '.join(VERBS_PROVIDERS)} among them"


def _provider_faults(root: Path, name: str, driver: Path) -> Iterator[Fault]:
    # the number after rdmav is libibverbs' private ABI: it changes with rdma-core
    libraries = [*root.glob(f"usr/lib/*/libibverbs/lib{name}-rdmav*.so")]
    if not libraries:
        yield Fault(str(driver), f"names {name}, and there is no lib{name}-rdmav*.so")
    for library in libraries:
        opened = _python(_OPEN, library)
        if not opened.ok:
            yield Fault(str(library), f"does not load: {_why(opened)}")


# ---- wheels -------------------------------------------------------------------------------------


def wheels(image: Image) -> str:
    """The wheels are those of the bill of materials, and each file is as its RECORD hashes it."""
    found: dict[str, str] = {}
    for wheel in image.wheels:
        name = _name(wheel.name)
        found[name] = f"{found[name]} and {wheel.version}" if name in found else wheel.version
    hashed = [record for record in image.records if record.hash]
    refute(
        [
            *_differences(listed_wheels(image), found),
            *_without_record(image),
            *(fault for record in hashed for fault in _file_faults(image, record)),
            *_strays(image),
        ]
    )
    return f"{len(found)} wheels, {len(hashed)} files by hash"


def listed_wheels(image: Image) -> dict[str, str]:
    """The versions in the bill of materials, wheels that were trimmed whole apart."""
    return {
        _name(wheel["name"]): wheel["version"]
        for wheel in image.bom["wheels"]
        if not image.is_listed("trimmed", _dist_info(wheel))
    }


def _name(name: str) -> str:
    return _DASHES.sub("-", name).lower()


def _dist_info(wheel: Mapping[str, str]) -> str:
    return f"{wheel['name'].replace('-', '_')}-{wheel['version']}.dist-info"


def _differences(listed: Mapping[str, str], found: Mapping[str, str]) -> Iterator[Fault]:
    for name in sorted(listed.keys() | found.keys()):
        if name not in listed:
            yield Fault(name, f"is {found[name]}, and the bill of materials does not list it")
        elif listed[name] != found.get(name):
            version = found.get(name, "missing")
            yield Fault(name, f"is {version}, the bill of materials says {listed[name]}")


def _without_record(image: Image) -> Iterator[Fault]:
    for wheel in image.wheels:
        if not wheel.read_text("RECORD"):
            yield Fault(wheel.name, "has no RECORD of its files")


def _file_faults(image: Image, record: Record) -> Iterator[Fault]:
    algorithm, _, expected = record.hash.partition("=")
    if not record.path.is_file():
        if not image.is_listed("trimmed", record.name):
            yield Fault(str(record.path), f"is missing from wheel {record.wheel}")
    elif _digest(record.path, algorithm) != expected and not image.is_listed(
        "stripped", record.name
    ):
        yield Fault(
            str(record.path),
            f"is not the file of wheel {record.wheel}: its {algorithm} is not the one in RECORD",
        )


def _digest(path: Path, algorithm: str) -> str:
    """As RECORD spells it: urlsafe base64 without padding."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, algorithm).digest()
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()


def _strays(image: Image) -> Iterator[Fault]:
    """Files in site-packages that no wheel brought: Python would import them all the same."""
    brought = {record.path for record in image.records}
    for entry in image.entries:
        path = entry.path
        ours = "__pycache__" in path.parts or path == image.site / "muster.pth"
        if path.is_relative_to(image.site) and path not in brought and not ours:
            yield Fault(str(path), "is in site-packages, and no wheel brought it")


# ---- Debian's packages --------------------------------------------------------------------------


def debian_packages(image: Image) -> str:
    """dpkg has the packages of the bill of materials, at their versions."""
    listed, found = (
        {f"{package['name']}:{package['architecture']}": package["version"] for package in packages}
        for packages in (image.bom["debian"], bom.debian_packages())
    )
    refute(_differences(listed, found))
    return f"{len(found)} packages"


def debian_files(image: Image) -> str:
    """The packages' files are those that dpkg unpacked, as dpkg --verify asks."""
    checked = 0
    faults: list[Fault] = []
    for sums in sorted((image.root / "var/lib/dpkg/info").glob("*.md5sums")):
        for line in sums.read_text().splitlines():
            expected, name = line.split(maxsplit=1)
            path = image.root / name
            checked += path.is_file()
            if not path.is_file():
                if not _LEFT_OUT.match(name):
                    faults.append(Fault(str(path), f"is missing from package {sums.stem}"))
            elif _md5(path) != expected:
                faults.append(
                    Fault(str(path), f"is not the file of package {sums.stem}: its md5 differs")
                )
    refute(faults)
    return f"{checked} files by hash"


def _md5(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


# ---- nothing that does not belong in an image ---------------------------------------------------


def setuid(image: Image) -> str:
    """No file gives its caller another user's or group's rights, Debian's known ones apart."""
    special = [
        entry
        for entry in image.entries
        if stat.S_ISREG(entry.mode) and entry.mode & (stat.S_ISUID | stat.S_ISGID)
    ]
    known = {image.root / name.removeprefix("/") for name in DEBIAN_SETUID}
    refute(
        Fault(str(entry.path), f"has mode {stat.S_IMODE(entry.mode):o}")
        for entry in special
        if entry.path not in known
    )
    return f"{len(special)} files, all Debian's own"


def secrets(image: Image) -> str:
    """No private key, no file of passwords, no password in pip's configuration."""
    # what came in a wheel is public; tests of wheels hold keys
    brought = {record.path for record in image.records}
    folders = [image.root / name for name in SECRET_FOLDERS]
    searched = [
        entry.path
        for entry in image.entries
        if stat.S_ISREG(entry.mode)
        and entry.path not in brought
        and os.access(entry.path, os.R_OK)  # root's always
        and any(entry.path.is_relative_to(folder) for folder in folders)
    ]
    refute(fault for path in searched for fault in _secret_faults(path))
    return f"{len(searched)} files outside the wheels searched"


def _secret_faults(path: Path) -> Iterator[Fault]:
    if path.name in CREDENTIAL_FILES:
        yield Fault(str(path), "is a file of passwords")
    elif _holds(path, _PRIVATE_KEY):
        yield Fault(str(path), "holds a private key")
    elif path.name in PIP_CONFIGURATIONS and _holds(path, _PASSWORD_IN_URL):
        yield Fault(str(path), "holds a password in a URL")


def _holds(path: Path, pattern: re.Pattern[bytes]) -> bool:
    with path.open("rb") as file:
        if not path.stat().st_size:
            return False  # nothing to map
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return pattern.search(content) is not None


def caches(image: Image) -> str:
    """No cache of pip's and no list or package of apt's takes room."""
    names = (f"/{entry.path.relative_to(image.root)}" for entry in image.entries)
    refute(Fault(name, "is a leftover in a cache") for name in names if _CACHE.match(name))
    return "none of pip's, none of apt's"


def compilers(image: Image) -> str:
    """No compiler or linker is on PATH: they belong to the build."""
    # /bin is a link to /usr/bin
    folders = dict.fromkeys(folder.resolve() for folder in image.path if folder.is_dir())
    refute(
        Fault(str(path), "is a compiler or linker on PATH")
        for folder in folders
        for path in sorted(folder.iterdir())
        if _COMPILER.fullmatch(path.name)
    )
    return f"none in {len(folders)} folders of PATH"


# ---- all of them --------------------------------------------------------------------------------

_INSTALLED_OVER = "something was installed, changed or removed after the build, or in a layer above"

CLAIMS: tuple[Claim[Image], ...] = (
    Claim("one_nccl", one_nccl, "the NCCL wheel and torch do not belong together"),
    Claim(
        "one_nccl_file",
        one_nccl_file,
        "a package, a copy or an image below brought it: which one is loaded is then chance",
        "take it out; with nvidia-nccl of two CUDA majors, pip uninstall both and install one",
    ),
    Claim(
        "nccl_tests",
        nccl_tests,
        "they were built against another NCCL, or linked without --disable-new-dtags",
    ),
    Claim(
        "mlx5_symbol",
        mlx5_symbol,
        "rdma-core is older than NCCL wants: Debian 12 and Ubuntu 24.04 have no MLX5_1.25",
        "build on Debian 13 or newer",
    ),
    Claim("verbs_providers", verbs_providers, "ibverbs-providers is missing or not whole"),
    Claim("wheels", wheels, _INSTALLED_OVER),
    Claim("debian_packages", debian_packages, _INSTALLED_OVER),
    Claim("debian_files", debian_files, _INSTALLED_OVER),
    Claim(
        "setuid",
        setuid,
        "a package brought it, or chmod u+s: any user of the container gets its owner's rights",
        "chmod a-s the file in the Dockerfile, or leave its package out",
    ),
    Claim(
        "secrets",
        secrets,
        "it was copied or made during a build: whoever has the image has it too",
        "withdraw it, for a layer keeps what a later one deletes; then build again without it,"
        " with RUN --mount=type=secret where a step needs it",
    ),
    Claim("caches", caches, "a step of the build installed without cleaning up behind itself"),
    Claim(
        "compilers",
        compilers,
        "a tool of the build came into the image that runs",
        "leave it in the stage that builds",
    ),
)


def around() -> Image:
    """The image that this process runs in; FileNotFoundError when it has no bill of materials."""
    facts = json.loads(bom.PATH.read_text(encoding="utf-8"))
    path = tuple(Path(folder) for folder in os.get_exec_path())
    return Image(Path("/"), Path(sysconfig.get_path("purelib")), path, facts)


def main() -> None:
    image = around()
    sys.stdout.write(json.dumps({"bom": image.bom}) + "\n")
    for claim in CLAIMS:
        sys.stdout.write(json.dumps({"proof": asdict(proof(claim, image))}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
