"""Debian's packages, with stand-ins of apt's names that note how they were called."""

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.unit.conftest import Recorder

from muster import apt
from muster.errors import PackagesNotInstalled

Program = Callable[[str, str], Path]


@pytest.fixture
def calls(program: Program, tmp_path: Path) -> Callable[[], list[str]]:
    """A distribution that has docker.io alone, whose lists cannot be updated."""
    program(
        "apt-get",
        f'echo "$DEBIAN_FRONTEND $*" >> {tmp_path}/calls\n'
        'case "$*" in update) exit 100;; *fails*) echo E: no; exit 100; esac',
    )
    program("apt-cache", '[ "$3" = docker.io ] && echo "Package: $3"')
    return lambda: (tmp_path / "calls").read_text().splitlines()


def test_what_the_distribution_has_is_installed_without_a_question(
    calls: Callable[[], list[str]], progress: Recorder
) -> None:
    apt.install(["docker.io", "docker-cli"], progress)
    update, install = calls()
    assert update == "noninteractive update"
    assert install.startswith("noninteractive ")
    assert install.endswith(" install --yes docker.io")
    assert progress.said == ["apt-get install docker.io"]


@pytest.mark.usefixtures("calls")
def test_a_failure_names_the_packages_and_apt_s_last_words(progress: Recorder) -> None:
    with pytest.raises(PackagesNotInstalled, match=r"install this fails\n  \| E: no"):
        apt.install(["this", "fails"], progress)
