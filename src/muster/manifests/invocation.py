"""The torchrun that a container starts: found in its command, arguments and environment."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import PurePosixPath
from typing import Any

from muster.manifests import shell
from muster.manifests.documents import KeyPath, mappings, strings
from muster.manifests.shell import Word

# every flag of torchrun that takes a value, in PyTorch 2.9 to 2.15, by its destination
# https://github.com/pytorch/pytorch/blob/main/torch/distributed/run.py
_VALUED = """
    nnodes nproc_per_node rdzv_backend rdzv_endpoint rdzv_id rdzv_conf max_restarts
    monitor_interval start_method event_log_handler role log_dir redirects tee local_ranks_filter
    duplicate_stdout_filters duplicate_stderr_filters node_rank master_addr master_port local_addr
    logs_specs numa_binding signals_to_handle shutdown_timeout
"""
VALUED = frozenset(_VALUED.split())
BARE = frozenset(
    {"standalone", "module", "no_python", "run_path", "virtual_local_rank", "help", "use_env"}
)
_SHORT = {"-m": "module", "-r": "redirects", "-t": "tee", "-h": "help"}

_SHELLS = frozenset(("sh", "bash", "dash", "ash", "zsh"))
_PYTHON = re.compile(r"python(3(\.\d+)?)?")
# their arguments are text or names, not a command that they start
_TALKERS = frozenset({"echo", "printf", "which", "type", "command", "pip", "pip3", "grep", "test"})

# torchrun's defaults
DEFAULT_BACKEND = "static"
DEFAULT_MASTER_ADDR = "127.0.0.1"


class Program(StrEnum):
    """What starts the workers."""

    TORCHRUN = "torchrun"
    RUN_MODULE = "python -m torch.distributed.run"
    LAUNCHER = "python -m muster.launcher"
    LAUNCH_MODULE = "python -m torch.distributed.launch"


_MODULES = {
    "torch.distributed.run": Program.RUN_MODULE,
    "muster.launcher": Program.LAUNCHER,
    "torch.distributed.launch": Program.LAUNCH_MODULE,
}


@dataclass(frozen=True)
class Flag:
    """A flag's value as written, and where: a path in the document, a line in a script there."""

    value: str
    path: KeyPath
    row: int = 0


@dataclass(frozen=True)
class Invocation:
    """How a container starts torchrun; values are as written, $VARIABLES that are not known too.

    `flags` are by torchrun's own names, those given as PET_… in the environment among them.
    `complete` is False where a variable that is not known may hold further flags; `in_shell` says
    whether a shell reads the command, `pid1` whether torchrun itself is the first process.
    """

    program: Program
    flags: Mapping[str, Flag]
    script: str | None
    arguments: tuple[str, ...]
    path: KeyPath
    row: int = 0
    unknown: tuple[Flag, ...] = ()
    complete: bool = True
    in_shell: bool = False
    pid1: bool = True
    environment: Mapping[str, str] = field(default_factory=dict)

    def value(self, name: str) -> str | None:
        flag = self.flags.get(name)
        return None if flag is None else flag.value

    @property
    def nnodes(self) -> str | None:
        return self.value("nnodes")

    @property
    def nproc_per_node(self) -> str | None:
        return self.value("nproc_per_node")

    @property
    def rdzv_id(self) -> str | None:
        return self.value("rdzv_id")

    @property
    def rdzv_backend(self) -> str | None:
        return self.value("rdzv_backend")

    @property
    def rdzv_endpoint(self) -> str | None:
        return self.value("rdzv_endpoint")

    @property
    def rdzv_conf(self) -> dict[str, str]:
        pairs = (item.partition("=") for item in (self.value("rdzv_conf") or "").split(","))
        return {key.strip(): value.strip() for key, _, value in pairs if key.strip()}

    @property
    def node_rank(self) -> str | None:
        return self.value("node_rank")

    @property
    def master_addr(self) -> str | None:
        return self.value("master_addr")

    @property
    def master_port(self) -> str | None:
        return self.value("master_port")

    @property
    def local_addr(self) -> str | None:
        return self.value("local_addr")

    @property
    def max_restarts(self) -> str | None:
        return self.value("max_restarts")

    @property
    def shutdown_timeout(self) -> str | None:
        return self.value("shutdown_timeout")

    @property
    def standalone(self) -> bool:
        return "standalone" in self.flags


@dataclass(frozen=True)
class _Located:
    """A word of the container's argv and where it stands."""

    word: Word
    path: KeyPath

    @property
    def text(self) -> str:
        return self.word.text

    def with_text(self, text: str) -> "_Located":
        return _Located(Word(text, self.word.row, self.word.quoted), self.path)


def substitute(text: str, environment: Mapping[str, str]) -> str:
    """What Kubernetes makes of $(NAME) in command, args and values: $$ is one $, unknown stays.

    https://kubernetes.io/docs/tasks/inject-data-application/define-command-argument-container/
    """

    def value(match: re.Match[str]) -> str:
        if match[0] == "$$":
            return "$"
        return environment.get(match["name"], match[0])

    return re.sub(r"\$\$|\$\((?P<name>[^()]*)\)", value, text)


@dataclass(frozen=True)
class Reference:
    """A variable in a text: `shell` says whether it is written for a shell or for Kubernetes."""

    text: str
    name: str
    shell: bool


def references(text: str) -> Iterator[Reference]:
    """The variables that a text still holds."""
    for match in re.finditer(r"\$(?:\((?P<own>\w+)\)|\{?(?P<shell>\w+)[^}\s]*\}?)", text):
        yield Reference(match[0], match["own"] or match["shell"], match["own"] is None)


def find(
    container: Mapping[str, Any], path: KeyPath, environment: Mapping[str, str]
) -> Invocation | None:
    """The torchrun of a container that stands at `path`, or None.

    `environment` holds the container's variables as far as the manifest tells them.
    """
    argv = [
        _Located(Word(substitute(text, environment), 0, quoted=True), (*path, key, index))
        for key in ("command", "args")
        for index, text in enumerate(strings(container.get(key)))
    ]
    names = [entry.get("name") for entry in mappings(container.get("env"))]
    from_environment = {
        name: Flag(value, (*path, "env", names.index(f"PET_{name.upper()}")))
        if f"PET_{name.upper()}" in names
        else Flag(value, (*path, "envFrom"))
        for name, value in _pet(environment)
    }
    for command in _commands(argv, environment):
        found = _start(command.words)
        if found is None:
            continue
        program, first, rest = found
        given = _Given()
        given.read(rest)
        return Invocation(
            program=program,
            flags={**from_environment, **given.flags},
            script=given.script,
            arguments=given.arguments,
            path=first.path,
            row=first.word.row,
            unknown=tuple(given.unknown),
            complete=given.complete,
            in_shell=command.in_shell,
            pid1=command.pid1,
            environment=environment,
        )
    return None


def _pet(environment: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Torchrun's flags among the variables: each has an equal named PET_…."""
    for name, value in environment.items():
        flag = name.removeprefix("PET_").lower()
        if name.startswith("PET_") and (flag in VALUED or (flag in BARE and value != "0")):
            yield flag, value


@dataclass(frozen=True)
class _Command:
    """A command of a container: whether a shell reads it, and whether it takes PID 1."""

    words: list[_Located]
    in_shell: bool
    pid1: bool


def _commands(argv: list[_Located], environment: Mapping[str, str]) -> Iterator[_Command]:
    """Each command of a container, with the variables in it as far as they are known."""
    at = _script_at(argv)
    if at is None:
        yield _Command(argv, in_shell=False, pid1=True)
        return
    commands = shell.commands(argv[at].text)
    variables = {**environment, **_assigned(commands)}
    # a script that handles signals itself is taken to pass them on
    traps = any(command[0].text == "trap" for command in commands)
    for command in commands:
        words = [_Located(word, argv[at].path) for word in command]
        words = _positional(words, argv[at + 2 :], variables)
        execs = "exec" in {located.text for located in words}
        pid1 = execs or traps or len(commands) == 1
        inner = [located for located in words if located.text != "exec"]
        if _script_at(inner) is None:
            yield _Command(words, in_shell=True, pid1=pid1)
        else:
            for deeper in _commands(inner, variables):
                yield replace(deeper, pid1=pid1 and deeper.pid1)


def _script_at(argv: Sequence[_Located]) -> int | None:
    """Where the script of `sh -c SCRIPT` stands; options may come before and after the -c."""
    texts = [located.text for located in argv]
    if not texts:
        return None
    at = 1 if PurePosixPath(texts[0]).name != "env" else 2
    if PurePosixPath(texts[at - 1 : at][0]).name not in _SHELLS:
        return None
    seen = False
    while at < len(texts):
        text = texts[at]
        if not text.startswith("-"):
            return at if seen else None
        seen = seen or re.fullmatch(r"-[a-z]*c[a-z]*", text) is not None
        at += 2 if re.fullmatch(r"-[a-z]*o", text) else 1
    return None


def _assigned(commands: Sequence[shell.Command]) -> dict[str, str]:
    """The variables that a script gives one value only."""
    values: dict[str, set[str]] = {}
    for command in commands:
        for name, value in shell.assignments(command).items():
            values.setdefault(name, set()).add(value)
    return {name: value for name, (value, *others) in values.items() if not others}


def _positional(
    words: list[_Located], positional: Sequence[_Located], variables: Mapping[str, str]
) -> list[_Located]:
    """The words with "$@" replaced by what follows the script, and variables by their values."""
    found: list[_Located] = []
    for located in words:
        if located.text in {"$@", "${@}", "$*"}:
            found += positional
        elif shell.is_variable(located.word) and shell.expand(located.text, variables) != (
            located.text
        ):
            text = shell.expand(located.text, variables)
            found += [located.with_text(part) for part in text.split()]
        else:
            found.append(located.with_text(shell.expand(located.text, variables)))
    return found or words


def _start(words: Sequence[_Located]) -> tuple[Program, _Located, Sequence[_Located]] | None:
    """The program, its word and its arguments, where the command starts torchrun."""
    names = [PurePosixPath(located.text).name for located in words]
    if names and names[0] in _TALKERS:
        return None
    for at, name in enumerate(names):
        if name == "torchrun":
            return Program.TORCHRUN, words[at], words[at + 1 :]
        if _PYTHON.fullmatch(name):
            module = _module_at([located.text for located in words], at + 1)
            if module is not None and words[module].text in _MODULES:
                return _MODULES[words[module].text], words[at], words[module + 1 :]
    return None


def _module_at(texts: Sequence[str], at: int) -> int | None:
    """Where NAME of `python -m NAME` stands; Python's own options may come before."""
    while at < len(texts) and texts[at].startswith("-"):
        if texts[at].endswith("m") and not texts[at].startswith("--"):
            return at + 1 if at + 1 < len(texts) else None
        at += 2 if texts[at] in {"-X", "-W"} else 1
    return None


class _Given:
    """Torchrun's command line, read as its own parser does."""

    def __init__(self) -> None:
        self.flags: dict[str, Flag] = {}
        self.unknown: list[Flag] = []
        self.script: str | None = None
        self.arguments: tuple[str, ...] = ()
        self.complete = True

    def read(self, words: Sequence[_Located]) -> None:
        at = 0
        while at < len(words):
            located = words[at]
            if shell.is_variable(located.word) or located.text.startswith("${"):
                self.complete = False
                at += 1
            elif located.text.startswith("-") and located.text != "--":
                at += self._flag(located, words[at + 1 : at + 2])
            else:
                at += located.text == "--"
                self.script = words[at].text if at < len(words) else None
                self.arguments = tuple(word.text for word in words[at + 1 :])
                return

    def _flag(self, located: _Located, following: Sequence[_Located]) -> int:
        """Reads one flag; how many words it took."""
        spelled, equals, value = located.text.partition("=")
        name = _destination(spelled)
        row = located.word.row
        if name in BARE:
            self.flags[name] = Flag("1", located.path, row)
            return 1
        if name is None:
            self.unknown.append(Flag(spelled, located.path, row))
            takes = not equals and following and not following[0].text.startswith("-")
            return 2 if takes and not following[0].text.endswith(".py") else 1
        if equals:
            self.flags[name] = Flag(value, located.path, row)
            return 1
        if spelled in _SHORT or spelled.startswith("--"):
            if following:
                self.flags[name] = Flag(following[0].text, following[0].path, following[0].word.row)
            return 2
        # -r3
        self.flags[name] = Flag(spelled[2:], located.path, row)
        return 1


def _destination(spelled: str) -> str | None:
    """The flag that argparse takes it for: whole, with - or _, or a beginning that is unique."""
    if not spelled.startswith("--"):
        return _SHORT.get(spelled[:2])
    found = {
        name
        for name in VALUED | BARE
        for long in (f"--{name}", f"--{name.replace('_', '-')}")
        if long.startswith(spelled)
    }
    whole = spelled.removeprefix("--").replace("-", "_")
    if whole in found:
        return whole
    return found.pop() if len(found) == 1 else None
