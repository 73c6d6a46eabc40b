"""The bill of materials as CycloneDX 1.6, which scanners and auditors read.

The same facts give the same bytes: the serial number is a hash of them, and there is no time in it
but SOURCE_DATE_EPOCH. https://cyclonedx.org/docs/1.6/json/
"""

import json
import re
import uuid
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

from cyclonedx.model import HashAlgorithm, HashType, Property
from cyclonedx.model.bom import Bom, BomMetaData
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL

from muster import __version__

# the labels of the image say the same in the same words
PROPERTY_BASE = "io.muster.base"
PROPERTY_BASE_ID = "io.muster.base.id"
PROPERTY_NCCL_TESTS = "io.muster.nccl-tests"
PROPERTY_VARIANT = "io.muster.variant"

# base-files carries the number of its release: 12.4+deb12u13 is Debian 12
_RELEASE = re.compile(r"(\d+)(\.\d+)*(\+deb\d+u\d+)?")


def cyclonedx(
    facts: Mapping[str, Any], *, version: str = __version__, source_date_epoch: int | None = None
) -> bytes:
    """The facts of bom.json as a CycloneDX document. `version` is that of the image's Muster."""
    image = _image(facts, version)
    made = None if source_date_epoch is None else datetime.fromtimestamp(source_date_epoch, UTC)
    bom = Bom(
        serial_number=_serial_number(facts, version),
        metadata=BomMetaData(component=image, timestamp=made),
        components=_components(facts),
    )
    bom.register_dependency(image, bom.components)
    document = json.loads(JsonV1Dot6(bom).output_as_string())
    if made is None:
        # the library puts in the present time
        del document["metadata"]["timestamp"]
    return (json.dumps(document, indent=1) + "\n").encode()


def _serial_number(facts: Mapping[str, Any], version: str) -> uuid.UUID:
    return uuid.uuid5(uuid.NAMESPACE_OID, f"muster {version} {json.dumps(facts, sort_keys=True)}")


def _image(facts: Mapping[str, Any], version: str) -> Component:
    variant = facts["variant"]
    name = f"muster:{variant}-slim" if facts.get("slim") else f"muster:{variant}"
    return Component(
        type=ComponentType.CONTAINER,
        bom_ref=name,
        name=name,
        version=version,
        properties=[Property(name=PROPERTY_VARIANT, value=variant)],
    )


def _components(facts: Mapping[str, Any]) -> list[Component]:
    return [
        _base(facts["base"]),
        *_packages(facts["debian"]),
        *(_wheel(wheel) for wheel in facts["wheels"]),
        *([_nccl_tests(facts["nccl_tests"])] if facts.get("nccl_tests") else []),
    ]


def _base(base: Mapping[str, str]) -> Component:
    """The base: by its registry's digest if it has one, else by where it is from."""
    name, _, digest = base["ref"].partition("@")
    purl = PackageURL("oci", name=name.rpartition("/")[2], version=digest) if digest else None
    return Component(
        type=ComponentType.CONTAINER,
        bom_ref=str(purl) if purl else base["ref"],
        name=name,
        version=digest or base["origin"],
        purl=purl,
        properties=[
            Property(name=PROPERTY_BASE, value=base["origin"]),
            Property(name=PROPERTY_BASE_ID, value=base["id"]),
        ],
    )


def _packages(packages: Iterable[Mapping[str, str]]) -> list[Component]:
    versions = {package["name"]: package["version"] for package in packages}
    vendor, distro = _distribution(versions.get("base-files", ""))
    return [
        _component(
            PackageURL(
                "deb",
                vendor,
                package["name"],
                package["version"],
                {"arch": package["architecture"], **distro},
            )
        )
        for package in packages
    ]


def _distribution(base_files: str) -> tuple[str, dict[str, str]]:
    """Whose packages they are: a base that the user gave need not be Debian's."""
    if "ubuntu" in base_files:
        return "ubuntu", {}
    release = _RELEASE.fullmatch(base_files)
    return "debian", {"distro": f"debian-{release[1]}"} if release else {}


def _wheel(wheel: Mapping[str, str]) -> Component:
    component = _component(PackageURL("pypi", None, wheel["name"], wheel["version"]))
    component.hashes.add(HashType(alg=HashAlgorithm.SHA_256, content=wheel["sha256"]))
    return component


def _nccl_tests(facts: Mapping[str, str]) -> Component:
    purl = PackageURL("github", "nvidia", "nccl-tests", facts["commit"])
    component = _component(purl, ComponentType.APPLICATION)
    component.version = facts["version"]
    if origin := facts.get("origin"):
        component.properties.add(Property(name=PROPERTY_NCCL_TESTS, value=origin))
    return component


def _component(purl: PackageURL, kind: ComponentType = ComponentType.LIBRARY) -> Component:
    return Component(type=kind, bom_ref=str(purl), name=purl.name, version=purl.version, purl=purl)
