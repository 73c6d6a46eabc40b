"""The source of nccl-tests at its pinned commit, from a repository or a folder of the user's.

The commit is the integrity check: git names every object by its hash, so whoever has that commit
has that source.
"""

import os
from pathlib import Path

from muster import cache, process
from muster.errors import NcclTestsUnreachable, NotThePinnedCommit
from muster.pins import NcclTests
from muster.progress import Progress

FETCH_LIMIT_S = 300.0


def fetch(pin: NcclTests, folder: Path | None, offline: bool, progress: Progress) -> Path:
    """The git directory that holds the pinned commit: the user's `folder`, else our own.

    Raises NotThePinnedCommit for a folder without it, NcclTestsUnreachable when no repository
    answers.
    """
    if folder is not None:
        found = _git(["-C", str(folder), "rev-parse", "--absolute-git-dir"])
        git_dir = Path(found.output.strip())
        if not found.ok or not _has(git_dir, pin.commit):
            raise NotThePinnedCommit(folder, pin.commit)
        return git_dir
    git_dir = cache.folder() / "nccl-tests.git"
    if _has(git_dir, pin.commit):
        return git_dir
    if offline:
        raise NcclTestsUnreachable(str(git_dir), "--offline, and it was not fetched before")
    progress.say(f"fetching nccl-tests {pin.tag} ({pin.commit[:12]})")
    git_dir.mkdir(parents=True, exist_ok=True)
    _git(["init", "--quiet", "--bare", str(git_dir)])
    fetched = _git(["--git-dir", str(git_dir), "fetch", "--depth", "1", pin.repository, pin.commit])
    if not fetched.ok or not _has(git_dir, pin.commit):
        fatal = [line for line in fetched.output.splitlines() if line.startswith("fatal: ")]
        why = (fatal or fetched.last_lines(1) or [fetched.ending])[0]
        raise NcclTestsUnreachable(pin.repository, why)
    return git_dir


def export(git_dir: Path, commit: str, into: Path) -> None:
    """Write the files of `commit` to the folder `into`; the repository itself stays as it is."""
    into.mkdir(parents=True)
    index = into.with_name(f"{into.name}.index")
    done = _git(
        ["--git-dir", str(git_dir), "--work-tree", str(into), "checkout", commit, "--", "."],
        GIT_INDEX_FILE=str(index),
    )
    index.unlink(missing_ok=True)
    if not done.ok:
        raise NcclTestsUnreachable(str(git_dir), done.last_lines(1)[0])


def _has(git_dir: Path, commit: str) -> bool:
    return _git(["--git-dir", str(git_dir), "cat-file", "-e", f"{commit}^{{tree}}"]).ok


def _git(words: list[str], **environment: str) -> process.Completed:
    # never a prompt for a password: an answer is wanted, also where nobody is at the terminal
    settings = {"GIT_TERMINAL_PROMPT": "0", **environment}
    try:
        return process.run(["git", *words], limit_s=FETCH_LIMIT_S, env={**os.environ, **settings})
    except FileNotFoundError:
        raise NcclTestsUnreachable("nccl-tests", "git is not installed") from None
