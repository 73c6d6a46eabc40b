"""What a user asks of render: read from flags and files, checked, refused with the line."""

from pathlib import Path

import pytest

from muster.errors import SpecWrong, UnknownFabric, WrongInput
from muster.manifests import spec as specs
from muster.manifests.spec import Code, Given, Kind, Spec, Toleration
from muster.topology import NodeRange

FABRICS = Path(__file__).resolve().parents[2] / "k8s/fabrics"
LEAST: dict[str, object] = {
    "name": "demo",
    "image": "muster:cpu",
    "nnodes": "2",
    "nproc_per_node": "2",
}


def built(**flags: object) -> Spec:
    return specs.build(specs.from_flags({**LEAST, **flags}), FABRICS)


def refused(**flags: object) -> SpecWrong:
    with pytest.raises(SpecWrong) as caught:
        built(**flags)
    return caught.value


def from_text(tmp_path: Path, text: str, name: str = "job.toml") -> dict[str, Given]:
    path = tmp_path / name
    path.write_text(text)
    return specs.from_file(path)


def test_the_least_that_is_asked_has_the_defaults() -> None:
    spec = built()
    assert spec.nnodes == NodeRange(2, 2)
    assert spec.fabric.name == "tcp"
    assert (spec.kind, spec.code, spec.namespace) == (Kind.JOB, Code.IMAGE, "default")
    assert spec.script == "train/ddp_demo.py"


@pytest.mark.parametrize("name", specs.REQUIRED)
def test_what_no_job_can_do_without_is_asked_for(name: str) -> None:
    error = refused(**{name: None})
    assert f"--{name.replace('_', '-')}" in error.what


def test_every_flag_is_read() -> None:
    spec = built(
        fabric="efa-p5",
        nnodes="2:4",
        nproc_per_node="8",
        memory="64g",
        shm_size="16g",
        checkpoint="pvc:results",
        deadline_s="3600",
        ttl_s="0",
        queue="team",
        topology="topology.k8s.aws/network-node-layer-1",
        node_selector=["a=b"],
        tolerations=["dedicated=ml:NoSchedule", "spot"],
        env=["A=b=c", "EMPTY="],
        arguments=["--epochs", "3"],
    )
    assert spec.nnodes == NodeRange(2, 4)
    assert (spec.memory_bytes, spec.shm_bytes) == (64 * 2**30, 16 * 2**30)
    assert (spec.checkpoint, spec.deadline_s, spec.ttl_s) == ("results", 3600, 0)
    assert spec.tolerations == (
        Toleration("dedicated", "ml", "NoSchedule"),
        Toleration("spot", None, None),
    )
    assert spec.env == {"A": "b=c", "EMPTY": ""}
    assert spec.arguments == ("--epochs", "3")


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("name", "Demo"),
        ("name", "-demo"),
        ("name", "a" * 64),
        ("name", "de.mo"),
        ("image", "two words"),
        ("image", "muster@sha256:12"),
        ("nnodes", "0"),
        ("nnodes", "4:2"),
        ("nnodes", "1000000000"),
        ("nnodes", "two"),
        ("nproc_per_node", "0"),
        ("nproc_per_node", "-1"),
        ("nproc_per_node", "1e9"),
        ("kind", "pod"),
        ("kubernetes", "1.20"),
        ("namespace", "kube_system"),
        ("code", "git"),
        ("memory", "lots"),
        ("checkpoint", "results"),
        ("checkpoint", "pvc:No_Claim"),
        ("deadline_s", "10"),
        ("max_restarts", "many"),
        ("env", ["9A=b"]),
        ("env", ["NO_VALUE"]),
        ("node_selector", ["a=b c"]),
        ("tolerations", ["a:Sometimes"]),
    ],
)
def test_a_value_that_does_not_fit_is_refused_by_its_flag(flag: str, value: object) -> None:
    error = refused(**{flag: value})
    assert error.what.startswith(f"--{flag.replace('_', '-')} is ")
    assert error.remedy.startswith("give ")


def test_a_fabric_that_is_not_known_is_refused() -> None:
    with pytest.raises(UnknownFabric, match="ib-shraed"):
        built(fabric="ib-shraed")


@pytest.mark.parametrize(
    ("flags", "flag"),
    [
        ({"name": "a" * 60, "nnodes": "1000"}, "--name"),
        ({"name": "a" * 56, "kind": "jobset"}, "--name"),
        ({"fabric": "efa-p5", "nproc_per_node": "16"}, "--nproc-per-node"),
        ({"fabric": "ib-shared", "cpu": True}, "--cpu"),
        ({"kind": "trainjob", "nnodes": "1:2"}, "--kind"),
        ({"topology": "a/b"}, "--topology"),
        ({"gang": True, "kubernetes": "1.36"}, "--gang"),
        ({"gang": True, "kind": "jobset"}, "--gang"),
        ({"gang": True, "queue": "team"}, "--gang"),
        ({"memory": "1g", "shm_size": "2g"}, "--shm-size"),
    ],
)
def test_values_that_do_not_go_together_are_refused(flags: dict[str, object], flag: str) -> None:
    assert refused(**flags).what.startswith(flag)


def test_the_longest_name_that_fits_is_taken() -> None:
    # demo-999 has four letters more than demo
    assert built(name="a" * 59, nnodes="1000").name == "a" * 59
    assert refused(name="a" * 60, nnodes="1000").remedy.startswith("give at most 59 letters")


# ---- files -------------------------------------------------------------------------------------


def test_a_toml_file_says_the_same_as_flags(tmp_path: Path) -> None:
    given = from_text(
        tmp_path,
        'name = "demo"\nimage = "muster:cpu"\nnnodes = 2\nnproc_per_node = 2\n'
        'node_selector = {a = "b"}\narguments = ["--x", "1"]\n\n[env]\nA = "b"\n',
    )
    spec = specs.build(given, FABRICS)
    assert spec == built(node_selector=["a=b"], env=["A=b"], arguments=["--x", "1"])


def test_a_yaml_file_says_the_same_as_flags(tmp_path: Path) -> None:
    given = from_text(
        tmp_path,
        'name: demo\nimage: muster:cpu\nnnodes: "2:4"\nnproc_per_node: 2\nenv: {A: b}\n',
        "job.yaml",
    )
    assert specs.build(given, FABRICS) == built(nnodes="2:4", env=["A=b"])


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        ("job.toml", 'name = "demo"\nnodes = 2\n', 2),
        ("job.yaml", "name: demo\n\nnodes: 2\n", 3),
    ],
)
def test_an_unknown_key_is_refused_by_its_line(
    tmp_path: Path, name: str, text: str, line: int
) -> None:
    with pytest.raises(SpecWrong) as caught:
        from_text(tmp_path, text, name)
    assert caught.value.what == f"{tmp_path / name}:{line} is 'nodes'"
    assert "nproc_per_node" in caught.value.remedy


@pytest.mark.parametrize(
    ("key", "value", "line"),
    [
        ("nnodes", "true", 3),
        ("nnodes", "1.5", 3),
        ("nproc_per_node", '"two"', 3),
        ("kubernetes", "1.34", 3),
        ("cpu", '"yes"', 3),
        ("env", "{A = 1}", 3),
        ("arguments", '"--x 1"', 3),
        ("name", "7", 3),
    ],
)
def test_a_wrong_type_is_refused_by_its_line(
    tmp_path: Path, key: str, value: str, line: int
) -> None:
    rest = {k: v for k, v in LEAST.items() if k != key}
    given = from_text(tmp_path, f"# a job\n\n{key} = {value}\n")
    with pytest.raises(SpecWrong) as caught:
        specs.build({**specs.from_flags(rest), **given}, FABRICS)
    assert caught.value.what.startswith(f"{tmp_path / 'job.toml'}:{line} is ")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("job.toml", "name = \n"),
        ("job.yaml", "- name\n"),
        ("job.yaml", "name: a\n---\nname: b\n"),
        ("job.yaml", "a: 1\na: 2\n"),
        ("job.yaml", "\tname: a\n"),
        ("job.yaml", ""),
    ],
)
def test_a_file_that_is_no_mapping_is_refused(tmp_path: Path, name: str, text: str) -> None:
    with pytest.raises(WrongInput):
        from_text(tmp_path, text, name)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecWrong) as caught:
        specs.from_file(tmp_path / "none.toml")
    assert "No such file" in caught.value.remedy
