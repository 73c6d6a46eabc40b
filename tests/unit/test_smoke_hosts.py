"""A file of hosts, what is wrong in one by its line, and the docker run that each host gets."""

from pathlib import Path

import pytest
from tests.unit.conftest import ROOT

from muster import fabric
from muster.engine import Ask, ContainerSpec
from muster.errors import HostsUnreadable, HostsWrong, NoHosts
from muster.fabric import Fabric
from muster.smoke import hosts
from muster.smoke.hosts import Host, docker_run

FABRICS = ROOT / "k8s/fabrics"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "hosts"


def spec(**fields: object) -> ContainerSpec:
    known = {"image": "muster:cpu", "command": ("python", "-V"), "shm_bytes": 2**30}
    return ContainerSpec(**{**known, **fields})  # type: ignore[arg-type]


def pairs(argv: tuple[str, ...], flag: str) -> list[str]:
    """What follows each `flag`, up to the image."""
    own = argv[: argv.index("muster:cpu")]
    return [own[at + 1] for at, word in enumerate(own) if word == flag]


# ---- the file ----------------------------------------------------------------------------------


def test_a_host_is_a_name_with_a_user_and_a_port_if_it_has_them(file: Path) -> None:
    file.write_text("node-1\nada@node_2.example\n10.0.0.3:2222\nada.l@n4:22\n")
    assert hosts.read(file) == (
        Host("node-1"),
        Host("node_2.example", "ada"),
        Host("10.0.0.3", None, 2222),
        Host("n4", "ada.l", 22),
    )


def test_ssh_is_given_the_user_and_the_name() -> None:
    assert Host("n1").destination == "n1"
    assert Host("n1", "ada", 22).destination == "ada@n1"


def test_comments_blank_lines_and_other_systems_line_ends_are_no_hosts(file: Path) -> None:
    file.write_bytes(b"\xef\xbb\xbf# the first rack\r\n\r\n  n1  # its top\r\n\tn2#\r\n   \r\n#n3")
    assert hosts.read(file) == (Host("n1"), Host("n2"))


@pytest.mark.parametrize(
    "line",
    [
        "-oProxyCommand=touch",
        "ada@-oProxyCommand=touch",
        "-l@n1",
        "two names",
        "n1 slots=8",
        "n1,n2",
        "$(touch x)",
        "n1;id",
        "n1`id`",
        "n1'",
        'n1"',
        "n1\\",
        "n1/",
        "n1\N{NO-BREAK SPACE}n2",
        "n1\x00",
        "n1\x0bn2",
        "kn\N{LATIN SMALL LETTER O WITH DIAERESIS}ten",
        "ssh://n1",
        "@n1",
        "ada@",
        "ada@n1@n2",
        "n1:",
        "n1:ssh",
        "n1:-1",
        "n1:+22",
        "n1:0",
        "n1:65536",
        "n1:000022",
        "fe80::1",
        "[fe80::1]:22",
        "n" + "1" * 5000 + "!",
    ],
)
def test_what_is_no_host_is_named_with_its_line(file: Path, line: str) -> None:
    file.write_text(f"# rack\nn0\n{line}\n", encoding="utf-8")
    with pytest.raises(HostsWrong, match=r"hosts:3: ") as wrong:
        hosts.read(file)
    assert "[user@]name[:port]" in wrong.value.remedy
    assert len(wrong.value.what) < 400


@pytest.mark.parametrize(
    ("again", "name"), [("n1", "n1"), ("N1", "N1"), ("ada@n1", "n1"), ("n1:2222", "n1")]
)
def test_a_host_that_is_there_twice_is_named_with_both_lines(
    file: Path, again: str, name: str
) -> None:
    file.write_text(f"n1\n\nn2\n{again}\n")
    with pytest.raises(HostsWrong) as wrong:
        hosts.read(file)
    assert wrong.value.what.endswith(f"hosts:4: {name} is there already, in line 1")
    assert wrong.value.exit_code == 2


@pytest.mark.parametrize("text", ["", "\n\n", "# n1\n"])
def test_a_file_without_hosts_is_told(file: Path, text: str) -> None:
    file.write_text(text)
    with pytest.raises(NoHosts, match="names no host"):
        hosts.read(file)


def test_a_file_that_cannot_be_read_is_told_with_the_reason(file: Path) -> None:
    with pytest.raises(HostsUnreadable, match="No such file"):
        hosts.read(file)
    with pytest.raises(HostsUnreadable, match="Is a directory"):
        hosts.read(file.parent)
    file.write_bytes(b"n1\n\xff\xfe\n")
    with pytest.raises(HostsUnreadable, match="no text in UTF-8"):
        hosts.read(file)


# ---- docker run --------------------------------------------------------------------------------


def test_a_plain_container_has_the_hosts_network_and_pulls_nothing() -> None:
    assert docker_run(spec(), None, "muster-smoke-1") == (
        *("docker", "run", "--rm", "--name", "muster-smoke-1", "--pull", "never"),
        *("--network", "host", "--shm-size", "1073741824", "--init"),
        *("muster:cpu", "python", "-V"),
    )


def test_each_ask_and_field_is_a_flag() -> None:
    whole = spec(
        asks=frozenset(Ask),
        cap_add=("IPC_LOCK",),
        user="0:0",
        entrypoint=("sh", "-c"),
        environment={"A": "1 2"},
        init=False,
    )
    argv = docker_run(whole, None, "c")
    assert "--init" not in argv
    assert pairs(argv, "--ulimit") == ["memlock=-1"]
    assert pairs(argv, "--gpus") == ["all"]
    assert pairs(argv, "--device") == ["/dev/infiniband"]
    assert pairs(argv, "--cap-add") == ["IPC_LOCK"]
    assert pairs(argv, "--env") == ["A=1 2"]
    assert pairs(argv, "--user") == ["0:0"]
    assert pairs(argv, "--entrypoint") == ["sh"]
    assert argv[argv.index("muster:cpu") :] == ("muster:cpu", "-c", "python", "-V")


def test_what_the_fabric_needs_is_added_once() -> None:
    shared = fabric.read(FABRICS, "ib-shared")
    asking = spec(asks=frozenset({Ask.INFINIBAND}), cap_add=("IPC_LOCK",))
    for argv in (docker_run(asking, shared, "c"), docker_run(spec(), shared, "c")):
        assert pairs(argv, "--device") == ["/dev/infiniband"]
        assert pairs(argv, "--cap-add") == ["IPC_LOCK"]
        assert pairs(argv, "--env") == ["NCCL_NET=IB", "NCCL_IB_HCA=mlx5"]


def test_what_the_container_sets_itself_wins_over_the_fabric() -> None:
    argv = docker_run(
        spec(environment={"NCCL_NET": "Socket"}), fabric.read(FABRICS, "ib-shared"), "c"
    )
    assert pairs(argv, "--env") == ["NCCL_NET=Socket", "NCCL_IB_HCA=mlx5"]


def interfaces(found: Fabric) -> set[str]:
    names = {"NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "UCX_NET_DEVICES"}
    return {word.split("=")[0] for word in pairs(docker_run(spec(), found, "c"), "--env")} & names


@pytest.mark.parametrize("name", fabric.names(FABRICS))
def test_an_interface_is_named_only_where_the_pod_too_has_those_of_its_host(name: str) -> None:
    found = fabric.read(FABRICS, name)
    on_host = found.pod.get("hostNetwork", False)
    expected = {"NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"} if on_host else set()
    assert interfaces(found) == expected
