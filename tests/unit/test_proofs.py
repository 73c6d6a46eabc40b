"""The proofs on fabricated images: folders with real libraries, real dpkg, real processes."""

import base64
import hashlib
import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path

import pytest

from muster import bom, proofs
from muster.finding import Finding, Outcome, Severity
from muster.proofs import CLAIMS, Claim, Fault, Image, NotApplicable, Proof, Refuted

NCCL = "2.30.7"
CODE = 23007

Compile = Callable[..., Path]

# ncclGetVersion, as NCCL's library has it
LIBRARY = "int ncclGetVersion(int *version) {{ *version = {code}; return 0; }}"
# the line that nccl-tests print before they look for a GPU, and the status without one
NCCL_TEST = """
#include <stdio.h>
int ncclGetVersion(int *version);
int main(void) {{
    int version;
    ncclGetVersion(&version);
    printf("# nccl-tests version {version} nccl-headers={headers} nccl-library=%d\\n", version);
    return 2;
}}
"""
# a torch that loads the NCCL at {path} when it is imported
TORCH = """
import ctypes
from types import SimpleNamespace
library = ctypes.CDLL({path!r})
cuda = SimpleNamespace(nccl=SimpleNamespace(version=lambda: (2, 28, 9)))
"""


@pytest.fixture
def compile_c(tmp_path: Path) -> Compile:
    """Compiles C to `path`: a library, unless told otherwise."""

    def compile_to(path: Path, code: str, *flags: str, shared: bool = True) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        source = tmp_path / "source.c"
        source.write_text(code)
        kind = ["-shared", "-fPIC"] if shared else []
        subprocess.run(["gcc", *kind, "-o", str(path), str(source), *flags], check=True)
        return path

    return compile_to


@pytest.fixture
def image(tmp_path: Path) -> Image:
    """A cpu image with nothing in it."""
    return make(tmp_path, nccl=None)


@pytest.fixture
def cuda(tmp_path: Path, compile_c: Compile) -> Image:
    """An image with one NCCL: header, library, and a torch that loads it."""
    found = make(tmp_path, nccl=NCCL)
    library = compile_c(found.site / proofs.NCCL_LIBRARY, LIBRARY.format(code=CODE))
    header = found.site / proofs.NCCL_HEADER
    header.parent.mkdir(parents=True)
    header.write_text(f"#define NCCL_MAJOR 2\n#define NCCL_VERSION_CODE {CODE}\n")
    torch_loads(found, library)
    return found


def make(folder: Path, **bom: object) -> Image:
    root = folder / "root"
    site = root / "opt/venv/lib/python3.11/site-packages"
    site.mkdir(parents=True)
    (root / "usr/bin").mkdir(parents=True)
    facts = {"variant": "test", "torch": "2.14.1", "wheels": [], "debian": [], **bom}
    return Image(root, site, (root / "usr/bin",), facts)


def with_bom(image: Image, **bom: object) -> Image:
    return Image(image.root, image.site, image.path, {**image.bom, **bom})


def torch_loads(image: Image, library: Path) -> None:
    package = image.site / "torch/__init__.py"
    package.parent.mkdir(exist_ok=True)
    package.write_text(TORCH.format(path=str(library)))


def write(path: Path, content: bytes | str = b"") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def faults(prove: Callable[[Image], str], image: Image) -> dict[str, str]:
    """What refutes the claim, by where; the test fails if nothing does."""
    with pytest.raises(Refuted) as refuted:
        prove(image)
    return {fault.where: fault.what for fault in refuted.value.faults}


# ---- what a proof is ----------------------------------------------------------------------------


def claim(prove: Callable[[None], str]) -> Claim[None]:
    return Claim("the_claim", prove, "the cause", "the remedy")


def refuting(*where: str) -> Claim[None]:
    def prove(_subject: None) -> str:
        raise Refuted([Fault(each, f"{each} is wrong") for each in where])

    return claim(prove)


def test_a_claim_that_holds_is_its_evidence() -> None:
    assert proofs.proof(claim(lambda _: "seen"), None) == Proof(
        "the_claim", Outcome.PASSED, "seen", None
    )


def test_a_refutation_names_what_is_at_fault() -> None:
    assert proofs.proof(refuting("a"), None).finding == Finding(
        severity=Severity.ERROR,
        what="a is wrong",
        where="a",
        evidence="a: a is wrong",
        cause="the cause",
        remedy="the remedy",
    )


def test_many_faults_are_one_finding_with_all_of_them_as_evidence() -> None:
    finding = proofs.proof(refuting("a", "b", "c"), None).finding
    assert finding is not None
    assert (finding.where, finding.what) == ("a", "a is wrong (and 2 more)")
    assert finding.evidence.splitlines() == ["a: a is wrong", "b: b is wrong", "c: c is wrong"]


def test_very_many_faults_are_counted() -> None:
    found = proofs.proof(refuting(*map(str, range(100))), None)
    assert found.evidence.splitlines()[-1] == "and 80 more"
    assert len(found.evidence.splitlines()) == proofs.SHOWN_FAULTS + 1


def test_a_claim_about_another_image_says_why() -> None:
    def prove(_subject: None) -> str:
        raise NotApplicable("no NCCL")

    assert proofs.proof(claim(prove), None) == Proof(
        "the_claim", Outcome.NOT_APPLICABLE, "no NCCL", None
    )


def test_a_proof_that_breaks_off_is_a_failed_one() -> None:
    nothing: dict[str, str] = {}
    found = proofs.proof(claim(lambda _: nothing["key"]), None)
    assert found.outcome is Outcome.FAILED
    assert found.finding is not None
    assert found.finding.what == "the proof the_claim itself broke off: KeyError: 'key'"


@pytest.mark.parametrize("claimed", [claim(lambda _: "seen"), refuting("a", "b")])
def test_a_proof_survives_json(claimed: Claim[None]) -> None:
    found = proofs.proof(claimed, None)
    assert Proof.from_dict(json.loads(json.dumps(asdict(found)))) == found


def test_no_two_claims_share_a_name() -> None:
    assert len({each.name for each in CLAIMS}) == len(CLAIMS)


# ---- one NCCL -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("version", "code"), [("2.30.7", 23007), ("2.27.5", 22705)])
def test_the_version_as_nccl_writes_it(version: str, code: int) -> None:
    assert proofs.version_code(version) == code


@pytest.mark.parametrize("prove", [proofs.one_nccl, proofs.nccl_tests, proofs.mlx5_symbol])
def test_without_a_pinned_nccl_nothing_is_to_be_proved(
    image: Image, prove: Callable[[Image], str]
) -> None:
    with pytest.raises(NotApplicable, match=r"torch 2\.14\.1 has no NCCL"):
        prove(image)


def test_one_nccl_holds_and_shows_torchs_constant_without_trusting_it(cuda: Image) -> None:
    evidence = proofs.one_nccl(cuda)
    assert f"{CODE}: header, library and the file that torch maps" in evidence
    assert "torch was compiled with 2.28.9" in evidence


def test_a_link_to_the_one_library_is_the_same_file(cuda: Image, tmp_path: Path) -> None:
    link = tmp_path / "libnccl.so.2"
    link.symlink_to(cuda.site / proofs.NCCL_LIBRARY)
    torch_loads(cuda, link)
    assert proofs.one_nccl(cuda)


def test_another_header_is_named(cuda: Image) -> None:
    header = write(cuda.site / proofs.NCCL_HEADER, "#define NCCL_VERSION_CODE 22809\n")
    assert faults(proofs.one_nccl, cuda) == {
        str(header): "the header's NCCL_VERSION_CODE is 22809, pinned is 23007"
    }


def test_a_missing_header_is_named_unless_it_was_trimmed(cuda: Image) -> None:
    (cuda.site / proofs.NCCL_HEADER).unlink()
    assert list(faults(proofs.one_nccl, cuda)) == [str(cuda.site / proofs.NCCL_HEADER)]
    assert proofs.one_nccl(with_bom(cuda, trimmed=["nvidia/nccl/include"]))


def test_another_library_is_named(cuda: Image, compile_c: Compile) -> None:
    library = compile_c(cuda.site / proofs.NCCL_LIBRARY, LIBRARY.format(code=22809))
    assert faults(proofs.one_nccl, cuda)[str(library)].startswith("ncclGetVersion says 22809")


@pytest.mark.parametrize("content", [b"", b"no library"])
def test_a_library_that_does_not_load_is_named(cuda: Image, content: bytes) -> None:
    library = write(cuda.site / proofs.NCCL_LIBRARY, content)
    found = faults(proofs.one_nccl, cuda)
    assert set(found) == {str(library), "torch"}
    assert "does not answer ncclGetVersion" in found[str(library)]


@pytest.mark.parametrize("code", [CODE, 22809])
def test_a_torch_that_maps_another_file_is_named(
    cuda: Image, compile_c: Compile, tmp_path: Path, code: int
) -> None:
    # of the same version or not: it is another file
    other = compile_c(tmp_path / "other/libnccl.so.2", LIBRARY.format(code=code))
    torch_loads(cuda, other)
    (where,) = found = faults(proofs.one_nccl, cuda)
    assert where == str(other)
    assert found[where].startswith(f"torch maps this NCCL, {code}, instead of the wheel's")


def test_a_torch_that_maps_none_is_named(cuda: Image, compile_c: Compile, tmp_path: Path) -> None:
    torch_loads(cuda, compile_c(tmp_path / "libother.so", "int other;"))
    assert faults(proofs.one_nccl, cuda) == {"torch": "maps no libnccl.so.2 when it is imported"}


def test_a_torch_that_cannot_be_imported_is_named(cuda: Image) -> None:
    write(cuda.site / "torch/__init__.py", "raise ImportError('no libcudart.so.13')")
    found = faults(proofs.one_nccl, cuda)
    assert found == {"torch": "does not say its NCCL: ImportError: no libcudart.so.13"}


def test_one_file_and_links_to_it_are_one(cuda: Image) -> None:
    library = cuda.site / proofs.NCCL_LIBRARY
    (cuda.root / "usr/lib").mkdir()
    (cuda.root / "usr/lib/libnccl.so").symlink_to(library)
    (cuda.root / "usr/lib/libnccl.so.2").hardlink_to(library)
    (cuda.root / "usr/lib/libnccl-broken.so").symlink_to("nowhere")
    assert proofs.one_nccl_file(cuda) == f"{library} alone"


@pytest.mark.parametrize("name", ["libnccl.so.2", "libnccl.so", "libnccl.so.2.28.9"])
def test_a_second_nccl_is_named(cuda: Image, name: str) -> None:
    second = write(cuda.root / "usr/lib" / name, b"anything")
    assert faults(proofs.one_nccl_file, cuda) == {str(second): "a second NCCL beside the wheel's"}


def test_a_second_nccl_behind_a_link_of_its_name_is_named(cuda: Image) -> None:
    other = write(cuda.root / "opt/hidden.bin")
    write(cuda.root / "usr/lib/x")
    (cuda.root / "usr/lib/libnccl.so.2").symlink_to(other)
    assert list(faults(proofs.one_nccl_file, cuda)) == [str(other)]


def test_a_missing_nccl_is_named(cuda: Image) -> None:
    library = cuda.site / proofs.NCCL_LIBRARY
    library.unlink()
    assert faults(proofs.one_nccl_file, cuda) == {str(library): "the wheel's NCCL is missing"}


def test_an_nccl_where_none_is_pinned_is_named(image: Image) -> None:
    assert proofs.one_nccl_file(image) == "no libnccl*.so* in the image, as pinned"
    library = write(make_again(image).root / "usr/lib/libnccl.so.2")
    assert faults(proofs.one_nccl_file, make_again(image)) == {
        str(library): "an NCCL where none is pinned"
    }


def make_again(image: Image) -> Image:
    """The same image, looked at anew."""
    return with_bom(image)


def test_the_wheels_of_two_cuda_majors_are_named(cuda: Image) -> None:
    for name in ("nvidia_nccl_cu12-2.27.5.dist-info", "nvidia_nccl_cu13-2.30.7.dist-info"):
        (cuda.site / name).mkdir()
    (where,) = faults(proofs.one_nccl_file, cuda)
    assert where == "nvidia_nccl_cu12-2.27.5.dist-info and nvidia_nccl_cu13-2.30.7.dist-info"


# ---- nccl-tests ---------------------------------------------------------------------------------


@pytest.fixture
def tested(cuda: Image, compile_c: Compile) -> Image:
    """An image whose eleven binaries are linked as docker/nccl-tests.sh links them."""
    link_test(cuda, compile_c, "--disable-new-dtags")
    return with_bom(cuda, nccl_tests={"version": "v2.19.6", "commit": "0" * 40})


def link_test(cuda: Image, compile_c: Compile, dtags: str, headers: int = CODE) -> None:
    """One program under all eleven names."""
    library = cuda.site / proofs.NCCL_LIBRARY
    folder = cuda.root / "opt/nccl-tests/bin"
    code = NCCL_TEST.format(version="2.19.6", headers=headers)
    flags = (str(library), f"-Wl,{dtags},-rpath,{library.parent}")
    first = compile_c(folder / proofs.NCCL_TESTS[0], code, *flags, shared=False)
    for name in proofs.NCCL_TESTS[1:]:
        shutil.copy(first, folder / name)


@pytest.fixture
def soname(cuda: Image, compile_c: Compile) -> None:
    """The library says its name, so that what is linked with it looks for that alone."""
    path = cuda.site / proofs.NCCL_LIBRARY
    compile_c(path, LIBRARY.format(code=CODE), "-Wl,-soname,libnccl.so.2")


@pytest.mark.usefixtures("soname")
def test_nccl_tests_that_were_not_built_are_not_proved(cuda: Image) -> None:
    with pytest.raises(NotApplicable, match="were not built"):
        proofs.nccl_tests(cuda)


@pytest.mark.usefixtures("soname")
def test_nccl_tests_with_the_one_nccl_hold(tested: Image) -> None:
    assert proofs.nccl_tests(tested).startswith("11 binaries of 2.19.6 with headers and library")


@pytest.mark.usefixtures("soname")
def test_a_binary_that_does_not_run_is_named(tested: Image) -> None:
    folder = tested.root / "opt/nccl-tests/bin"
    (folder / "sendrecv_perf").unlink()
    (folder / "alltoall_perf").chmod(0o644)
    write(folder / "gather_perf", "no program")
    assert faults(proofs.nccl_tests, tested) == {
        str(folder / "sendrecv_perf"): "does not run: No such file or directory",
        str(folder / "alltoall_perf"): "does not run: Permission denied",
        str(folder / "gather_perf"): "does not run: Exec format error",
    }


@pytest.mark.usefixtures("soname")
def test_binaries_of_other_headers_are_named(tested: Image, compile_c: Compile) -> None:
    link_test(tested, compile_c, "--disable-new-dtags", headers=22809)
    found = faults(proofs.nccl_tests, tested)
    assert len(found) == 11
    assert "22809" in next(iter(found.values()))


@pytest.mark.usefixtures("soname")
def test_binaries_that_ld_library_path_can_lead_away_are_named(
    tested: Image, compile_c: Compile
) -> None:
    # DT_RUNPATH, the linker's default
    link_test(tested, compile_c, "--enable-new-dtags")
    found = faults(proofs.nccl_tests, tested)
    assert len(found) == 11
    what = next(iter(found.values()))
    assert what.startswith("LD_LIBRARY_PATH leads it to another libnccl.so.2")
    assert "file too short" in what


# ---- the user space of InfiniBand and RoCE ------------------------------------------------------


@pytest.mark.parametrize("version", ["MLX5_1.25", "MLX5_1.24"])
def test_the_symbol_is_looked_up_at_its_version(
    cuda: Image, compile_c: Compile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    script = write(tmp_path / "versions", f"{version} {{ global: mlx5dv_reg_dmabuf_mr; }};")
    code = "int mlx5dv_reg_dmabuf_mr(void) { return 0; }"
    compile_c(tmp_path / "lib/libmlx5.so.1", code, f"-Wl,--version-script={script}")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path / "lib"))
    if version == "MLX5_1.25":
        evidence = "libmlx5.so.1 exports mlx5dv_reg_dmabuf_mr@MLX5_1.25"
        assert proofs.mlx5_symbol(cuda) == evidence
    else:
        assert faults(proofs.mlx5_symbol, cuda) == {
            "mlx5dv_reg_dmabuf_mr@MLX5_1.25": "libmlx5.so.1 does not export it"
        }


@pytest.fixture
def providers(image: Image, compile_c: Compile) -> Path:
    """mlx5, efa and one more, each with its library; the folder of these."""
    folder = image.root / "usr/lib/x86_64-linux-gnu/libibverbs"
    for name in ("mlx5", "efa", "siw"):
        write(image.root / f"etc/libibverbs.d/{name}.driver", f"driver {name}\n")
        compile_c(folder / f"lib{name}-rdmav34.so", "int driver;")
    return folder


@pytest.mark.usefixtures("providers")
def test_providers_that_load_hold(image: Image) -> None:
    assert proofs.verbs_providers(image) == "3 load, mlx5 and efa among them"


def test_a_provider_without_its_library_is_named(image: Image, providers: Path) -> None:
    (providers / "libsiw-rdmav34.so").unlink()
    driver = image.root / "etc/libibverbs.d/siw.driver"
    assert faults(proofs.verbs_providers, image) == {
        str(driver): "names siw, and there is no libsiw-rdmav*.so"
    }


def test_a_provider_that_does_not_load_is_named(image: Image, providers: Path) -> None:
    library = write(providers / "libmlx5-rdmav34.so", b"\x7fELF")
    (where,) = found = faults(proofs.verbs_providers, image)
    assert where == str(library)
    assert "file too short" in found[where]


@pytest.mark.usefixtures("providers")
def test_a_provider_that_must_be_there_is_named(image: Image) -> None:
    (image.root / "etc/libibverbs.d/efa.driver").unlink()
    assert list(faults(proofs.verbs_providers, image)) == ["efa"]


# ---- wheels -------------------------------------------------------------------------------------


def install(image: Image, name: str, version: str, files: Mapping[str, bytes]) -> None:
    """A wheel as pip leaves it."""
    lines = []
    for path, content in files.items():
        write(image.site / path, content)
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        lines.append(f'"{path}",sha256={digest},{len(content)}')
    info = f"{name}-{version}.dist-info"
    lines += [f"{info}/METADATA,,", f"{info}/RECORD,,"]
    write(
        image.site / info / "METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    )
    write(image.site / info / "RECORD", "\n".join(lines))


@pytest.fixture
def venv(tmp_path: Path) -> Image:
    """Two wheels, one with a program beside site-packages, and what Muster itself adds."""
    wheels = [{"name": "torch", "version": "2.0"}, {"name": "typing-extensions", "version": "4.1"}]
    found = make(tmp_path, nccl=None, wheels=wheels)
    files = {"torch/a,b.py": b"1", "torch/test/t.py": b"2", "torch/lib/libtorch.so": b"3"}
    install(found, "torch", "2.0", {**files, "../../../bin/torchrun": b"4"})
    install(found, "Typing_Extensions", "4.1", {"typing_extensions.py": b"5"})
    write(found.site / "muster.pth", "/opt/muster/lib")
    write(found.site / "torch/__pycache__/a.cpython-311.pyc", "compiled")
    return found


def test_wheels_as_installed_hold(venv: Image) -> None:
    assert proofs.wheels(venv) == "2 wheels, 5 files by hash"


@pytest.mark.parametrize("name", ["torch/a,b.py", "../../../bin/torchrun", "typing_extensions.py"])
def test_a_file_that_changed_is_named(venv: Image, name: str) -> None:
    path = write(venv.site / name, "changed")
    wheel = "Typing_Extensions" if "typing" in name else "torch"
    assert faults(proofs.wheels, venv) == {
        os.path.normpath(path): f"is not the file of wheel {wheel}:"
        " its sha256 is not the one in RECORD"
    }


def test_a_file_that_is_gone_is_named_unless_it_was_trimmed(venv: Image) -> None:
    shutil.rmtree(venv.site / "torch/test")
    assert faults(proofs.wheels, venv) == {
        str(venv.site / "torch/test/t.py"): "is missing from wheel torch"
    }
    assert proofs.wheels(with_bom(venv, trimmed=["torch/test"]))


def test_a_stripped_library_may_differ_and_may_not_be_gone(venv: Image) -> None:
    library = write(venv.site / "torch/lib/libtorch.so", "stripped")
    stripped = with_bom(venv, stripped=["torch/lib/*.so"])
    assert proofs.wheels(stripped)
    library.unlink()
    assert list(faults(proofs.wheels, stripped)) == [str(library)]


def test_a_file_that_no_wheel_brought_is_named(venv: Image) -> None:
    stray = write(venv.site / "sitecustomize.py", "")
    assert faults(proofs.wheels, venv) == {
        str(stray): "is in site-packages, and no wheel brought it"
    }


@pytest.mark.parametrize(
    ("wheels", "found"),
    [
        ([("torch", "2.1")], {"torch": "is 2.0, the bill of materials says 2.1"}),
        (
            [("torch", "2.0"), ("numpy", "2.4")],
            {"numpy": "is missing, the bill of materials says 2.4"},
        ),
        ([], {"torch": "is 2.0, and the bill of materials does not list it"}),
    ],
)
def test_wheels_and_bill_of_materials_that_differ_are_named(
    venv: Image, wheels: list[tuple[str, str]], found: dict[str, str]
) -> None:
    listed = [*wheels, ("typing-extensions", "4.1")]
    bom = [{"name": name, "version": version} for name, version in listed]
    assert faults(proofs.wheels, with_bom(venv, wheels=bom)) == found


def test_a_wheel_that_was_trimmed_whole_is_not_missed(venv: Image) -> None:
    bom = [*venv.bom["wheels"], {"name": "cuda-bindings", "version": "13.5"}]
    assert proofs.wheels(with_bom(venv, wheels=bom, trimmed=["cuda_bindings-*.dist-info"]))


def test_one_wheel_in_two_versions_is_named(venv: Image) -> None:
    install(venv, "torch", "1.0", {})
    (where,) = found = faults(proofs.wheels, venv)
    assert where == "torch"
    assert "1.0" in found[where]
    assert "2.0" in found[where]


def test_a_wheel_without_its_record_is_named(venv: Image) -> None:
    (venv.site / "torch-2.0.dist-info/RECORD").unlink()
    assert faults(proofs.wheels, venv)["torch"] == "has no RECORD of its files"


@pytest.mark.parametrize(
    ("glob", "name", "covered"),
    [
        ("torch/test", "torch/test/t.py", True),
        ("torch/test", "torch/tests/t.py", False),
        ("sympy/*/tests", "sympy/a/tests/b/c.py", True),
        ("sympy/*/tests", "sympy/a/b/tests/c.py", False),
        ("triton", "torch/triton/a.py", False),
        ("**/*.a", "nvidia/cu13/lib/libcudart_static.a", True),
        ("**/*.a", "libx.a", True),
        ("**/*.a", "libx.a/b", False),
    ],
)
def test_a_glob_covers_what_the_shell_would_remove(glob: str, name: str, covered: bool) -> None:
    image = Image(Path("/"), Path("/"), (), {"trimmed": [glob]})
    assert image.is_listed("trimmed", name) is covered


# ---- Debian's packages --------------------------------------------------------------------------


@pytest.fixture
def debian(image: Image, monkeypatch: pytest.MonkeyPatch) -> Image:
    """dpkg's own database of one package, with its file and one that slim images leave out."""
    database = image.root / "var/lib/dpkg"
    write(
        database / "status",
        "Package: rdma\nStatus: install ok installed\nVersion: 44.0\nArchitecture: amd64\n"
        "Maintainer: m\nDescription: d\n",
    )
    content = write(image.root / "usr/lib/librdma.so", b"library").read_bytes()
    digest = hashlib.md5(content, usedforsecurity=False).hexdigest()
    write(
        database / "info/rdma:amd64.md5sums",
        f"{digest}  usr/lib/librdma.so\n{digest}  usr/share/doc/rdma/read me.gz\n",
    )
    write(database / "info/format", "1\n")
    (database / "updates").mkdir()
    monkeypatch.setenv("DPKG_ADMINDIR", str(database))
    package = {"name": "rdma", "version": "44.0", "architecture": "amd64"}
    return with_bom(image, debian=[package])


def test_packages_at_their_versions_hold_and_another_version_is_named(debian: Image) -> None:
    assert proofs.debian_packages(debian) == "1 packages"
    newer = {"name": "rdma", "version": "56.1", "architecture": "amd64"}
    assert faults(proofs.debian_packages, with_bom(debian, debian=[newer])) == {
        "rdma:amd64": "is 44.0, the bill of materials says 56.1"
    }


def test_the_files_of_packages_hold(debian: Image) -> None:
    assert proofs.debian_files(debian) == "1 files by hash"


def test_a_file_of_a_package_that_changed_or_is_gone_is_named(debian: Image) -> None:
    library = write(debian.root / "usr/lib/librdma.so", b"changed")
    assert faults(proofs.debian_files, debian) == {
        str(library): "is not the file of package rdma:amd64: its md5 differs"
    }
    library.unlink()
    assert faults(proofs.debian_files, debian) == {
        str(library): "is missing from package rdma:amd64"
    }


# ---- nothing that does not belong in an image ---------------------------------------------------


def test_debians_own_setuid_files_are_known_and_others_named(image: Image) -> None:
    write(image.root / "usr/bin/passwd").chmod(0o4755)
    assert proofs.setuid(image) == "1 files, all Debian's own"
    mine = write(image.root / "usr/local/bin/passwd")
    mine.chmod(0o4755)
    group = write(image.root / "opt/group")
    group.chmod(stat.S_ISGID | 0o755)
    assert faults(proofs.setuid, make_again(image)) == {
        str(mine): "has mode 4755",
        str(group): "has mode 2755",
    }


def key(kind: str, newline: str = "\n") -> bytes:
    """A private key's form, made here so that no key stands in this file."""
    body = base64.b64encode(os.urandom(96)).decode()
    words = f"{kind} PRIVATE KEY".strip()
    lines = [f"-----BEGIN {words}-----", body[:64], body[64:], f"-----END {words}-----"]
    return newline.join(lines).encode()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("root/.ssh/id_ed25519", key("OPENSSH")),
        ("home/muster/key.pem", b"a certificate\n" + key("")),
        ("etc/ssl/private/host.key", key("RSA", "\r\n")),
        ("opt/account.json", b'{"private_key": "' + key("", "\\n") + b'"}'),
    ],
)
def test_a_private_key_is_named(image: Image, name: str, content: bytes) -> None:
    path = write(image.root / name, content)
    assert faults(proofs.secrets, image) == {str(path): "holds a private key"}


def test_text_about_keys_is_no_key(image: Image) -> None:
    write(image.root / "opt/reader.py", 'MARK = "-----BEGIN RSA PRIVATE KEY-----"\nprint(MARK)\n')
    write(image.root / "etc/empty")
    write(image.root / "usr/share/doc/example.pem", key(""))
    (image.root / "etc/link").symlink_to(image.root / "usr/share/doc/example.pem")
    assert proofs.secrets(image) == "2 files outside the wheels searched"


def test_a_key_that_came_in_a_wheel_is_public(venv: Image) -> None:
    install(venv, "server", "1.0", {"server/tests/key.pem": key("")})
    assert proofs.secrets(venv)


def test_files_of_passwords_are_named(image: Image) -> None:
    netrc = write(image.root / "root/.netrc", "machine a")
    pip = write(
        image.root / "etc/pip.conf", "[global]\nindex-url = https://me:secret@index/simple\n"
    )
    write(image.root / "home/a/.pip/pip.conf", "[global]\nindex-url = https://index:8080/simple\n")
    found = faults(proofs.secrets, image)
    assert found == {str(netrc): "is a file of passwords", str(pip): "holds a password in a URL"}
    assert "secret" not in json.dumps(found)


@pytest.mark.parametrize(
    "name",
    [
        "root/.cache/pip/http/a",
        "home/muster/.cache/uv/a",
        "var/lib/apt/lists/mirror_dists_Packages",
        "var/cache/apt/archives/a.deb",
        "var/cache/apt/pkgcache.bin",
    ],
)
def test_a_leftover_in_a_cache_is_named(image: Image, name: str) -> None:
    write(image.root / name)
    assert faults(proofs.caches, image) == {f"/{name}": "is a leftover in a cache"}


def test_what_apt_keeps_in_an_empty_cache_is_none(image: Image) -> None:
    write(image.root / "var/lib/apt/lists/lock")
    write(image.root / "var/cache/apt/archives/lock")
    write(image.root / "usr/lib/python3/__pycache__/a.pyc")
    assert proofs.caches(image)


@pytest.mark.parametrize(
    "name", ["cc", "gcc", "g++-13", "x86_64-linux-gnu-gcc-12", "clang-19", "nvcc", "ld", "ld.gold"]
)
def test_a_compiler_on_path_is_named(image: Image, name: str) -> None:
    path = write(image.path[0] / name)
    assert faults(proofs.compilers, image) == {str(path): "is a compiler or linker on PATH"}


def test_what_only_sounds_like_a_compiler_is_none(image: Image) -> None:
    for name in ("ld.so", "ldd", "ldconfig", "gccgo-doc", "accept", "ptxas", "python3.11"):
        write(image.path[0] / name)
    (image.root / "bin").symlink_to("usr/bin")
    twice = Image(image.root, image.site, (*image.path, image.root / "bin"), image.bom)
    assert proofs.compilers(twice) == "none in 1 folders of PATH"


# ---- the program --------------------------------------------------------------------------------


def test_the_program_wants_a_bill_of_materials() -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(proofs.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-m", "muster.proofs"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if bom.PATH.exists():
        pytest.skip("this is Muster's image")
    assert done.returncode == 1
    assert "/opt/muster/bom.json" in done.stderr.splitlines()[-1]
    assert done.stdout == ""
