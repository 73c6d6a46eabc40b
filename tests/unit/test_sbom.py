"""The CycloneDX document: valid by its own schema, whole, and the same bytes for the same facts."""

import json
import os
import subprocess
import sys
import uuid
from typing import Any

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from tests.unit.conftest import ROOT

from muster import __version__, sbom

DIGEST = f"sha256:{'7c' * 32}"
TORCH = {"name": "torch", "version": "2.13.0+cpu", "sha256": "ab" * 32}
NCCL_TESTS = {"version": "v2.19.6", "commit": "a0" * 20, "origin": "wheels"}


def package(name: str, version: str, architecture: str = "amd64") -> dict[str, str]:
    return {"name": name, "version": version, "architecture": architecture}


def facts(**changes: object) -> dict[str, Any]:
    """What bom.json holds of a small image."""
    return {
        "schema": 1,
        "variant": "cpu",
        "torch": "2.13.0+cpu",
        "nccl": None,
        "base": {"ref": "muster-base:bookworm", "id": DIGEST, "origin": "mmdebstrap"},
        "wheels": [TORCH, {"name": "filelock", "version": "4.3.1", "sha256": "cd" * 32}],
        "python": "3.11.2",
        "debian": [
            package("base-files", "12.4+deb12u13"),
            package("libibverbs1", "44.0-2"),
            package("bsdutils", "1:2.38.1-5+deb12u3"),
            package("tzdata", "2026a-0+deb12u1", "all"),
        ],
        **changes,
    }


def document(**changes: object) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(sbom.cyclonedx(facts(**changes)))
    return found


def components(**changes: object) -> dict[str, dict[str, Any]]:
    return {each["bom-ref"]: each for each in document(**changes)["components"]}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"nccl_tests": NCCL_TESTS},
        {"base": {"ref": f"debian@{DIGEST}", "id": DIGEST, "origin": "registry"}},
        {"debian": [], "wheels": []},
    ],
)
def test_it_is_valid_by_the_strict_schema(changes: dict[str, object]) -> None:
    validator = JsonStrictValidator(SchemaVersion.V1_6)
    for epoch in (None, 1_760_000_000):
        text = sbom.cyclonedx(facts(**changes), source_date_epoch=epoch).decode()
        assert validator.validate_str(text) is None
    # and the validator is one that can say no
    assert validator.validate_str(text.replace('"bom-ref"', '"bom_ref"')) is not None


def test_every_package_wheel_and_the_base_are_components() -> None:
    assert components().keys() == {
        "muster-base:bookworm",
        "pkg:deb/debian/base-files@12.4%2Bdeb12u13?arch=amd64&distro=debian-12",
        "pkg:deb/debian/libibverbs1@44.0-2?arch=amd64&distro=debian-12",
        "pkg:deb/debian/bsdutils@1:2.38.1-5%2Bdeb12u3?arch=amd64&distro=debian-12",
        "pkg:deb/debian/tzdata@2026a-0%2Bdeb12u1?arch=all&distro=debian-12",
        "pkg:pypi/torch@2.13.0%2Bcpu",
        "pkg:pypi/filelock@4.3.1",
    }
    for name, each in components().items():
        if name.startswith("pkg:"):
            assert each["purl"] == name
            assert each["type"] == "library"


def test_a_wheel_has_its_hash_and_its_plain_version() -> None:
    wheel = components()["pkg:pypi/torch@2.13.0%2Bcpu"]
    assert (wheel["name"], wheel["version"]) == (TORCH["name"], TORCH["version"])
    assert wheel["hashes"] == [{"alg": "SHA-256", "content": TORCH["sha256"]}]


def test_it_describes_the_image_which_depends_on_every_component() -> None:
    found = document(nccl_tests=NCCL_TESTS)
    image = found["metadata"]["component"]
    assert (image["type"], image["name"]) == ("container", "muster:cpu")
    assert image["version"] == __version__
    assert image["properties"] == [{"name": "io.muster.variant", "value": "cpu"}]
    depends = {each["ref"]: each.get("dependsOn", []) for each in found["dependencies"]}
    assert set(depends["muster:cpu"]) == {each["bom-ref"] for each in found["components"]}


def test_a_slim_image_goes_by_its_own_name() -> None:
    image = document(slim=True)["metadata"]["component"]
    assert (image["name"], image["bom-ref"]) == ("muster:cpu-slim", "muster:cpu-slim")
    assert document(slim=False)["metadata"]["component"]["name"] == "muster:cpu"


def test_the_version_is_that_of_the_image_when_given() -> None:
    found = json.loads(sbom.cyclonedx(facts(), version="9.9"))
    assert found["metadata"]["component"]["version"] == "9.9"


def test_nccl_tests_are_named_by_their_commit_where_the_image_has_them() -> None:
    name = f"pkg:github/nvidia/nccl-tests@{NCCL_TESTS['commit']}"
    assert not [each for each in components() if "nccl-tests" in each]
    found = components(nccl_tests=NCCL_TESTS)[name]
    assert (found["type"], found["version"]) == ("application", "v2.19.6")
    assert found["properties"] == [{"name": "io.muster.nccl-tests", "value": "wheels"}]
    plain = {"version": "v2.19.6", "commit": NCCL_TESTS["commit"]}
    assert "properties" not in components(nccl_tests=plain)[name]


@pytest.mark.parametrize(
    ("ref", "origin", "name", "version", "purl"),
    [
        ("muster-base:bookworm", "mmdebstrap", "muster-base:bookworm", "mmdebstrap", None),
        (f"debian@{DIGEST}", "registry", "debian", DIGEST, f"pkg:oci/debian@{DIGEST}"),
        (f"host:5000/x/y@{DIGEST}", "given", "host:5000/x/y", DIGEST, f"pkg:oci/y@{DIGEST}"),
        ("host:5000/x/y:tag", "given", "host:5000/x/y:tag", "given", None),
    ],
)
def test_the_base_is_named_by_its_digest_or_its_origin(
    ref: str, origin: str, name: str, version: str, purl: str | None
) -> None:
    found = components(base={"ref": ref, "id": DIGEST, "origin": origin})[purl or ref]
    assert (found["type"], found["name"], found["version"]) == ("container", name, version)
    assert found.get("purl") == purl
    assert {each["name"]: each["value"] for each in found["properties"]} == {
        "io.muster.base": origin,
        "io.muster.base.id": DIGEST,
    }


@pytest.mark.parametrize(
    ("base_files", "purl"),
    [
        ("12.4+deb12u13", "pkg:deb/debian/x@1?arch=amd64&distro=debian-12"),
        ("13.8+deb13u1", "pkg:deb/debian/x@1?arch=amd64&distro=debian-13"),
        ("14", "pkg:deb/debian/x@1?arch=amd64&distro=debian-14"),
        ("13ubuntu10.3", "pkg:deb/ubuntu/x@1?arch=amd64"),
        ("1:9.9devuan1", "pkg:deb/debian/x@1?arch=amd64"),
        (None, "pkg:deb/debian/x@1?arch=amd64"),
    ],
)
def test_the_distribution_is_the_one_of_base_files(base_files: str | None, purl: str) -> None:
    packages = [package("x", "1")]
    if base_files is not None:
        packages.append(package("base-files", base_files))
    assert purl in components(debian=packages)


def test_one_package_in_two_architectures_is_two_components() -> None:
    found = components(debian=[package("libc6", "2"), package("libc6", "2", "i386")])
    assert {each for each in found if "libc6" in each} == {
        "pkg:deb/debian/libc6@2?arch=amd64",
        "pkg:deb/debian/libc6@2?arch=i386",
    }


# ---- the same facts, the same bytes -------------------------------------------------------------


def test_other_processes_write_the_same_bytes() -> None:
    script = "import json, sys; from muster import sbom; "
    script += "sys.stdout.buffer.write(sbom.cyclonedx(json.load(sys.stdin)))"
    written = {
        subprocess.run(
            [sys.executable, "-c", script],
            input=json.dumps(facts(nccl_tests=NCCL_TESTS)).encode(),
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT / "src")},
            check=True,
            capture_output=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert written == {sbom.cyclonedx(facts(nccl_tests=NCCL_TESTS))}


def test_the_order_of_the_facts_does_not_count() -> None:
    turned = dict(reversed(facts().items()))
    assert sbom.cyclonedx(turned) == sbom.cyclonedx(facts())


def test_the_serial_number_is_that_of_the_facts() -> None:
    serial = document()["serialNumber"]
    assert uuid.UUID(serial).version == 5
    assert document()["serialNumber"] == serial
    others = [document(python="3.11.3"), document(wheels=[TORCH])]
    others.append(json.loads(sbom.cyclonedx(facts(), version="9.9")))
    assert len({serial, *(each["serialNumber"] for each in others)}) == 4


def test_the_only_time_in_it_is_the_given_one() -> None:
    assert "timestamp" not in document()["metadata"]
    for epoch, text in ((0, "1970-01-01T00:00:00+00:00"), (1, "1970-01-01T00:00:01+00:00")):
        found = json.loads(sbom.cyclonedx(facts(), source_date_epoch=epoch))
        assert found["metadata"]["timestamp"] == text
