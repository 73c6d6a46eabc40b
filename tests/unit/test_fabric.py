"""The fabrics of this repository, and files that are wrong."""

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml as pyyaml
from ruamel.yaml import YAML
from tests.unit.conftest import ROOT

from muster import fabric, patch
from muster.errors import FabricWrong, UnknownFabric
from muster.fabric import DockerNeeds, DockerNetwork, Fabric, Network, PodSecurity

FABRICS = ROOT / "k8s/fabrics"
NAMES = (
    "aks-ndv4",
    "aks-ndv5",
    "coreweave",
    "efa-p4d",
    "efa-p5",
    "efa-p5en",
    "efa-p6-b200",
    "gke-gib-a3u",
    "gke-gib-a4",
    "gke-tcpx",
    "gke-tcpxo",
    "ib-shared",
    "nebius",
    "oke-host-a100",
    "oke-host-b200",
    "oke-host-h100",
    "oke-host-h200",
    "oke-vf-a100",
    "oke-vf-b200",
    "oke-vf-h100",
    "oke-vf-h200",
    "sriov-multus-ib",
    "sriov-multus-roce",
    "tcp",
)

# what a rendered pod has before its fabric: nothing that the restricted level forbids
POD = """
securityContext:
  runAsNonRoot: true
  runAsUser: 1000
  seccompProfile:
    type: RuntimeDefault
containers:
  - name: train
    securityContext:
      allowPrivilegeEscalation: false
      readOnlyRootFilesystem: true
      capabilities:
        drop:
          - ALL
    volumeMounts:
      - name: dshm
        mountPath: /dev/shm
      - name: tmp
        mountPath: /tmp
volumes:
  - name: dshm
    emptyDir:
      medium: Memory
  - name: tmp
    emptyDir: {}
"""

# https://kubernetes.io/docs/concepts/security/pod-security-standards/
BASELINE_CAPABILITIES = {
    "AUDIT_WRITE",
    "CHOWN",
    "DAC_OVERRIDE",
    "FOWNER",
    "FSETID",
    "KILL",
    "MKNOD",
    "NET_BIND_SERVICE",
    "SETFCAP",
    "SETGID",
    "SETPCAP",
    "SETUID",
    "SYS_CHROOT",
}
RESTRICTED_VOLUMES = {
    "configMap",
    "csi",
    "downwardAPI",
    "emptyDir",
    "ephemeral",
    "persistentVolumeClaim",
    "projected",
    "secret",
}
HOST_NAMESPACES = ("hostNetwork", "hostPID", "hostIPC")


def level(spec: dict[str, Any]) -> PodSecurity:
    """The lowest level of the Pod Security Standards that admits a pod of this spec."""
    containers = [*spec.get("initContainers", []), *spec["containers"]]
    if any(spec.get(each) for each in HOST_NAMESPACES):
        return PodSecurity.PRIVILEGED
    if any("hostPath" in volume for volume in spec["volumes"]):
        return PodSecurity.PRIVILEGED
    if any(needs_privileged(container) for container in containers):
        return PodSecurity.PRIVILEGED
    volumes = {kind for volume in spec["volumes"] for kind in volume if kind != "name"}
    restricted = all(is_restricted(container, spec) for container in containers)
    if restricted and volumes <= RESTRICTED_VOLUMES:
        return PodSecurity.RESTRICTED
    return PodSecurity.BASELINE


def needs_privileged(container: dict[str, Any]) -> bool:
    context = container.get("securityContext", {})
    added = set(context.get("capabilities", {}).get("add", []))
    ports = container.get("ports", [])
    return bool(
        context.get("privileged")
        or added - BASELINE_CAPABILITIES
        or any("hostPort" in port for port in ports)
        or context.get("seccompProfile", {}).get("type") == "Unconfined"
    )


def is_restricted(container: dict[str, Any], spec: dict[str, Any]) -> bool:
    own = container.get("securityContext", {})
    context = {**spec["securityContext"], **own}
    capabilities = own.get("capabilities", {})
    return bool(
        context.get("runAsNonRoot") is True
        and context.get("runAsUser") != 0
        and own.get("allowPrivilegeEscalation") is False
        and "ALL" in capabilities.get("drop", [])
        and set(capabilities.get("add", [])) <= {"NET_BIND_SERVICE"}
        and context.get("seccompProfile", {}).get("type") in {"RuntimeDefault", "Localhost"}
    )


def pod(found: Fabric) -> Any:  # noqa: ANN401 - a pod's spec, of any shape
    """The pod's spec with the fabric's patches laid over it."""
    spec = patch.merged(load(POD), found.pod)
    spec["containers"][0] = patch.merged(spec["containers"][0], found.container)
    return spec


def yaml() -> YAML:
    settings = YAML()
    settings.preserve_quotes = True
    settings.width = 4096
    return settings


def load(text: str) -> Any:  # noqa: ANN401 - a document has any shape
    return yaml().load(text)


def dump(document: object) -> str:
    stream = io.StringIO()
    yaml().dump(document, stream)
    return stream.getvalue()


@pytest.fixture(params=NAMES)
def found(request: pytest.FixtureRequest) -> Fabric:
    return fabric.read(FABRICS, request.param)


# ---- the fabrics of this repository --------------------------------------------------------------


def test_every_fabric_is_listed_once_and_in_order() -> None:
    assert fabric.names(FABRICS) == NAMES


def test_a_fabric_reads_and_has_its_name(found: Fabric) -> None:
    assert found.name in NAMES
    assert "\n" not in found.summary
    assert found.using_network


def test_every_fabric_has_a_source(found: Fabric) -> None:
    assert found.sources
    assert len(set(found.sources)) == len(found.sources)


def test_the_environment_is_of_strings_that_stay_strings_in_yaml(found: Fabric) -> None:
    assert found.environment
    for name, value in found.environment.items():
        assert re.fullmatch(r"[A-Z][A-Z0-9_]*", name)
        assert isinstance(value, str)
        assert value.strip() == value
        # Kubernetes expands $(VAR) in env, and nothing in a ConfigMap
        assert "$" not in value
    # YAML 1.1, as kubectl reads it: its no and on are booleans
    assert pyyaml.safe_load(dump(found.environment)) == dict(found.environment)


def test_resources_are_whole_numbers_and_leave_the_gpus_to_the_renderer(found: Fabric) -> None:
    resources = found.container.get("resources", {})
    assert set(resources) <= {"limits"}
    for name, count in resources.get("limits", {}).items():
        assert re.fullmatch(r"[a-z.]+/[a-z_-]+", name)
        assert type(count) is int
        assert 1 <= count <= 63
        assert name != "nvidia.com/gpu"


def test_the_pod_security_level_is_the_lowest_that_admits_the_pod(found: Fabric) -> None:
    assert level(pod(found)) is found.pod_security


@pytest.mark.parametrize(
    ("over", "expected"),
    [
        ("{}", "restricted"),
        ("containers: [{name: train, securityContext: {runAsUser: 0}}]", "baseline"),
        ("containers: [{name: train, securityContext: {runAsNonRoot: false}}]", "baseline"),
        ("initContainers: [{name: sidecar}]", "baseline"),
        ("volumes: [{name: a, nfs: {server: s}}]", "baseline"),
        ("hostNetwork: true", "privileged"),
        ("volumes: [{name: a, hostPath: {path: /a}}]", "privileged"),
        ("containers: [{name: train, ports: [{hostPort: 1}]}]", "privileged"),
        ("containers: [{name: train, securityContext: {privileged: true}}]", "privileged"),
        (
            "initContainers: [{name: s, securityContext: {capabilities: {add: [NET_ADMIN]}}}]",
            "privileged",
        ),
    ],
)
def test_the_levels_are_told_apart(over: str, expected: str) -> None:
    assert level(patch.merged(load(POD), load(over))) == expected


def test_a_pod_that_locks_memory_does_so_as_root_and_says_why(found: Fabric) -> None:
    context = pod(found)["containers"][0]["securityContext"]
    if "IPC_LOCK" not in context["capabilities"].get("add", []):
        assert "runAsUser" not in context
        return
    assert context["runAsUser"] == 0
    assert context["runAsNonRoot"] is False
    assert "runAsUser: 0 # IPC_LOCK is inert for any other user" in dump(found.container)


def test_kubernetes_takes_no_privileged_container_that_may_not_escalate(found: Fabric) -> None:
    context = pod(found)["containers"][0]["securityContext"]
    assert context["allowPrivilegeEscalation"] is bool(context.get("privileged"))


def test_every_mount_has_its_volume_and_every_volume_is_mounted(found: Fabric) -> None:
    spec = pod(found)
    containers = [*spec.get("initContainers", []), *spec["containers"]]
    mounted = {mount["name"] for each in containers for mount in each["volumeMounts"]}
    assert mounted == {volume["name"] for volume in spec["volumes"]}
    for each in containers:
        places = [mount["mountPath"] for mount in each["volumeMounts"]]
        assert len(set(places)) == len(places)


def test_a_pod_on_the_hosts_network_still_asks_the_clusters_dns(found: Fabric) -> None:
    on_host = bool(found.pod.get("hostNetwork"))
    assert (found.pod.get("dnsPolicy") == "ClusterFirstWithHostNet") is on_host


def test_a_sidecar_ends_with_the_training_and_takes_no_gpus(found: Fabric) -> None:
    for sidecar in found.pod.get("initContainers", []):
        assert sidecar["restartPolicy"] == "Always"
        assert re.search(r":v\d", sidecar["image"])
        assert "resources" not in sidecar
        annotation = f"devices.gke.io/container.{sidecar['name']}"
        assert "/dev/nvidia7" in found.metadata["annotations"][annotation]


def test_annotations_are_strings_and_what_they_hold_is_well_formed(found: Fabric) -> None:
    for key, value in found.metadata.get("annotations", {}).items():
        assert isinstance(value, str)
        if key == "networking.gke.io/interfaces":
            interfaces = [each["interfaceName"] for each in json.loads(value)]
            assert len(set(interfaces)) == len(interfaces) > 1
            assert interfaces[0] == "eth0"
        if key.startswith("devices.gke.io/"):
            assert all(each["path"].startswith("/dev/") for each in pyyaml.safe_load(value))


@pytest.mark.parametrize(
    ("name", "resource"),
    [
        ("sriov-multus-ib", "nvidia.com/mlnxnics"),
        ("sriov-multus-roce", "nvidia.com/sriovlegacy"),
        ("oke-vf-h100", "nvidia.com/rdma-vf"),
        ("oke-vf-h200", "nvidia.com/rdma-vf"),
        ("oke-vf-b200", "nvidia.com/rdma-vf"),
        ("oke-vf-a100", "nvidia.com/rdma-vf"),
    ],
)
def test_a_network_is_attached_for_each_virtual_function(name: str, resource: str) -> None:
    found = fabric.read(FABRICS, name)
    networks = found.metadata["annotations"]["k8s.v1.cni.cncf.io/networks"].split(",")
    assert len(networks) == found.container["resources"]["limits"][resource]
    # a job may be in any namespace
    assert all(network.startswith("default/") for network in networks)


def test_no_fabric_but_tcp_falls_back_to_sockets_unseen(found: Fabric) -> None:
    assert ("Socket" in found.using_network) is (found.network is Network.TCP)
    if found.network in {Network.INFINIBAND, Network.ROCE, Network.GIB}:
        assert found.environment["NCCL_NET"] in found.using_network


def test_docker_gets_the_devices_that_the_pod_gets(found: Fabric) -> None:
    added = pod(found)["containers"][0]["securityContext"]["capabilities"].get("add", [])
    assert set(added) <= set(found.docker.cap_add)
    assert found.docker.note
    if found.network in {Network.INFINIBAND, Network.ROCE, Network.GIB, Network.EFA}:
        assert found.docker.devices == ("/dev/infiniband",)
        assert found.docker.network is DockerNetwork.HOST


@pytest.mark.parametrize(("name", "count"), [("p4d", 4), ("p5", 32), ("p5en", 16), ("p6-b200", 8)])
def test_a_shape_of_efa_has_its_number_of_adapters(name: str, count: int) -> None:
    found = fabric.read(FABRICS, f"efa-{name}")
    assert found.container["resources"]["limits"]["vpc.amazonaws.com/efa"] == count
    selected = found.pod["nodeSelector"]["node.kubernetes.io/instance-type"]
    assert selected.startswith(f"{name}.")


# ---- reading -------------------------------------------------------------------------------------

WHOLE = """\
summary: a fabric
network: ib
using_network:
  - IB
pod_security: privileged
gpus_per_node: 8
busbw_floor_gb_s: 100 # measured
sources:
  - https://example.org/a
docker:
  devices:
    - /dev/infiniband
  cap_add:
    - IPC_LOCK
  network: host
  note: none
metadata:
  annotations:
    a.example.org/b: c
pod:
  # about the host's network
  hostNetwork: true # on
# about the container
container:
  tty: true
environment:
  NCCL_NET: "IB" # by name
  NCCL_IB_HCA: 'mlx5'
"""
SHAPES = """\
shapes:
  small:
    gpus_per_node: 4
    busbw_floor_gb_s: null
    environment:
      NCCL_IB_HCA: "ibp" # other names
  large-b200:
    container:
      stdin: true
    sources:
      - https://example.org/b
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "plain.yaml").write_text(WHOLE)
    (tmp_path / "two-words.yaml").write_text(WHOLE + SHAPES)
    return tmp_path


def test_every_key_is_read(folder: Path) -> None:
    assert fabric.read(folder, "plain") == Fabric(
        name="plain",
        summary="a fabric",
        network=Network.INFINIBAND,
        using_network=("IB",),
        pod_security=PodSecurity.PRIVILEGED,
        gpus_per_node=8,
        busbw_floor_gb_s=100.0,
        sources=("https://example.org/a",),
        docker=DockerNeeds(("/dev/infiniband",), ("IPC_LOCK",), DockerNetwork.HOST, "none"),
        metadata=load("annotations: {a.example.org/b: c}"),
        pod=load("hostNetwork: true"),
        container=load("tty: true"),
        environment=load("{NCCL_NET: IB, NCCL_IB_HCA: mlx5}"),
    )


def test_what_a_file_leaves_out_is_empty_or_not_known(folder: Path) -> None:
    optional = ("metadata", "pod", "container", "environment", "gpus_per_node", "busbw_floor_gb_s")
    document = load(WHOLE)
    for key in optional:
        del document[key]
    (folder / "plain.yaml").write_text(dump(document))
    found = fabric.read(folder, "plain")
    assert not any(getattr(found, key) for key in optional)
    assert (found.gpus_per_node, found.busbw_floor_gb_s) == (None, None)


def test_a_part_comes_with_its_own_comments_alone(folder: Path) -> None:
    found = fabric.read(folder, "plain")
    lines = [line.strip() for line in dump(found.pod).splitlines()]
    assert lines == ["# about the host's network", "hostNetwork: true # on"]
    assert dump(found.container) == "tty: true\n"


def test_names_are_sorted_and_have_the_shapes_in_them(folder: Path) -> None:
    assert fabric.names(folder) == ("plain", "two-words-large-b200", "two-words-small")


def test_a_shape_says_what_differs(folder: Path) -> None:
    small = fabric.read(folder, "two-words-small")
    assert (small.gpus_per_node, small.busbw_floor_gb_s) == (4, None)
    assert small.environment == {"NCCL_NET": "IB", "NCCL_IB_HCA": "ibp"}
    assert "# other names" in dump(small.environment)
    assert small.container == {"tty": True}
    large = fabric.read(folder, "two-words-large-b200")
    assert (large.gpus_per_node, large.busbw_floor_gb_s) == (8, 100.0)
    assert large.container == {"tty": True, "stdin": True}
    assert large.sources == ("https://example.org/a", "https://example.org/b")


def test_no_other_file_is_read(folder: Path) -> None:
    (folder / "broken.yaml").write_text("a: [")
    assert fabric.read(folder, "plain").name == "plain"


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("plane", "did you mean plain? "),
        ("two-words", "did you mean two-words-large-b200 or two-words-small? "),
        ("two", "did you mean two-words-large-b200 or two-words-small? "),
        ("two-words-smal", "did you mean two-words-small"),
        ("plain-small", "did you mean plain"),
        ("quite-other", ""),
        ("", ""),
        ("../plain", "did you mean plain? "),
        ("plain.yaml", "did you mean plain? "),
        ("a\nb", ""),
    ],
)
def test_an_unknown_fabric_is_named_with_those_that_are_near(
    folder: Path, name: str, remedy: str
) -> None:
    with pytest.raises(UnknownFabric) as caught:
        fabric.read(folder, name)
    assert caught.value.what == f"there is no fabric {name!r}"
    assert caught.value.remedy.startswith(remedy + ("" if remedy else "use one of: plain, "))
    assert caught.value.remedy.endswith("plain, two-words-large-b200, two-words-small")


def test_a_fabric_of_this_repository_with_shapes_has_no_plain_name() -> None:
    with pytest.raises(UnknownFabric, match="'efa'") as caught:
        fabric.read(FABRICS, "efa")
    nearest = "efa-p4d or efa-p5 or efa-p5en or efa-p6-b200"
    assert caught.value.remedy.startswith(f"did you mean {nearest}? ")


# ---- wrong files ---------------------------------------------------------------------------------


def line_of(text: str, part: str) -> int:
    return text[: text.index(part)].count("\n") + 1


@pytest.mark.parametrize(
    ("before", "after", "named", "why"),
    [
        ("gpus_per_node: 8", "gpus: 8", "gpus: 8", "gpus is unknown"),
        ("    - IPC_LOCK", "    - IPC_LOCK\n  ulimit: 1", "ulimit: 1", "docker.ulimit is unknown"),
        ("  annotations:", "  annotation:", "annotation:", "metadata.annotation is unknown"),
        ("gpus_per_node: 8", "gpus_per_node: '8'", "gpus_per_node", "'8', not a whole number"),
        ("gpus_per_node: 8", "gpus_per_node: true", "gpus_per_node", "True, not a whole number"),
        ("gpus_per_node: 8", "gpus_per_node: 0", "gpus_per_node", "0, not a whole number"),
        ("100 # measured", "-1", "busbw_floor", "-1, not a number above 0"),
        ("100 # measured", "true", "busbw_floor", "True, not a number above 0"),
        ("network: ib", "network: myrinet", "network: myrinet", "'myrinet', not one of: tcp, ib,"),
        ("network: host", "network: none", "network: none", "not one of: bridge, host"),
        ("pod_security: privileged", "pod_security: low", "pod_security", "not one of: restricted"),
        ("summary: a fabric", "summary: 1", "summary", "summary is 1, not a text"),
        ("summary: a fabric", "summary: ''", "summary", "summary is '', not a text"),
        ("using_network:\n  - IB", "using_network: IB", "using_network", "not a list of texts"),
        ("  - https://example.org/a", "  - example.org", "sources", "not a list of https://"),
        ("  hostNetwork: true # on", "  - hostNetwork", "pod:", "not a map"),
        (
            "container:\n  tty: true",
            "container: null",
            "container:",
            "container is None, not a map",
        ),
        ("    a.example.org/b: c", "    a.example.org/b: 1", "a.example", "b is 1, not a text"),
        ('"IB" # by name', "IB", "NCCL_NET", "NCCL_NET is 'IB', not a text in quotes"),
        ("'mlx5'", "1", "NCCL_IB_HCA", "NCCL_IB_HCA is 1, not a text in quotes"),
        ("pod_security: privileged", "\tpod_security: privileged", "\tpod", "'\\t' that cannot"),
        (
            "gpus_per_node: 8",
            "gpus_per_node: 8\nnetwork: ib",
            "network: ib\nbusbw",
            "duplicate key",
        ),
        ("tty: true", "tty: [true", "environment", "expected"),
        ("summary: a fabric", "summary: a: fabric", "summary", "mapping values are not allowed"),
    ],
)
def test_a_wrong_file_is_named_with_the_line(
    folder: Path, before: str, after: str, named: str, why: str
) -> None:
    assert WHOLE.count(before) == 1
    text = WHOLE.replace(before, after)
    path = folder / "plain.yaml"
    path.write_text(text)
    with pytest.raises(FabricWrong) as caught:
        fabric.read(folder, "plain")
    assert caught.value.what.startswith(f"{path}:{line_of(text, named)}: ")
    assert why in caught.value.what


@pytest.mark.parametrize(
    ("shapes", "line", "why"),
    [
        ("shapes: 1", 1, "shapes is 1, not a map"),
        ("shapes:\n  a:", 2, "shapes.a is None, not a map"),
        ("shapes:\n  a: {}\n  B: {}", 3, "shapes.B is no name"),
        ("shapes:\n  4: {}", 2, "shapes.4 is no name"),
        ("shapes:\n  a:\n    gpu: 1", 3, "shapes.a.gpu is unknown"),
        ("shapes:\n  a:\n    shapes: {}", 3, "shapes.a.shapes is unknown"),
        ("shapes:\n  a:\n    environment:\n      A: 1", 4, "shapes.a.environment.A is 1"),
    ],
)
def test_a_wrong_shape_is_named_with_the_line(
    folder: Path, shapes: str, line: int, why: str
) -> None:
    (folder / "plain.yaml").write_text(WHOLE + shapes)
    with pytest.raises(FabricWrong) as caught:
        fabric.read(folder, "plain-a")
    assert f":{WHOLE.count(chr(10)) + line}: {why}" in caught.value.what


@pytest.mark.parametrize("key", ["summary", "network", "using_network", "sources", "docker"])
def test_what_a_file_lacks_is_named(folder: Path, key: str) -> None:
    document = load(WHOLE)
    del document[key]
    (folder / "plain.yaml").write_text(dump(document))
    with pytest.raises(FabricWrong, match=f"lacks {key}"):
        fabric.read(folder, "plain")


def test_what_docker_lacks_is_named(folder: Path) -> None:
    (folder / "plain.yaml").write_text(WHOLE.replace("  note: none\n", ""))
    with pytest.raises(FabricWrong, match=r"lacks docker\.note"):
        fabric.read(folder, "plain")


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "is not a map"),
        (b"- a\n", "is not a map"),
        (b"a: 1\n---\na: 1\n", "single document"),
        (b"\xff\xfe\x00", "cannot be read"),
        (b"a: \x00\n", "cannot be read"),
    ],
)
def test_what_is_no_document_is_said(folder: Path, content: bytes, why: str) -> None:
    (folder / "plain.yaml").write_bytes(content)
    with pytest.raises(FabricWrong, match=why):
        fabric.read(folder, "plain")
