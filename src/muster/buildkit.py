"""A docker client that can BuildKit, and a build with it: the SDK cannot."""

import os
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.version import InvalidVersion, Version

from muster import process
from muster.errors import BuildFailed, DiskFull, NoBuildKitClient
from muster.progress import Progress

# from 23.0 on the client needs the buildx plugin; before 18.09 there was no BuildKit
_OWN_BUILDER = (Version("18.9"), Version("23"))

_LINE = re.compile(r"#(\d+) (.+)")
_OUTPUT = re.compile(r"\d+\.\d+ (.*\S.*)")
_STEP_WIDTH = 100
_PROXIES = ("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")


@dataclass(frozen=True)
class Client:
    """A docker client: its path, and whether it builds by its buildx plugin or by itself.

    `engine_flags` lead it to the Engine, `builder` is the name of that Engine's own builder.
    """

    path: Path
    buildx: bool
    engine_flags: tuple[str, ...]
    builder: str

    @property
    def build_argv(self) -> list[str]:
        if self.buildx:
            # a builder in a container would see none of the Engine's images: name its own
            build = ["buildx", "build", "--builder", self.builder, "--load"]
        else:
            build = ["build"]
        return [str(self.path), *self.engine_flags, *build]


@dataclass(frozen=True)
class Build:
    """One build: a context folder with its Dockerfile, arguments, labels, and the reference."""

    context: Path
    dockerfile: Path
    ref: str
    args: Mapping[str, str]
    labels: Mapping[str, str]
    no_cache: bool = False

    @property
    def argv(self) -> list[str]:
        argv = ["--file", str(self.dockerfile), "--tag", self.ref, "--progress", "plain"]
        for name, value in sorted(self.args.items()):
            argv += ["--build-arg", f"{name}={value}"]
        for name, value in sorted(self.labels.items()):
            argv += ["--label", f"{name}={value}"]
        if self.no_cache:
            argv += ["--no-cache"]
        # by name alone: the client reads the value, which may hold a password, from its environment
        argv += [word for name in _PROXIES if name in os.environ for word in ("--build-arg", name)]
        return [*argv, str(self.context)]


def find_client(engine_flags: Sequence[str], builder: str) -> Client:
    """The first docker client on PATH, then in /usr/bin, that can build with BuildKit."""
    folders = [*os.environ.get("PATH", "").split(os.pathsep), "/usr/bin"]
    found: list[str] = []
    for path in dict.fromkeys(Path(folder) / "docker" for folder in folders if folder):
        if not os.access(path, os.X_OK) or path.is_dir():
            continue
        try:
            version = process.run([str(path), "version", "--format", "{{.Client.Version}}"])
        except OSError as error:
            found.append(f"{path} does not run: {error.strerror}")
            continue
        # without an Engine it fails, yet the client's version stands in the first line
        first = version.output.partition("\n")[0].strip()
        if process.run([str(path), "buildx", "version"]).ok:
            return Client(path, True, tuple(engine_flags), builder)
        if _has_own_builder(first):
            return Client(path, False, tuple(engine_flags), builder)
        found.append(f"{path} {first} has no buildx plugin")
    raise NoBuildKitClient(found)


def build(client: Client, order: Build, progress: Progress) -> None:
    """Build `order`; BuildFailed names the step and its last lines, DiskFull a full disk."""
    log = _Log(progress)
    done = process.run(
        [*client.build_argv, *order.argv],
        env={**os.environ, "DOCKER_BUILDKIT": "1"},
        on_line=log.read,
    )
    if done.ok:
        return
    output = done.output.splitlines()
    if full := [line for line in output if "no space left on device" in line.lower()]:
        raise DiskFull("the Engine's", full[0].strip())
    step, lines = log.failed or (f"docker build ({done.ending})", done.last_lines())
    raise BuildFailed(step, lines)


class _Log:
    """BuildKit's plain progress: "#N [stage 2/3] RUN …", then its output as "#N 1.234 text"."""

    def __init__(self, progress: Progress) -> None:
        self.failed: tuple[str, list[str]] | None = None
        self._progress = progress
        self._steps: dict[str, str] = {}
        self._output: dict[str, list[str]] = defaultdict(list)

    def read(self, line: str) -> None:
        self._progress.detail(line)
        match = _LINE.match(line)
        if match is None:
            return
        number, text = match.groups()
        if number not in self._steps:
            self._steps[number] = " ".join(text.split())[:_STEP_WIDTH]
            if not text.startswith("[internal]"):
                self._progress.say(self._steps[number])
        elif text.startswith("ERROR"):
            self.failed = self._steps[number], self._output[number][-15:] or [text]
        elif output := _OUTPUT.match(text):
            self._output[number].append(output[1])


def _has_own_builder(version: str) -> bool:
    try:
        return _OWN_BUILDER[0] <= Version(version) < _OWN_BUILDER[1]
    except InvalidVersion:
        return False
