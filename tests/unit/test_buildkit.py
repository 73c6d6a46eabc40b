"""The docker client: which one is chosen, what it is given, what its words mean.

The clients are shell scripts that answer as the real ones do; real builds are in tests/image.
"""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.unit.conftest import Recorder

from muster import buildkit
from muster.buildkit import Build, Client
from muster.errors import BuildFailed, DiskFull, NoBuildKitClient

Program = Callable[[str, str], Path]

LOG = """\
#0 building with "default" instance using docker driver

#1 [internal] load build definition from Dockerfile
#1 DONE 0.0s

#5 [os 1/3] FROM docker.io/library/base
#5 CACHED

#6 [os 2/3] RUN apt-get update     && apt-get install nothing
#6 0.312 Reading package lists...

#7 [venv 1/2] RUN python3 -m venv
#7 0.100 on its way
#7 CANCELED

#6 [os 2/3] RUN apt-get update     && apt-get install nothing
#6 12.50 E: Unable to locate package nothing
#6 ERROR: process "/bin/sh -c apt-get" did not complete successfully: exit code: 100
------
 > [os 2/3] RUN apt-get update:
------
ERROR: failed to solve: process did not complete successfully: exit code: 100
"""


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Two folders that are all of PATH; a docker client of this machine is out of sight."""
    found = [tmp_path / "first", tmp_path / "second"]
    for folder in found:
        folder.mkdir()
    monkeypatch.setenv("PATH", os.pathsep.join(map(str, found)))
    access = os.access
    monkeypatch.setattr(
        os, "access", lambda path, mode: path != Path("/usr/bin/docker") and access(path, mode)
    )
    return found


def docker(folder: Path, version: str, *, buildx: bool) -> Path:
    """A client that no Engine answers: its version is said all the same, and it fails."""
    path = folder / "docker"
    path.write_text(
        '#!/bin/sh\ncase "$*" in\n'
        f"'version --format {{{{.Client.Version}}}}') echo '{version}'; echo no >&2; exit 1;;\n"
        f"'buildx version') exit {0 if buildx else 1};;\n"
        "esac\nexit 9\n"
    )
    path.chmod(0o755)
    return path


def test_a_client_with_buildx_builds_with_the_builder_of_its_engine(folders: list[Path]) -> None:
    path = docker(folders[0], "29.0.0", buildx=True)
    client = buildkit.find_client(["--context", "far"], "far")
    assert client.build_argv == [
        *(str(path), "--context", "far"),
        *("buildx", "build", "--builder", "far", "--load"),
    ]


@pytest.mark.parametrize("version", ["18.09.0", "20.10.24+dfsg1", "22.06.0"])
def test_an_old_client_without_buildx_builds_by_itself(folders: list[Path], version: str) -> None:
    path = docker(folders[0], version, buildx=False)
    client = buildkit.find_client(["--host", "unix:///x"], "default")
    assert client.build_argv == [str(path), "--host", "unix:///x", "build"]


@pytest.mark.parametrize("version", ["18.06.3", "23.0.0", "29.0.0", "", "what?"])
def test_any_other_without_buildx_is_passed_over(folders: list[Path], version: str) -> None:
    docker(folders[0], version, buildx=False)
    second = docker(folders[1], "29.0.0", buildx=True)
    assert buildkit.find_client([], "default").path == second


def test_a_client_that_does_not_run_is_passed_over(folders: list[Path]) -> None:
    broken = folders[0] / "docker"
    broken.write_bytes(b"\x7fELF of another machine")
    broken.chmod(0o755)
    second = docker(folders[1], "29.0.0", buildx=True)
    assert buildkit.find_client([], "default").path == second


def test_the_first_that_can_build_is_taken(folders: list[Path]) -> None:
    first = docker(folders[0], "20.10.0", buildx=False)
    docker(folders[1], "29.0.0", buildx=True)
    assert buildkit.find_client([], "default").path == first


def test_without_one_all_that_were_found_are_named(folders: list[Path]) -> None:
    with pytest.raises(NoBuildKitClient, match="none on PATH"):
        buildkit.find_client([], "default")
    docker(folders[0], "29.0.0", buildx=False)
    (folders[1] / "docker").mkdir()
    with pytest.raises(NoBuildKitClient, match=r"\(\S+/first/docker 29\.0\.0 has no buildx plug"):
        buildkit.find_client([], "default")


@pytest.fixture
def order(tmp_path: Path) -> Build:
    return Build(
        context=tmp_path,
        dockerfile=tmp_path / "Dockerfile",
        ref="muster:cpu",
        args={"BASE": "debian@sha256:1"},
        labels={"b": "2", "a": "1 and more"},
    )


def build(
    program: Program, order: Build, progress: Recorder, log: str, status: int, script: str = ""
) -> None:
    path = program("docker", f"{script}\ncat <<'END'\n{log}\nEND\nexit {status}")
    buildkit.build(Client(path, True, (), "default"), order, progress)


def test_the_order_becomes_flags_and_no_proxy_s_value_does(
    program: Program,
    order: Build,
    progress: Recorder,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HTTPS_PROXY", "user:secret")
    keep = f'printf "%s\\n" "$DOCKER_BUILDKIT" "$HTTPS_PROXY" "$@" > {tmp_path}/given'
    build(program, order, progress, LOG, 0, keep)
    assert (tmp_path / "given").read_text().splitlines() == [
        *("1", "user:secret", "buildx", "build", "--builder", "default", "--load"),
        *("--file", str(tmp_path / "Dockerfile"), "--tag", "muster:cpu", "--progress", "plain"),
        *("--build-arg", "BASE=debian@sha256:1", "--label", "a=1 and more", "--label", "b=2"),
        *("--build-arg", "HTTPS_PROXY", str(tmp_path)),
    ]


def test_each_step_is_said_once_and_every_line_is_a_detail(
    program: Program, order: Build, progress: Recorder
) -> None:
    build(program, order, progress, LOG, 0)
    assert [line for line in progress.said if line.startswith("[")] == [
        "[os 1/3] FROM docker.io/library/base",
        "[os 2/3] RUN apt-get update && apt-get install nothing",
        "[venv 1/2] RUN python3 -m venv",
    ]
    assert progress.details == [*LOG.splitlines(), ""]


def test_a_failed_build_names_the_step_and_what_that_step_said(
    program: Program, order: Build, progress: Recorder
) -> None:
    with pytest.raises(BuildFailed) as caught:
        build(program, order, progress, LOG, 1)
    assert caught.value.what.splitlines() == [
        "the build failed at [os 2/3] RUN apt-get update && apt-get install nothing",
        "  | Reading package lists...",
        "  | E: Unable to locate package nothing",
    ]


def test_a_step_that_said_nothing_is_named_with_its_error(
    program: Program, order: Build, progress: Recorder
) -> None:
    log = "#4 [muster 1/2] COPY a b\n#4 ERROR: not found"
    with pytest.raises(BuildFailed, match=r"(?s)at \[muster 1/2\] COPY a b\n  \| ERROR: not found"):
        build(program, order, progress, log, 1)


def test_a_build_that_fails_before_any_step_shows_its_last_words(
    program: Program, order: Build, progress: Recorder
) -> None:
    with pytest.raises(BuildFailed, match=r"(?s)docker build \(exit code 7\)\n  \| no such build"):
        build(program, order, progress, "no such builder", 7)


def test_a_full_disk_is_called_that(program: Program, order: Build, progress: Recorder) -> None:
    log = f"{LOG}\nERROR: write /x: No space left on device\nexecutor failed running venv.sh"
    with pytest.raises(DiskFull, match=r"Engine's \(ERROR: write /x: No space left on device\)"):
        build(program, order, progress, log, 1)
