"""The lock command: real pip on a folder of tiny wheels, a real git repository, all or nothing."""

import hashlib
import os
import subprocess
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from tests.unit.conftest import Recorder

from muster import errors, lock, pins
from muster.engine import RegistryUnreachable
from muster.errors import (
    CannotWrite,
    DigestGone,
    ExitCode,
    LockBroken,
    MusterError,
    NcclTestsUnreachable,
    PinsBroken,
    WheelsNotFetched,
)
from muster.pins import DigestKind, NcclTests, Pins, Variant, Wheel

OCI_INDEX = "application/vnd.oci.image.index.v1+json"
DOCKER_LIST = "application/vnd.docker.distribution.manifest.list.v2+json"
OCI_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
DOCKER_MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
OLD = f"sha256:{'a1' * 32}"
NEW = f"sha256:{'c3' * 32}"

TOML = f"""# What this is for.
schema = 1
[run]
shm_size = "1g" # a gibibyte

# The base, by digest.
[bases.trixie] # stable
image = "debian:trixie-slim"
digest = "{OLD}" # 2026
digest_kind = "index"
python = "3.13"

# no variant's: it stays
[bases.spare]
image = "debian:sid-slim"
digest = "{OLD}"
digest_kind = "index"
python = "3.14"

[nccl_tests]
tag = "v2.9"
commit = "COMMIT"
repository = "REPOSITORY"

[variants.cpu]
accelerator = "cpu"
base = "trixie"
torch = "2.1+cpu" # nccl = "1.0"

[variants.gpu]
accelerator = "cuda"
base = "trixie"
torch = "2.1" # torch = "2.1"
nccl = "1.0"
driver = 580
require_cuda = "cuda>=13.0"
archs = [80, 90]
nvcc = "wheels"
"""


class Served:
    """The folder that is all that pip finds wheels in."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def add(self, name: str, version: str, *needs: str, python: str = ">=3.8") -> Wheel:
        escaped = name.replace("-", "_")
        info = f"{escaped}-{version}.dist-info"
        path = self.folder / f"{escaped}-{version}-py3-none-any.whl"
        metadata = [
            "Metadata-Version: 2.1",
            *(f"Name: {name}", f"Version: {version}", f"Requires-Python: {python}"),
            *(f"Requires-Dist: {each}" for each in needs),
        ]
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(f"{info}/METADATA", "\n".join([*metadata, ""]))
            wheel = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
            archive.writestr(f"{info}/WHEEL", wheel)
            archive.writestr(f"{info}/RECORD", "")
        return Wheel(name, version, hashlib.sha256(path.read_bytes()).hexdigest())

    def torch(self, version: str, nccl: str, *needs: str, cuda: int = 13) -> Wheel:
        self.add(f"nvidia-nccl-cu{cuda}", nccl)
        toolkit = f"nvidia-cuda-runtime=={cuda}.0.9"
        return self.add(
            "torch", version, f"nvidia-nccl-cu{cuda}=={nccl}", toolkit, "helper>=1", *needs
        )


@dataclass
class Registry:
    """What a registry would say of debian:trixie-slim."""

    answer: tuple[str, str, Sequence[str]] | MusterError = (OLD, OCI_INDEX, ("amd64", "arm64"))
    asked: list[str] = field(default_factory=list)

    def __call__(self, image: str) -> tuple[str, str, Sequence[str]]:
        self.asked.append(image)
        if isinstance(self.answer, MusterError):
            raise self.answer
        return self.answer


class Repository:
    """A git repository of nccl-tests."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.url = folder.as_uri()
        subprocess.run(["git", "init", "--quiet", str(folder)], check=True)

    def git(self, *words: str) -> str:
        settings = {
            f"GIT_{who}_{what}": "x@example.org"
            for who in ("AUTHOR", "COMMITTER")
            for what in ("NAME", "EMAIL")
        }
        done = subprocess.run(
            ["git", "-C", str(self.folder), "-c", "tag.gpgSign=false", *words],
            check=True,
            capture_output=True,
            text=True,
            env={**os.environ, **settings},
        )
        return done.stdout.strip()

    def release(self, *tags: str, annotated: bool = True) -> str:
        """A commit with these tags; its name."""
        self.git("commit", "--quiet", "--allow-empty", "--message", "more", "--no-gpg-sign")
        for tag in tags:
            self.git("tag", *(("--annotate", "--message", tag) if annotated else ()), tag)
        return self.git("rev-parse", "HEAD")


@pytest.fixture
def served(served: Path) -> Served:
    found = Served(served)
    for name in lock.BESIDE_TORCH:
        found.add(name, "1.0")
    found.add("helper", "1.0")
    found.add("nvidia-cuda-runtime", "13.0.9")
    found.add("nvidia-cuda-nvcc", "13.0.1")
    found.add("nvidia-cuda-nvcc", "13.1.7")
    return found


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return Repository(tmp_path / "nccl-tests")


@pytest.fixture
def docker(tmp_path: Path, served: Served, repository: Repository) -> Path:
    """A folder docker/ that is up to date."""
    folder = tmp_path / "docker"
    (folder / "locks").mkdir(parents=True)
    commit = repository.release("v2.9")
    text = TOML.replace("COMMIT", commit).replace("REPOSITORY", repository.url)
    (folder / "pins.toml").write_text(text)
    served.add("torch", "2.1+cpu", "helper")
    served.torch("2.1", "1.0")
    wheels = {"torch": "2.1", "nvidia-nccl-cu13": "1.0", "nvidia-cuda-runtime": "13.0.9"}
    beside = {**dict.fromkeys(lock.BESIDE_TORCH, "1.0"), "helper": "1.0"}
    compiler = {"pip": "1.0", "nvidia-cuda-nvcc": "13.0.1", "nvidia-cuda-runtime": "13.0.9"}
    write_lock(folder / "locks/cpu.txt", served, {**beside, "torch": "2.1+cpu"})
    write_lock(folder / "locks/gpu.txt", served, {**beside, **wheels})
    write_lock(folder / "locks/nvcc-gpu.txt", served, compiler)
    return folder


def write_lock(path: Path, served: Served, versions: dict[str, str]) -> None:
    lines = [f"# The wheels of {path.stem}.", "# All of them.", ""]
    for name, version in sorted(versions.items()):
        wheel = served.folder / f"{name.replace('-', '_')}-{version}-py3-none-any.whl"
        sha256 = hashlib.sha256(wheel.read_bytes()).hexdigest()
        lines.append(f"{name}=={version} --hash=sha256:{sha256}")
    path.write_text("\n".join([*lines, ""]))


def contents(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): path.read_text()
        for path in folder.rglob("*")
        if path.is_file()
    }


def variant(docker: Path, name: str = "gpu") -> Variant:
    return pins.read(docker).variant(name)


def newest(docker: Path, progress: Recorder, name: str = "gpu") -> dict[str, Wheel]:
    wheels = lock.newest_wheels(variant(docker, name), progress)
    assert wheels is not None
    return {wheel.name: wheel for wheel in wheels}


# ---- the whole command --------------------------------------------------------------------------


def test_what_is_current_does_not_move(docker: Path, progress: Recorder) -> None:
    before, registry = contents(docker), Registry()
    result = lock.lock(docker, registry, progress)
    assert (result.moves, result.kept, result.unreached) == ((), (), ())
    assert (result.exit_code, result.written) == (0, False)
    assert contents(docker) == before
    assert registry.asked == ["debian:trixie-slim"]


def test_everything_that_is_behind_moves_and_comments_stay(
    docker: Path, served: Served, repository: Repository, progress: Recorder
) -> None:
    before = contents(docker)
    commit = repository.release("v2.10")
    served.torch("2.2", "1.1", "added")
    added = served.add("added", "3")
    served.add("helper", "1.1")
    nvcc = served.add("nvidia-cuda-nvcc", "13.0.2")
    registry = Registry((NEW, OCI_MANIFEST, ("amd64",)))

    looked = lock.lock(docker, registry, progress, check=True)
    assert (looked.exit_code, looked.written) == (ExitCode.FINDINGS, False)
    assert contents(docker) == before

    result = lock.lock(docker, registry, progress)
    assert (result.exit_code, result.written, result.unreached) == (0, True, ())
    assert result.moves == looked.moves
    moved = {(move.where, move.what): (move.before, move.after) for move in result.moves}
    assert moved.pop(("pins.toml", "nccl_tests commit"))[1] == commit
    assert moved == {
        ("pins.toml", "bases.trixie digest"): (OLD, NEW),
        ("pins.toml", "bases.trixie digest_kind"): ("index", "amd64"),
        ("pins.toml", "nccl_tests tag"): ("v2.9", "v2.10"),
        ("pins.toml", "variants.gpu torch"): ("2.1", "2.2"),
        ("pins.toml", "variants.gpu nccl"): ("1.0", "1.1"),
        ("locks/cpu.txt", "helper"): ("1.0", "1.1"),
        ("locks/gpu.txt", "added"): ("none", "3"),
        ("locks/gpu.txt", "helper"): ("1.0", "1.1"),
        ("locks/gpu.txt", "nvidia-nccl-cu13"): ("1.0", "1.1"),
        ("locks/gpu.txt", "torch"): ("2.1", "2.2"),
        ("locks/nvcc-gpu.txt", "nvidia-cuda-nvcc"): ("13.0.1", "13.0.2"),
    }

    found = pins.read(docker)
    assert added in pins.read_lock(found, found.variant("gpu"))
    assert nvcc in pins.read_wheels(docker / "locks/nvcc-gpu.txt")
    after = contents(docker)
    assert after.keys() == before.keys()
    assert after["locks/cpu.txt"].startswith("# The wheels of cpu.\n# All of them.\n\nhelper==1.1 ")
    text = before["pins.toml"].replace(OLD, NEW, 1).replace('"index"', '"amd64"', 1)
    text = text.replace('tag = "v2.9"', 'tag = "v2.10"')
    text = text.replace('torch = "2.1" #', 'torch = "2.2" #')
    text = text.replace('\nnccl = "1.0"', '\nnccl = "1.1"')
    text = text.replace(repository.git("rev-parse", "v2.9^{commit}"), commit)
    assert after["pins.toml"] == text


def test_one_part_out_of_reach_is_named_and_nothing_is_written(
    docker: Path, served: Served, repository: Repository, progress: Recorder
) -> None:
    served.torch("2.2", "1.1")
    before = contents(docker)
    repository.folder.rename(repository.folder.with_name("gone"))
    registry = Registry(RegistryUnreachable("debian:trixie-slim", "no route"))
    result = lock.lock(docker, registry, progress)
    assert [note.part for note in result.unreached] == ["nccl-tests", "base trixie"]
    assert "no route" in result.unreached[1].why
    assert (result.exit_code, result.written) == (ExitCode.MACHINE_LACKS, False)
    # what could be reached is told all the same
    assert "variants.gpu torch" in [move.what for move in result.moves]
    assert contents(docker) == before


def test_a_digest_that_is_gone_is_an_error(docker: Path, progress: Recorder) -> None:
    before = contents(docker)
    registry = Registry(DigestGone("debian:trixie-slim"))
    with pytest.raises(DigestGone, match="debian:trixie-slim"):
        lock.lock(docker, registry, progress)
    assert contents(docker) == before


def test_a_lock_that_is_broken_is_said_first(docker: Path, progress: Recorder) -> None:
    (docker / "locks/cpu.txt").write_text("torch\n")
    registry = Registry()
    with pytest.raises(LockBroken, match=r"cpu\.txt:1"):
        lock.lock(docker, registry, progress)
    assert registry.asked == []


def test_the_result_as_json_says_from_and_to() -> None:
    move = lock.Move("torch", "locks/gpu.txt", "1", "2")
    note = lock.Note("base trixie", "no route")
    result = lock.Result(moves=(move,), kept=(), unreached=(note,), check=False, seconds=1.0)
    assert result.to_dict() == {
        "command": "lock",
        "check": False,
        "written": False,
        "moves": [{"what": "torch", "where": "locks/gpu.txt", "from": "1", "to": "2"}],
        "kept": [],
        "unreached": [{"part": "base trixie", "why": "no route"}],
        "seconds": 1.0,
    }


# ---- wheels -------------------------------------------------------------------------------------


def test_a_torch_for_another_cuda_is_passed_over(
    docker: Path, served: Served, progress: Recorder
) -> None:
    served.torch("2.2", "1.1")
    served.torch("2.3", "1.2", cuda=14)
    served.add("torch", "2.4")
    wheels = newest(docker, progress)
    assert (wheels["torch"].version, wheels["nvidia-nccl-cu13"].version) == ("2.2", "1.1")


def test_a_torch_whose_closure_has_a_second_nccl_is_passed_over(
    docker: Path, served: Served, progress: Recorder
) -> None:
    served.torch("2.2", "1.1", "other")
    served.add("other", "1", "nvidia-nccl-cu12")
    served.add("nvidia-nccl-cu12", "0.9")
    assert newest(docker, progress)["torch"].version == "2.1"


def test_a_torch_that_is_older_than_the_pinned_one_is_never_taken(
    docker: Path, served: Served, progress: Recorder
) -> None:
    served.torch("2.0", "1.0")
    (served.folder / "torch-2.1-py3-none-any.whl").unlink()
    with pytest.raises(WheelsNotFetched, match=r"torch==2\.1"):
        lock.newest_wheels(variant(docker), progress)


def test_the_cpu_variant_keeps_its_suffix(docker: Path, served: Served, progress: Recorder) -> None:
    served.torch("2.3", "1.2")
    served.add("torch", "2.4", "helper")
    assert newest(docker, progress, "cpu")["torch"].version == "2.1+cpu"
    served.add("torch", "2.2+cpu", "helper")
    wheels = newest(docker, progress, "cpu")
    assert wheels["torch"].version == "2.2+cpu"
    assert wheels.keys() == {"torch", "helper", *lock.BESIDE_TORCH}


def test_a_suffix_that_no_place_has_stays_and_is_said(
    docker: Path, served: Served, progress: Recorder
) -> None:
    (served.folder / "torch-2.1+cpu-py3-none-any.whl").unlink()
    served.add("helper", "1.1")
    before = contents(docker)
    result = lock.lock(docker, Registry(), progress)
    assert [note.part for note in result.kept] == ["wheels of cpu"]
    assert "2.1+cpu" in result.kept[0].why
    assert [move.where for move in result.moves] == ["locks/gpu.txt"]
    assert result.written
    assert contents(docker)["locks/cpu.txt"] == before["locks/cpu.txt"]


@pytest.mark.parametrize(
    ("needs", "version"), [(">=3.13", "1.2"), (">=3.14", "1.0"), (">=3.8,<3.13", "1.0")]
)
def test_the_images_python_decides_not_the_hosts(
    docker: Path, served: Served, progress: Recorder, needs: str, version: str
) -> None:
    served.add("helper", "1.2", python=needs)
    served.add("numpy", "1.2", python=needs)
    wheels = newest(docker, progress)
    assert (wheels["helper"].version, wheels["numpy"].version) == (version, version)


def test_a_torch_for_a_newer_python_is_passed_over(
    docker: Path, served: Served, progress: Recorder
) -> None:
    needs = ("nvidia-nccl-cu13==1.0", "nvidia-cuda-runtime", "helper")
    served.add("torch", "2.5", *needs, python=">=3.14")
    assert newest(docker, progress)["torch"].version == "2.1"


def test_markers_are_those_of_the_image(docker: Path, served: Served, progress: Recorder) -> None:
    served.torch(
        "2.2",
        "1.1",
        'only-image[more]>=1; python_version >= "3.13"',
        'only-host; python_version < "3.13"',
        'only-windows; sys_platform == "win32"',
    )
    served.add("only-image", "1", "below", 'extra-one; extra == "more"', 'x; extra == "less"')
    for name in ("only-host", "only-windows", "below", "extra-one", "x"):
        served.add(name, "1")
    # whichever Python these tests run on, it may only differ in what pip needs rounds for
    found = newest(docker, progress).keys() - {"torch", "helper", *lock.BESIDE_TORCH}
    cuda = {"nvidia-nccl-cu13", "nvidia-cuda-runtime"}
    assert found == {"only-image", "below", "extra-one", *cuda}


@pytest.fixture
def index(tmp_path: Path, served: Served, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Serves the wheels as an index's pages; the given file is yanked."""

    def write(yanked: str) -> None:
        root = tmp_path / "index"
        for wheel in served.folder.glob("*.whl"):
            page = root / wheel.name.split("-")[0].replace("_", "-") / "index.html"
            page.parent.mkdir(parents=True, exist_ok=True)
            mark = ' data-yanked="broken"' if wheel.name == yanked else ""
            with page.open("a") as file:
                file.write(f'<a href="{wheel.as_uri()}"{mark}>{wheel.name}</a><br>\n')
        monkeypatch.delenv("PIP_NO_INDEX")
        monkeypatch.delenv("PIP_FIND_LINKS")
        monkeypatch.setenv("PIP_INDEX_URL", root.as_uri())

    return write


@pytest.mark.parametrize("wheel", ["torch-2.1", "nvidia_nccl_cu13-1.0"])
def test_a_yanked_wheel_is_an_error_that_names_it(
    docker: Path, index: Callable[[str], None], progress: Recorder, wheel: str
) -> None:
    index(f"{wheel}-py3-none-any.whl")
    name, _, version = wheel.replace("_", "-").rpartition("-")
    with pytest.raises(errors.WheelYanked, match=rf"^{name}=={version},.*'gpu'"):
        lock.newest_wheels(variant(docker), progress)


def test_a_yanked_wheel_that_nothing_needs_is_passed_over(
    docker: Path, served: Served, index: Callable[[str], None], progress: Recorder
) -> None:
    served.torch("2.2", "1.1")
    index("torch-2.2-py3-none-any.whl")
    assert newest(docker, progress)["torch"].version == "2.1"


def test_an_index_that_does_not_answer_is_not_taken_for_an_old_one(
    docker: Path, progress: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    # find-links has all that is needed, but perhaps not the newest of it
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "1")
    with pytest.raises(WheelsNotFetched, match="Connection refused"):
        lock.newest_wheels(variant(docker), progress)


def test_the_hosts_constraints_count(
    tmp_path: Path,
    docker: Path,
    served: Served,
    progress: Recorder,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    served.torch("2.2", "1.1")
    served.add("helper", "1.2", python=">=3.14")
    (tmp_path / "limits.txt").write_text("torch<2.2\n")
    monkeypatch.setenv("PIP_CONSTRAINT", str(tmp_path / "limits.txt"))
    wheels = newest(docker, progress)
    assert (wheels["torch"].version, wheels["helper"].version) == ("2.1", "1.0")


def test_the_compiler_follows_the_runtimes_minor(
    docker: Path, served: Served, progress: Recorder
) -> None:
    served.add("nvidia-nccl-cu13", "1.1")
    served.add("nvidia-cuda-runtime", "13.1.3")
    served.add("torch", "2.2", "nvidia-nccl-cu13==1.1", "nvidia-cuda-runtime==13.1.3", "helper")
    lock.lock(docker, Registry(), progress)
    found = {w.name: w.version for w in pins.read_wheels(docker / "locks/nvcc-gpu.txt")}
    assert found == {"nvidia-cuda-nvcc": "13.1.7", "nvidia-cuda-runtime": "13.1.3", "pip": "1.0"}


def test_require_cuda_without_a_major_is_refused(docker: Path, progress: Recorder) -> None:
    row = variant(docker)
    assert row.cuda
    odd = replace(row, cuda=replace(row.cuda, require_cuda="driver>=580"))
    with pytest.raises(PinsBroken, match=r"\[variants.gpu\] require_cuda 'driver>=580'"):
        lock.newest_wheels(odd, progress)


# ---- nccl-tests ---------------------------------------------------------------------------------


@pytest.mark.parametrize("annotated", [True, False])
def test_the_newest_tag_is_by_number_with_its_commit(
    repository: Repository, annotated: bool
) -> None:
    first = repository.release("v2.9", annotated=annotated)
    newer = repository.release("v2.10.1", annotated=annotated)
    repository.release("v2.10", "v3.0-rc1", "nightly9", annotated=annotated)
    pin = NcclTests("v2.9", first, repository.url)
    assert lock.newest_tag(pin) == NcclTests("v2.10.1", newer, repository.url)


def test_a_tag_that_moved_is_refused(repository: Repository) -> None:
    moved = repository.release("v2.9")
    repository.release("v2.10")
    with pytest.raises(errors.TagMoved, match=rf"v2\.9 .*{moved} now, pinned {'b' * 40}"):
        lock.newest_tag(NcclTests("v2.9", "b" * 40, repository.url))


def test_a_mirror_without_the_pinned_tag_moves_nothing_back(repository: Repository) -> None:
    repository.release("v2.8")
    with pytest.raises(NcclTestsUnreachable, match=r"no tag v2\.9"):
        lock.newest_tag(NcclTests("v2.9", "b" * 40, repository.url))


# ---- the bases ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("media_type", "architectures", "kind"),
    [
        (OCI_INDEX, ("amd64", "arm64"), DigestKind.INDEX),
        (DOCKER_LIST, ("amd64",), DigestKind.INDEX),
        (OCI_MANIFEST, ("amd64",), DigestKind.AMD64),
        (DOCKER_MANIFEST, ("arm64",), DigestKind.ARM64),
    ],
)
def test_the_media_type_says_what_a_digest_names(
    media_type: str, architectures: tuple[str, ...], kind: DigestKind
) -> None:
    assert lock.digest_kind("debian", NEW, media_type, architectures) is kind


@pytest.mark.parametrize(
    ("digest", "media_type", "architectures"),
    [
        (NEW, "application/vnd.docker.distribution.manifest.v1+prettyjws", ("amd64",)),
        (NEW, "", ("amd64",)),
        (NEW, OCI_MANIFEST, ("riscv64",)),
        (NEW, OCI_MANIFEST, ("amd64", "arm64")),
        (NEW, OCI_MANIFEST, ()),
        (f"{NEW}0", OCI_INDEX, ("amd64",)),
    ],
)
def test_a_digest_of_unknown_kind_is_refused(
    digest: str, media_type: str, architectures: tuple[str, ...]
) -> None:
    with pytest.raises(errors.UnknownDigestKind, match=f"debian is {digest} now"):
        lock.digest_kind("debian", digest, media_type, architectures)


# ---- writing ------------------------------------------------------------------------------------


def test_a_value_that_stands_on_no_line_of_its_own_is_refused_whole(
    docker: Path, served: Served, progress: Recorder
) -> None:
    served.add("helper", "1.1")
    text = (docker / "pins.toml").read_text()
    (docker / "pins.toml").write_text(text.replace(f'"{OLD}" # 2026', f"'{OLD}'"))
    before = contents(docker)
    with pytest.raises(PinsBroken, match=r"\[bases.trixie\] has no line digest"):
        lock.lock(docker, Registry((NEW, OCI_INDEX, ("amd64",))), progress)
    assert contents(docker) == before


def test_a_file_that_cannot_be_replaced_leaves_all_as_they_were(
    docker: Path, served: Served, progress: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    served.torch("2.2", "1.1")
    before = contents(docker)
    rename = Path.replace

    def refuse(self: Path, target: Path) -> Path:
        if target == docker / "pins.toml" and "old" not in self.parts:
            raise PermissionError(13, "Permission denied")
        return rename(self, target)

    monkeypatch.setattr(Path, "replace", refuse)
    with pytest.raises(CannotWrite, match="Permission denied"):
        lock.lock(docker, Registry(), progress)
    assert contents(docker) == before
    assert sorted(path.name for path in docker.iterdir()) == ["locks", "pins.toml"]


def test_what_reads_back_otherwise_is_not_written(
    docker: Path, served: Served, progress: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    served.add("helper", "1.1")
    before, read = contents(docker), pins.read

    def misread(folder: Path) -> Pins:
        found = read(folder)
        return replace(found, shm_bytes=1) if folder != docker else found

    monkeypatch.setattr(pins, "read", misread)
    with pytest.raises(PinsBroken, match="reads otherwise"):
        lock.lock(docker, Registry(), progress)
    assert contents(docker) == before
