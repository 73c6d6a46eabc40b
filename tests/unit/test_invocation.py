from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.manifests import invocation, shell
from muster.manifests.invocation import Invocation, Program


def find(
    *command: str, args: Sequence[str] = (), env: Mapping[str, str] | None = None
) -> Invocation | None:
    env = env or {}
    entries = [{"name": name, "value": value} for name, value in env.items()]
    container = {"command": list(command), "args": list(args), "env": entries}
    return invocation.find(container, ("spec", "containers", 0), env)


def found(
    *command: str, args: Sequence[str] = (), env: Mapping[str, str] | None = None
) -> Invocation:
    it = find(*command, args=args, env=env)
    assert it is not None
    return it


def script(text: str, *positional: str, env: Mapping[str, str] | None = None) -> Invocation:
    return found("sh", "-c", args=[text, *positional], env=env)


# ---- where torchrun is ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "program"),
    [
        (["torchrun", "train.py"], Program.TORCHRUN),
        (["/opt/venv/bin/torchrun", "train.py"], Program.TORCHRUN),
        (["python", "-m", "torch.distributed.run", "train.py"], Program.RUN_MODULE),
        (["python3.11", "-u", "-X", "dev", "-m", "torch.distributed.run", "a"], Program.RUN_MODULE),
        (["python", "-um", "muster.launcher", "train.py"], Program.LAUNCHER),
        (["python3", "-m", "torch.distributed.launch", "train.py"], Program.LAUNCH_MODULE),
        (["numactl", "--all", "torchrun", "train.py"], Program.TORCHRUN),
        (["tini", "--", "torchrun", "train.py"], Program.TORCHRUN),
        (["bash", "-c", "torchrun train.py"], Program.TORCHRUN),
        (["/bin/bash", "-euxo", "pipefail", "-c", "torchrun train.py"], Program.TORCHRUN),
        (["bash", "-c", "-e", "torchrun train.py"], Program.TORCHRUN),
        (["bash", "-lc", "--", "torchrun train.py"], Program.TORCHRUN),
        (["/usr/bin/env", "bash", "-c", "torchrun train.py"], Program.TORCHRUN),
        (["sh", "-c", "bash -c 'torchrun train.py'"], Program.TORCHRUN),
        (["sh", "-c", "cd /x && OMP_NUM_THREADS=1 exec torchrun train.py"], Program.TORCHRUN),
        (["sh", "-c", "if true; then torchrun train.py; fi"], Program.TORCHRUN),
    ],
)
def test_it_is_found_however_it_is_started(command: list[str], program: Program) -> None:
    assert found(*command).program is program


@pytest.mark.parametrize(
    "command",
    [
        [],
        ["python", "train.py"],
        ["python", "-c", "import torch"],
        ["python", "-m"],
        ["sh", "-c", "echo torchrun; pip install torchrun; which torchrun"],
        ["sh", "-c", "# torchrun train.py"],
        ["sh", "-c"],
        ["sh", "torchrun.sh"],
        ["sh", "-c", "echo 'torchrun train.py'"],
    ],
)
def test_what_only_speaks_of_it_is_none(command: list[str]) -> None:
    assert find(*command) is None


@pytest.mark.parametrize(
    ("command", "pid1"),
    [
        (["torchrun", "a.py"], True),
        (["sh", "-c", "torchrun a.py"], True),
        (["sh", "-c", "cd /x; exec torchrun a.py"], True),
        (["sh", "-c", "cd /x; torchrun a.py"], False),
        (["sh", "-c", "torchrun a.py; echo done"], False),
        (["sh", "-c", "trap 'kill $!' TERM; torchrun a.py & wait"], True),
        (["sh", "-c", "exec bash -c 'cd /x; torchrun a.py'"], False),
        (["sh", "-c", "cd /x; exec bash -c 'torchrun a.py'"], True),
    ],
)
def test_it_has_pid_1_unless_a_shell_stays_in_front(command: list[str], pid1: bool) -> None:
    assert found(*command).pid1 is pid1
    assert found(*command).in_shell is (command[0] == "sh")


# ---- flags ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spelled",
    [
        ["--rdzv-id=demo"],
        ["--rdzv_id=demo"],
        ["--rdzv-id", "demo"],
        ["--rdzv_id", "demo"],
        ["--rdzv-i", "demo"],
    ],
)
def test_a_flag_may_be_spelled_in_every_way_that_torchrun_takes(spelled: list[str]) -> None:
    it = found("torchrun", *spelled, "train.py")
    assert (it.rdzv_id, it.script) == ("demo", "train.py")


def test_all_values_are_read() -> None:
    it = found(
        *("torchrun", "--nnodes=2:4", "--nproc-per-node", "8", "--rdzv-backend=c10d"),
        *("--rdzv-endpoint", "a:1", "--rdzv-conf", "is_host=true, read_timeout=900,"),
        *("--node-rank=0", "--master-addr=m", "--master-port=1", "--local-addr=l"),
        *("--max-restarts=3", "--shutdown-timeout=60", "--standalone", "-r", "3", "-t3"),
        *("train.py", "--nnodes=9", "--", "x"),
    )
    assert (it.nnodes, it.nproc_per_node, it.rdzv_backend) == ("2:4", "8", "c10d")
    assert (it.rdzv_endpoint, it.node_rank, it.master_addr) == ("a:1", "0", "m")
    assert it.rdzv_conf == {"is_host": "true", "read_timeout": "900"}
    assert (it.master_port, it.local_addr, it.max_restarts) == ("1", "l", "3")
    assert (it.shutdown_timeout, it.standalone) == ("60", True)
    assert (it.value("redirects"), it.value("tee")) == ("3", "3")
    assert (it.script, it.arguments) == ("train.py", ("--nnodes=9", "--", "x"))


@pytest.mark.parametrize(
    ("words", "script_", "arguments"),
    [
        (["-m", "train.main", "--lr", "1"], "train.main", ("--lr", "1")),
        (["--module", "train.main"], "train.main", ()),
        (["--no-python", "./run.sh"], "./run.sh", ()),
        (["--", "train.py"], "train.py", ()),
        (["--nnodes=2"], None, ()),
        (["--"], None, ()),
    ],
)
def test_the_script_is_the_first_word_that_is_no_flag(
    words: list[str], script_: str | None, arguments: tuple[str, ...]
) -> None:
    it = found("torchrun", *words)
    assert (it.script, it.arguments) == (script_, arguments)


def test_unknown_flags_are_kept_and_do_not_hide_the_script() -> None:
    it = found("torchrun", "--rdvz-id", "x", "--nodes=2", "--quiet", "train.py")
    assert [flag.value for flag in it.unknown] == ["--rdvz-id", "--nodes", "--quiet"]
    assert it.script == "train.py"
    assert it.unknown[0].path == ("spec", "containers", 0, "command", 1)


def test_variables_named_pet_are_flags_too_and_weaker() -> None:
    env = {"PET_NNODES": "4", "PET_RDZV_ID": "env", "PET_STANDALONE": "0", "PET_X": "1"}
    it = found("torchrun", "--rdzv-id=flag", "a.py", env=env)
    assert (it.nnodes, it.rdzv_id, it.standalone) == ("4", "flag", False)
    assert it.flags["nnodes"].path == ("spec", "containers", 0, "env", 0)


def test_a_flag_knows_its_place() -> None:
    it = found("torchrun", args=["--nnodes", "2", "a.py"])
    assert it.flags["nnodes"].path == ("spec", "containers", 0, "args", 1)
    text = "set -e\nexec torchrun \\\n  --nnodes 2 \\\n  --rdzv-id=x a.py\n"
    it = script(text)
    assert it.path == it.flags["nnodes"].path == ("spec", "containers", 0, "args", 0)
    assert (it.row, it.flags["nnodes"].row, it.flags["rdzv_id"].row) == (1, 2, 3)


# ---- variables -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("$(A)-$(B)", "1-$(B)"),
        ("$$(A)", "$(A)"),
        ("$A ${A}", "$A ${A}"),
        ("$$$(A)", "$1"),
        ("$(hostname -f)", "$(hostname -f)"),
    ],
)
def test_kubernetes_expands_its_own_variables_only(text: str, expected: str) -> None:
    assert invocation.substitute(text, {"A": "1"}) == expected


@pytest.mark.parametrize(
    ("text", "nnodes"),
    [
        ("torchrun --nnodes=$N a.py", "4"),
        ("torchrun --nnodes=${N} a.py", "4"),
        ("torchrun --nnodes=$(N) a.py", "4"),
        ("torchrun --nnodes=${M:-2} a.py", "2"),
        ("torchrun --nnodes=$M a.py", "$M"),
        ("N=8; torchrun --nnodes=$N a.py", "8"),
        ("export N=8\ntorchrun --nnodes $N a.py", "8"),
        ("M=1; [ $X ] && M=2; torchrun --nnodes=$M a.py", "$M"),
        ('ARGS="--nnodes=3 --standalone"; torchrun $ARGS a.py', "3"),
    ],
)
def test_a_script_sees_the_environment_and_what_it_assigns(text: str, nnodes: str) -> None:
    it = script(text, env={"N": "4"})
    assert (it.nnodes, it.script, it.complete) == (nnodes, "a.py", True)


def test_a_variable_that_may_hold_flags_makes_it_incomplete() -> None:
    it = script("torchrun --nnodes=2 $MORE ${EVEN:+--standalone} a.py")
    assert (it.complete, it.nnodes, it.script) == (False, "2", "a.py")


def test_the_words_behind_the_script_of_sh_take_the_place_of_its_arguments() -> None:
    it = script('exec torchrun --rdzv-id=x "$@"', "sh", "--nnodes=2", "a.py", "--lr", "1")
    assert (it.nnodes, it.script, it.arguments) == ("2", "a.py", ("--lr", "1"))
    assert it.flags["nnodes"].path == ("spec", "containers", 0, "args", 2)


IS_HOST = "is_host=$([ $JOB_COMPLETION_INDEX = 0 ] && echo true || echo false)"


@pytest.mark.parametrize("quote", ["", '"'])
def test_a_command_in_a_value_stays_whole(quote: str) -> None:
    it = script(f"exec torchrun --nnodes=2 --rdzv-conf {quote}{IS_HOST},x=1{quote} a.py 2>&1")
    assert it.rdzv_conf == {"is_host": IS_HOST.partition("=")[2], "x": "1"}
    assert (it.script, it.arguments) == ("a.py", ())


# ---- the shell -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a b; c&&d||e|f &g", [["a", "b"], ["c"], ["d"], ["e"], ["f"], ["g"]]),
        ("a 'b c' \"d e\" f\\ g", [["a", "b c", "d e", "f g"]]),
        ("a \\\n b # c\nd", [["a", "b"], ["d"]]),
        ("a > x 2>&1 >>y b <z", [["a", "b"]]),
        ("a $(b 'c)' \"d)\" (e) ) f", [["a", "$(b 'c)' \"d)\" (e) )", "f"]]),
        ('a "$(b "c d")" `e f`', [["a", '$(b "c d")', "`e f`"]]),
        ("a ${B:-c d} e", [["a", "${B:-c d}", "e"]]),
        ("a 'b", [["a", "b"]]),
        ('a "b', [["a", "b"]]),
        ("a $(b", [["a", "$(b"]]),
        ("a \"\\$b \\x 'c'\"", [["a", "$b \\x 'c'"]]),
        ("(a; b)", [["a"], ["b"]]),
        ("a#b", [["a#b"]]),
        ("", []),
    ],
)
def test_a_script_is_split_as_a_shell_does(text: str, expected: list[list[str]]) -> None:
    commands = shell.commands(text)
    assert [[word.text for word in command] for command in commands] == expected


@given(st.text(alphabet="ab$(){}'\"\\`#&|;<> \n=", max_size=40))
def test_any_script_is_split_to_its_end(text: str) -> None:
    rows = [word.row for command in shell.commands(text) for word in command]
    assert rows == sorted(rows)
    assert all(0 <= row <= text.count("\n") for row in rows)


@given(st.lists(st.sampled_from(["torchrun", "sh", "-c", "--nnodes", "$@", "$X", "a", "-m", "--"])))
def test_any_command_is_read(words: list[str]) -> None:
    it = find(*words)
    assert it is None or it.program is Program.TORCHRUN
