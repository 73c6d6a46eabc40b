"""The CUDA variants without a GPU: one NCCL proved, nccl-tests compiled, triton without a compiler.

nccl-tests are a stand-in here, in a git repository that the test makes and pins: a program of the
same make interface that prints the NCCL it was compiled with and the one it loads.
"""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import docker
import pytest
from tests.image.harness import ROOT, run

from muster import cache

STAND_IN = Path(__file__).with_name("nccl-tests-stand-in")
# the code that NCCL gives its version, and what the toolkit is told
FACTS = {"cu13": ("23007", "cuda>=13.0"), "cu12": ("22705", "cuda>=12.0")}


def git(folder: Path, *words: str) -> str:
    identity = ("-c", "user.name=test", "-c", "user.email=test@example.org")
    done = subprocess.run(
        ["git", *identity, *words], cwd=folder, check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


@pytest.fixture(scope="module", params=FACTS)
def variant(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with the stand-in as its one commit."""
    folder = tmp_path_factory.mktemp("nccl-tests")
    shutil.copytree(STAND_IN, folder, dirs_exist_ok=True)
    git(folder, "init", "--quiet")
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "--message", "stand-in")
    return folder


def copied(into: Path, **nccl_tests: str) -> Path:
    """A copy of this checkout whose pins say this of nccl-tests."""
    copy = into / "checkout"
    ignored = shutil.ignore_patterns(".venv*", ".git", ".*_cache", "__pycache__")
    shutil.copytree(ROOT, copy, ignore=ignored)
    path = copy / "docker/pins.toml"
    text = path.read_text()
    for key, value in nccl_tests.items():
        text = re.sub(rf'^{key} = ".*"', f'{key} = "{value}"', text, count=1, flags=re.MULTILINE)
    path.write_text(text)
    return copy


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory, source: Path) -> Path:
    """A copy of this checkout whose pins name the stand-in."""
    commit = git(source, "rev-parse", "HEAD")
    into = tmp_path_factory.mktemp("cuda")
    return copied(into, tag="stand-in", commit=commit, repository=f"file://{source}")


@pytest.fixture(scope="module")
def built(checkout: Path, variant: str) -> Iterator[str]:
    """What `build` said; the image goes afterwards, it is gigabytes."""
    code, output = run("build", "--variant", variant, "--arch", "90", root=checkout)
    assert code == 0, output
    yield output
    subprocess.run(["docker", "rmi", f"muster:{variant}"], check=True, capture_output=True)


@pytest.mark.usefixtures("built")
def test_every_proof_holds(checkout: Path, variant: str, tmp_path: Path) -> None:
    report = tmp_path / "out.json"
    code, output = run("verify", "--variant", variant, "--json", str(report), root=checkout)
    assert code == 0, output
    proofs = {proof["name"]: proof for proof in json.loads(report.read_text())["proofs"]}
    assert {proof["outcome"] for proof in proofs.values()} == {"passed"}
    assert FACTS[variant][0] in proofs["one_nccl"]["evidence"]
    assert proofs["nccl_tests"]["evidence"].startswith("11 ")


@pytest.mark.usefixtures("built")
def test_the_suite_is_ready_on_a_cpu(checkout: Path, variant: str) -> None:
    # the reference image in whole
    words = () if variant == "cu13" else ("--quick",)
    code, output = run("smoke", "--variant", variant, *words, root=checkout)
    assert code == 0, output
    assert output.splitlines()[-1] == "READY"


def test_a_second_build_does_nothing(checkout: Path, variant: str, built: str) -> None:
    assert re.search(r"^\[nccl-tests-(wheels|debian) ", built, re.MULTILINE)
    code, output = run("build", "--variant", variant, "--arch", "90", root=checkout)
    assert (code, "up to date" in output) == (0, True)


@pytest.mark.usefixtures("built")
def test_the_toolkit_is_told_what_the_image_needs(
    client: docker.DockerClient, variant: str
) -> None:
    environment = client.images.get(f"muster:{variant}").attrs["Config"]["Env"]
    assert {
        "NVIDIA_VISIBLE_DEVICES=all",
        "NVIDIA_DRIVER_CAPABILITIES=compute,utility",
        f"NVIDIA_REQUIRE_CUDA={FACTS[variant][1]}",
    } <= set(environment)


@pytest.mark.usefixtures("built")
def test_triton_finds_its_helper_and_compiles_without_a_compiler(
    client: docker.DockerClient, variant: str
) -> None:
    script = """
import triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaUtils
from triton.compiler import ASTSource
from triton.runtime import build

# loading the helper takes the driver's library: to find it by its key is what counts here
build._load_module_from_path = lambda name, path: print("helper:", path) or exit_early()
def exit_early(): raise StopIteration
try:
    CudaUtils()
except StopIteration:
    pass

@triton.jit
def add(x, y, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at, mask=at < n) + 1, mask=at < n)

source = ASTSource(add, signature={"x": "*fp32", "y": "*fp32", "n": "i32", "BLOCK": "constexpr"},
                   constexprs={"BLOCK": 64})
kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32))
print("cubin:", len(kernel.asm["cubin"]) > 0)
"""
    # jit reads the source of a function from its file
    container = client.containers.create(
        f"muster:{variant}",
        ["sh", "-c", 'printf %s "$SCRIPT" > /tmp/kernel.py && python /tmp/kernel.py'],
        environment={"SCRIPT": script},
    )
    try:
        container.start()
        status = container.wait(timeout=120)["StatusCode"]
        output = container.logs().decode()
    finally:
        container.remove(force=True)
    assert status == 0, output
    assert "helper: /var/cache/triton/" in output
    assert "cubin: True" in output


def test_without_the_source_it_goes_on_and_says_so(
    checkout: Path, variant: str, built: str, tmp_path: Path
) -> None:
    assert "WITHOUT" not in built
    unreachable = {
        "GIT_CONFIG_COUNT": "1",
        "GIT_CONFIG_KEY_0": "url./nonexistent/.insteadOf",
        "GIT_CONFIG_VALUE_0": "file:///",
        "XDG_CACHE_HOME": str(tmp_path),
    }
    wheels = cache.folder() / "wheels"
    (tmp_path / "muster").mkdir()
    (tmp_path / "muster/wheels").symlink_to(wheels)
    code, output = run("build", "--variant", variant, root=checkout, **unreachable)
    assert code == 0, output
    assert "WITHOUT nccl-tests: the source of nccl-tests cannot be had" in output
    inspected = subprocess.run(
        ["docker", "inspect", f"muster:{variant}"], check=True, capture_output=True, text=True
    )
    assert json.loads(inspected.stdout)[0]["Config"]["Labels"]["io.muster.nccl-tests"] == "missing"


def test_slim_leaves_out_triton_and_is_ready(client: docker.DockerClient, tmp_path: Path) -> None:
    # without nccl-tests: in a slim image too they are compiled against its own venv, a minute
    root = copied(tmp_path, commit="0" * 40, repository="file:///nonexistent")
    words = ("--variant", "cu13", "--slim")
    try:
        code, output = run("build", *words, root=root)
        assert code == 0, output
        labels = client.images.get("muster:cu13-slim").labels
        assert labels["io.muster.slim"] == "without torch.compile"
        code, output = run("verify", *words, root=root)
        assert code == 0, output
        code, output = run("smoke", "--quick", *words, root=root)
        assert (code, output.splitlines()[-1]) == (0, "READY"), output
        missing = (
            "import torch, importlib.util as u; print(torch.__version__, u.find_spec('triton'))"
        )
        said = client.containers.run("muster:cu13-slim", ["python", "-c", missing], remove=True)
        assert re.fullmatch(r"[\d.]+\+cu130 None\n", said.decode())
    finally:
        subprocess.run(["docker", "rmi", "muster:cu13-slim"], check=False, capture_output=True)


def test_a_source_at_another_commit_is_refused(variant: str, tmp_path: Path) -> None:
    git(tmp_path, "init", "--quiet")
    code, output = run("build", "--variant", variant, "--nccl-tests-source", str(tmp_path))
    assert code == 2
    assert "is no git repository that has the pinned commit" in output


def test_an_architecture_that_nvcc_refuses_is_shown_with_its_words(
    checkout: Path, variant: str
) -> None:
    code, output = run("build", "--variant", variant, "--arch", "11", root=checkout)
    assert code == 3
    assert "the build failed at [nccl-tests-" in output
    assert "compute_11" in output
