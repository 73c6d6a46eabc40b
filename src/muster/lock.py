"""Refreshes pins.toml and the locks from the registries; only this room writes them.

Wheels are resolved by the host's pip, whose own configuration counts; the newest tag of nccl-tests
comes from git, the digests of the bases from their registry. All of it is written, or none.
"""

import contextlib
import errno
import json
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from os import environ
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from muster import pins, process
from muster.errors import (
    CannotWrite,
    DiskFull,
    ExitCode,
    LockBroken,
    MachineLacks,
    NcclTestsUnreachable,
    PinsBroken,
    TagMoved,
    UnknownDigestKind,
    WheelsNotFetched,
    WheelYanked,
)
from muster.pins import Base, DigestKind, NcclTests, Pins, Variant, Wheel
from muster.progress import Progress
from muster.wheelhouse import Target

# what every variant holds beside torch: numpy for the bridge, the rest for the smoke suite and the
# doctor
BESIDE_TORCH = ("numpy", "nvidia-ml-py", "pip", "pytest", "pytest-timeout", "pytest-reportlog")

GIT_LIMIT_S = 60.0
# each round adds what pip could not know about the image's Python
MOST_ROUNDS = 20

# what a registry says of a reference: its digest, the media type, the architectures behind it
DigestOf = Callable[[str], tuple[str, str, Sequence[str]]]

_INDEXES = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)
_MANIFESTS = (
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_TAG = re.compile(r"^([0-9a-f]{40})\trefs/tags/(v\d+(?:\.\d+)*)(\^\{\})?$", re.MULTILINE)
_YANKED = re.compile(r"yanked version: '([^']+)' candidate \(version (\S+)")
_CUDA_MAJOR = re.compile(r"cuda>=(\d+)")
# pip's last try of an index; what it found elsewhere is not the newest then
_GAVE_UP = re.compile(r"Retrying \(Retry\(total=0,.*")
_NONE = re.compile(r"^ERROR: (No matching distribution|Cannot install)", re.MULTILINE)


@dataclass(frozen=True)
class Move:
    """One pin that is behind: what it pins, the file that says so, its value and the newer one."""

    what: str
    where: str
    before: str
    after: str

    def to_dict(self) -> dict[str, str]:
        return {"what": self.what, "where": self.where, "from": self.before, "to": self.after}


@dataclass(frozen=True)
class Note:
    """A part that stays as it is, and why."""

    part: str
    why: str

    def to_dict(self) -> dict[str, str]:
        return {"part": self.part, "why": self.why}


@dataclass(frozen=True, kw_only=True)
class Result:
    """What is behind. `kept` stays on purpose; one part in `unreached` and nothing is written."""

    moves: tuple[Move, ...]
    kept: tuple[Note, ...]
    unreached: tuple[Note, ...]
    check: bool
    seconds: float

    @property
    def written(self) -> bool:
        return bool(self.moves) and not self.unreached and not self.check

    @property
    def exit_code(self) -> int:
        if self.unreached:
            return ExitCode.MACHINE_LACKS
        return ExitCode.FINDINGS if self.check and self.moves else 0

    def to_dict(self) -> dict[str, Any]:
        return {
            "command": "lock",
            "check": self.check,
            "written": self.written,
            "moves": [move.to_dict() for move in self.moves],
            "kept": [note.to_dict() for note in self.kept],
            "unreached": [note.to_dict() for note in self.unreached],
            "seconds": round(self.seconds, 3),
        }


def lock(docker: Path, digest_of: DigestOf, progress: Progress, *, check: bool = False) -> Result:
    """Bring the pins and locks in the folder `docker` up to date; with `check`, only look.

    A part that cannot be reached is in the Result, and then nothing is written. Raises for what is
    wrong with a pin: WheelYanked, DigestGone, UnknownDigestKind, TagMoved.
    """
    started = time.monotonic()
    search = _Search(pins.read(docker), docker, progress)
    search.look(digest_of)
    moves = search.moves()
    result = Result(
        moves=moves,
        kept=tuple(search.kept),
        unreached=tuple(search.unreached),
        check=check,
        seconds=time.monotonic() - started,
    )
    if result.written:
        _write(docker, search)
    return result


class _Search:
    """The pins as they are and as they would be; `locks` holds the wheels by their file's path."""

    def __init__(self, pinned: Pins, docker: Path, progress: Progress) -> None:
        self.old = self.new = pinned
        self.docker = docker
        self.progress = progress
        self.kept: list[Note] = []
        self.unreached: list[Note] = []
        self.locks: dict[Path, tuple[Wheel, ...]] = {}

    def look(self, digest_of: DigestOf) -> None:
        """Ask every registry, the next one too when one does not answer."""
        for variant in self.old.variants.values():
            with self._part(f"wheels of {variant.name}"):
                self._wheels(variant)
        with self._part("nccl-tests"):
            self.new = replace(self.new, nccl_tests=newest_tag(self.old.nccl_tests))
        for base in {row.base.suite: row.base for row in self.old.variants.values()}.values():
            with self._part(f"base {base.suite}"):
                self._base(base, digest_of)

    def moves(self) -> tuple[Move, ...]:
        found = [
            Move(f"{table} {key}", "pins.toml", before, after)
            for table, key, before, after in _edits(self.old, self.new)
        ]
        for path, wheels in self.locks.items():
            found += _wheel_moves(path, pins.read_wheels(path), wheels)
        return tuple(found)

    @contextlib.contextmanager
    def _part(self, name: str) -> Iterator[None]:
        self.progress.detail(f"looking for newer {name}")
        try:
            yield
        except MachineLacks as error:
            self.unreached.append(Note(name, error.what))

    def _base(self, base: Base, digest_of: DigestOf) -> None:
        digest, media_type, architectures = digest_of(base.image)
        kind = digest_kind(base.image, digest, media_type, architectures)
        newer = replace(base, digest=digest, digest_kind=kind)
        for variant in self.new.variants.values():
            if variant.base.suite == base.suite:
                self._replace(replace(variant, base=newer))

    def _wheels(self, variant: Variant) -> None:
        pins.read_lock(self.old, variant)  # one that is broken is said before anything is asked
        wheels = newest_wheels(variant, self.progress)
        if wheels is None:
            why = f"pip finds no torch like {variant.torch} in its configured places"
            self.kept.append(Note(f"wheels of {variant.name}", why))
            return
        by_name = {wheel.name: wheel for wheel in wheels}
        cuda = variant.cuda
        if cuda is not None:
            cuda = replace(cuda, nccl=by_name[_nccl(variant)].version)
        compiler: tuple[Wheel, ...] = ()
        if variant.nvcc_lock_path.is_file():
            compiler = _compiler_wheels(variant, by_name, self.progress)
        # a part is found whole or not at all
        self._replace(replace(variant, torch=by_name["torch"].version, cuda=cuda))
        self.locks[variant.lock_path] = wheels
        if compiler:
            self.locks[variant.nvcc_lock_path] = compiler

    def _replace(self, variant: Variant) -> None:
        self.new = replace(self.new, variants={**self.new.variants, variant.name: variant})


# ---- nccl-tests and the bases -------------------------------------------------------------------


def newest_tag(pin: NcclTests) -> NcclTests:
    """The newest release that `pin.repository` has; TagMoved when the pinned one is another."""
    settings = {**environ, "GIT_TERMINAL_PROMPT": "0"}
    argv = ["git", "ls-remote", "--tags", "--", pin.repository]
    try:
        done = process.run(argv, limit_s=GIT_LIMIT_S, env=settings)
    except FileNotFoundError:
        raise NcclTestsUnreachable(pin.repository, "git is not installed") from None
    if not done.ok:
        raise NcclTestsUnreachable(pin.repository, (done.last_lines(1) or [done.ending])[0])
    commits: dict[str, str] = {}
    # an annotated tag has an object of its own, and its commit on the line after, with ^{}
    for commit, tag, peeled in _TAG.findall(done.output):
        if peeled or tag not in commits:
            commits[tag] = commit
    if pin.tag not in commits:
        raise NcclTestsUnreachable(pin.repository, f"it has no tag {pin.tag}, which is pinned")
    if commits[pin.tag] != pin.commit:
        raise TagMoved(pin.tag, pin.commit, commits[pin.tag])
    tag = max(commits, key=Version)
    return replace(pin, tag=tag, commit=commits[tag])


def digest_kind(
    image: str, digest: str, media_type: str, architectures: Sequence[str]
) -> DigestKind:
    """What `digest` names; UnknownDigestKind unless the registry's answer leaves no doubt."""
    if _DIGEST.fullmatch(digest):
        if media_type in _INDEXES:
            return DigestKind.INDEX
        named = set(architectures)
        for kind in (DigestKind.AMD64, DigestKind.ARM64):
            if media_type in _MANIFESTS and named == {kind.value}:
                return kind
    evidence = f"{media_type or 'no media type'} for {', '.join(architectures) or 'nothing'}"
    raise UnknownDigestKind(image, digest, evidence)


# ---- the wheels ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Item:
    """A wheel that pip chose, with what its metadata asks for."""

    wheel: Wheel
    requires: tuple[Requirement, ...]
    requires_python: str

    def wants(self, python: str, extras: frozenset[str]) -> Iterator[Requirement]:
        """What it needs in the image, whatever Python pip itself runs on."""
        # pip takes markers by the interpreter that runs it: --python-version only chooses wheels
        image = {
            "implementation_name": "cpython",
            "os_name": "posix",
            "platform_machine": "x86_64",
            "platform_system": "Linux",
            "python_full_version": f"{python}.0",
            "python_version": python,
            "sys_platform": "linux",
        }
        for each in self.requires:
            if each.marker is None or any(
                each.marker.evaluate({**image, "extra": extra}) for extra in extras | {""}
            ):
                yield each


def newest_wheels(variant: Variant, progress: Progress) -> tuple[Wheel, ...] | None:
    """The wheels of the newest torch that fits `variant`: one NCCL, the same CUDA, or the suffix.

    None when the torch of a variant without CUDA is in none of the places that pip knows.
    """
    pip = _Pip(variant, progress)
    public = Version(variant.torch).public
    passed_over: list[str] = []
    while True:
        older = "".join(f",!={version}" for version in passed_over)
        torch = pip.choose(f"torch>={public}{older}")
        if torch is None:
            break
        if _fits(variant, torch):
            # == would take the same version with a suffix too
            wheels = pip.resolve([f"torch==={torch.wheel.version}", *BESIDE_TORCH])
            if _nccls(wheel.name for wheel in wheels) == _wanted_nccls(variant):
                return wheels
        passed_over.append(torch.wheel.version)
    if variant.cuda is None:
        return None
    # pip takes a yanked one only when it is named
    pip.choose(f"torch==={variant.torch}")
    raise WheelsNotFetched([f"torch=={variant.torch}"], f"nor a newer one for {variant.name}")


def _fits(variant: Variant, torch: _Item) -> bool:
    names = (canonicalize_name(each.name) for each in torch.wants(variant.base.python, frozenset()))
    same_suffix = Version(torch.wheel.version).local == Version(variant.torch).local
    return same_suffix and _nccls(names) == _wanted_nccls(variant)


def _nccls(names: Iterator[str]) -> list[str]:
    return [name for name in names if name.startswith("nvidia-nccl-")]


def _wanted_nccls(variant: Variant) -> list[str]:
    return [_nccl(variant)] if variant.cuda else []


def _nccl(variant: Variant) -> str:
    """The wheel of NCCL for the variant's CUDA."""
    assert variant.cuda is not None
    major = _CUDA_MAJOR.match(variant.cuda.require_cuda)
    if major is None:
        pins_toml = variant.lock_path.parents[1] / "pins.toml"
        why = f"require_cuda {variant.cuda.require_cuda!r} does not begin with cuda>=MAJOR"
        raise PinsBroken(pins_toml, f"[variants.{variant.name}] {why}")
    return f"nvidia-nccl-cu{major[1]}"


def _compiler_wheels(
    variant: Variant, wheels: Mapping[str, Wheel], progress: Progress
) -> tuple[Wheel, ...]:
    """The wheels that compile nccl-tests, of the CUDA minor whose runtime `wheels` hold."""
    locked = pins.read_wheels(variant.nvcc_lock_path)
    runtimes = [each for each in locked if each.name.startswith("nvidia-cuda-runtime")]
    if not runtimes or runtimes[0].name not in wheels:
        names = ", ".join(each.name for each in runtimes) or "none"
        why = f"its CUDA runtime ({names}) is not one of the wheels of {variant.name}"
        raise LockBroken(variant.nvcc_lock_path, 1, why)
    minor = ".".join(wheels[runtimes[0].name].version.split(".")[:2])
    requirements = [
        str(wheels[each.name]) if each.name in wheels else f"{each.name}=={minor}.*"
        for each in locked
    ]
    return _Pip(variant, progress).resolve(requirements)


class _Pip:
    """The host's pip, asked what it would install in a variant's image."""

    def __init__(self, variant: Variant, progress: Progress) -> None:
        self.variant = variant
        self.python = variant.base.python
        self.progress = progress

    def choose(self, requirement: str) -> _Item | None:
        """The one wheel that pip takes for `requirement`; None when there is none."""
        # of the wheels for this Python, one may still say that it is not
        constraints: list[str] = []
        while True:
            done, items = self._run([requirement], constraints, "--no-deps")
            if not done.ok and _NONE.search(done.output) and not _GAVE_UP.search(done.output):
                return None
            (item,) = self._checked(done, items, [requirement])
            if self._is_for(item):
                return item
            constraints.append(f"{item.wheel.name}!={item.wheel.version}")

    def resolve(self, requirements: Sequence[str]) -> tuple[Wheel, ...]:
        """The closure of `requirements`, by name, each wheel with its hash."""
        wanted, constraints = [Requirement(each) for each in requirements], list[str]()
        for _ in range(MOST_ROUNDS):
            done, items = self._run([str(each) for each in wanted], constraints)
            chosen = {item.wheel.name: item for item in self._checked(done, items, requirements)}
            refused = [item for item in chosen.values() if not self._is_for(item)]
            reached, missing = self._closure(requirements, chosen)
            if not refused and not missing:
                return tuple(chosen[name].wheel for name in sorted(reached))
            constraints += [f"{item.wheel.name}!={item.wheel.version}" for item in refused]
            wanted += missing
        raise WheelsNotFetched(requirements, f"no agreement after {MOST_ROUNDS} rounds of pip")

    def _closure(
        self, requirements: Sequence[str], chosen: Mapping[str, _Item]
    ) -> tuple[set[str], list[Requirement]]:
        """The names that the image needs of `chosen`, and what it needs beside."""
        reached: dict[str, frozenset[str]] = {}
        missing: list[Requirement] = []
        waiting = [Requirement(each) for each in requirements]
        while waiting:
            each = waiting.pop()
            name = canonicalize_name(each.name)
            item = chosen.get(name)
            if item is None or not each.specifier.contains(item.wheel.version, prereleases=True):
                plain = Requirement(str(each))
                plain.marker = None
                missing.append(plain)
                continue
            extras = reached.get(name, frozenset()) | each.extras
            if reached.get(name) != extras:
                reached[name] = extras
                waiting += item.wants(self.python, extras)
        return set(reached), missing

    def _is_for(self, item: _Item) -> bool:
        return SpecifierSet(item.requires_python).contains(f"{self.python}.0")

    def _run(
        self, requirements: Sequence[str], constraints: Sequence[str], *flags: str
    ) -> tuple[process.Completed, list[dict[str, Any]]]:
        with tempfile.TemporaryDirectory(prefix="muster-lock-") as folder:
            report, limits = Path(folder) / "report.json", Path(folder) / "constraints.txt"
            limits.write_text("".join(f"{each}\n" for each in constraints))
            done = process.run(
                [
                    *(sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed"),
                    # pip compares with its own interpreter: _is_for does it with the image's
                    *("--ignore-requires-python", "--no-input", "--disable-pip-version-check"),
                    *("--progress-bar", "off", "--only-binary", ":all:", "--target", folder),
                    *("--report", str(report), "--constraint", str(limits)),
                    *Target(self.python).pip_flags,
                    *flags,
                    *requirements,
                ],
                on_line=self.progress.detail,
            )
            return done, json.loads(report.read_text())["install"] if done.ok else []

    def _checked(
        self,
        done: process.Completed,
        items: Sequence[dict[str, Any]],
        requirements: Sequence[str],
    ) -> list[_Item]:
        """What pip's report says; an error for all that should not go into a lock."""
        if unreached := _GAVE_UP.search(done.output):
            raise WheelsNotFetched(requirements, unreached[0])
        if not done.ok:
            errors = [line for line in done.output.splitlines() if line.startswith("ERROR: ")]
            if "No space left on device" in done.output:
                raise DiskFull("pip's cache or temporary folder", done.last_lines(1)[0])
            raise WheelsNotFetched(requirements, (errors or done.last_lines(1) or [done.ending])[0])
        if yanked := _YANKED.search(done.output):
            raise WheelYanked(f"{yanked[1]}=={yanked[2].rstrip(',)')}", self.variant.name)
        return [self._item(each) for each in items]

    def _item(self, entry: Mapping[str, Any]) -> _Item:
        metadata = entry["metadata"]
        name, version = canonicalize_name(metadata["name"]), str(metadata["version"])
        if entry.get("is_yanked"):  # of newer pips
            raise WheelYanked(f"{name}=={version}", self.variant.name)
        hashes = entry["download_info"].get("archive_info", {}).get("hashes", {})
        if "sha256" not in hashes:
            raise WheelsNotFetched([f"{name}=={version}"], "its index tells no sha256")
        requires = tuple(Requirement(each) for each in metadata.get("requires_dist", ()))
        wheel = Wheel(name, version, str(hashes["sha256"]))
        return _Item(wheel, requires, metadata.get("requires_python", ""))


# ---- what moves, and writing it -----------------------------------------------------------------


def _wheel_moves(path: Path, old: Sequence[Wheel], new: Sequence[Wheel]) -> list[Move]:
    before, after = ({wheel.name: wheel for wheel in wheels} for wheels in (old, new))
    moves = []
    for name in sorted(before.keys() | after.keys()):
        left, right = before.get(name), after.get(name)
        if left == right:
            continue
        texts = [each.version if each else "none" for each in (left, right)]
        if left and right and left.version == right.version:
            texts = [f"{each.version} sha256 {each.sha256[:12]}" for each in (left, right)]
        moves.append(Move(name, f"locks/{path.name}", *texts))
    return moves


def _edits(old: Pins, new: Pins) -> list[tuple[str, str, str, str]]:
    """The values of pins.toml that differ: table, key, old and new."""
    values: dict[tuple[str, str], list[str]] = {}
    for found in (old, new):
        for suite, base in {row.base.suite: row.base for row in found.variants.values()}.items():
            values.setdefault((f"bases.{suite}", "digest"), []).append(base.digest)
            values.setdefault((f"bases.{suite}", "digest_kind"), []).append(base.digest_kind.value)
        values.setdefault(("nccl_tests", "tag"), []).append(found.nccl_tests.tag)
        values.setdefault(("nccl_tests", "commit"), []).append(found.nccl_tests.commit)
        for row in found.variants.values():
            values.setdefault((f"variants.{row.name}", "torch"), []).append(row.torch)
            if row.cuda:
                values.setdefault((f"variants.{row.name}", "nccl"), []).append(row.cuda.nccl)
    return [(*key, before, after) for key, (before, after) in values.items() if before != after]


def _edited(path: Path, edits: Sequence[tuple[str, str, str, str]]) -> str:
    """The text of pins.toml with these values in place of the old; all else stays, comments too."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    for table, key, before, after in edits:
        inside, found = False, []
        for number, line in enumerate(lines):
            if line.startswith("["):
                inside = line.split("#")[0].strip() == f"[{table}]"
            elif inside and re.match(rf'{key} *= *"{re.escape(before)}"', line):
                found.append(number)
        if len(found) != 1:
            raise PinsBroken(path, f'[{table}] has no line {key} = "{before}" to replace')
        lines[found[0]] = lines[found[0]].replace(f'"{before}"', f'"{after}"', 1)
    return "".join(lines)


def _locked(path: Path, wheels: Sequence[Wheel]) -> str:
    """The text of a lock: the comment that it begins with, then a line a wheel."""
    header = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.strip() and not line.startswith("#"):
            break
        header.append(line)
    lines = [f"{wheel} --hash=sha256:{wheel.sha256}" for wheel in wheels]
    return "\n".join([*header, *lines, ""])


def _write(docker: Path, search: _Search) -> None:
    """Put the new files in place of the old, when they read back as what was found."""
    pins_toml = docker / "pins.toml"
    texts = {pins_toml: _edited(pins_toml, _edits(search.old, search.new))}
    texts |= {path: _locked(path, wheels) for path, wheels in search.locks.items()}
    try:
        # beside the files, for a rename that cannot half happen
        with tempfile.TemporaryDirectory(prefix=".lock-", dir=docker) as folder:
            staged = Path(folder)
            shutil.copytree(docker / "locks", staged / "locks")
            for path, text in texts.items():
                (staged / path.relative_to(docker)).write_text(text, encoding="utf-8")
                shutil.copymode(path, staged / path.relative_to(docker))
            _check_staged(staged, docker, search)
            _put_in_place(staged, docker, sorted(texts))
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise DiskFull(str(docker), str(error)) from error
        raise CannotWrite(docker, error.strerror or str(error)) from error


def _check_staged(staged: Path, docker: Path, search: _Search) -> None:
    found = pins.read(staged)
    expected = {
        name: replace(row, lock_path=staged / row.lock_path.relative_to(docker))
        for name, row in search.new.variants.items()
    }
    if found != replace(search.new, variants=expected):
        raise PinsBroken(docker / "pins.toml", "it reads otherwise than what was to be written")
    for row in found.variants.values():
        pins.read_lock(found, row)
    for path, wheels in search.locks.items():
        if pins.read_wheels(staged / path.relative_to(docker)) != wheels:
            raise PinsBroken(path, "it reads otherwise than what was to be written")


def _put_in_place(staged: Path, docker: Path, paths: Sequence[Path]) -> None:
    """Rename every file over the old one; the old ones are back when one of them cannot be."""
    for path in paths:
        kept = staged / "old" / path.relative_to(docker)
        kept.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, kept)
    done: list[Path] = []
    try:
        for path in paths:
            done.append(path)
            (staged / path.relative_to(docker)).replace(path)
    except BaseException:
        for path in done:
            (staged / "old" / path.relative_to(docker)).replace(path)
        raise
