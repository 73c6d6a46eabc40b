"""The page in a real browser: it loads from disk, fits a phone and a desktop, and runs nothing."""

import fcntl
import json
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
from tests.unit.dossiers import cluster, dossier, ill, reworded

from muster import apt, process
from muster.dossier import Dossier
from muster.page.page import page

# with the browser to install first, or to wait for
pytestmark = pytest.mark.timeout(1200)

PACKAGES = ("chromium", "fonts-dejavu-core")
PHONE, DESKTOP = 390, 1280
HOSTILE = '<script>document.title = "ran"</script><img src=x onerror="document.title = `ran`">'
# the page's own policy forbids scripts: another page looks into it
LOOK = """<!doctype html><body style="margin:0"><script>
const seen = {};
function look(frame) {
  const page = frame.contentDocument, root = page.documentElement;
  page.querySelectorAll("details").forEach((each) => each.open = true);
  const beyond = [...page.querySelectorAll("main *")].filter(
    (each) => each.getClientRects().length && each.getBoundingClientRect().right > WIDTH + 0.5);
  seen.scroll = root.scrollWidth;
  seen.beyond = beyond.map((each) => each.outerHTML.slice(0, 200));
  seen.title = page.title;
  seen.texts = [...page.querySelectorAll("svg.plot text")].map(
    (each) => each.getBoundingClientRect().height);
  seen.loaded = frame.contentWindow.performance.getEntriesByType("resource").length;
  const told = document.createElement("pre");
  told.textContent = JSON.stringify(seen);
  document.body.append(told);
}
</script><iframe src="page.html" style="width:WIDTHpx;height:900px;border:0"
  onload="look(this)"></iframe>"""


@pytest.fixture(scope="session")
def chromium() -> str:
    """The browser. Where it is missing, root on a Debian installs it, one worker at a time."""
    with Path(tempfile.gettempdir(), "muster-chromium.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if installed() is None and os.geteuid() == 0 and apt.is_debian():
            install()
    found = installed()
    if found is None:
        pytest.skip("needs Chromium; on Debian: apt-get install chromium fonts-dejavu-core")
    return found


def installed() -> str | None:
    return shutil.which("chromium") or shutil.which("google-chrome")


def install() -> None:
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    # another apt-get may be at work on a new machine: wait for it
    patient = ("apt-get", "-o", "DPkg::Lock::Timeout=300")
    for words in (("update",), ("install", "--yes", "--no-install-recommends", *PACKAGES)):
        done = process.run([*patient, *words], env=environment, limit_s=500)
        assert done.ok, "\n".join(done.last_lines())


def browsed(chromium: str, folder: Path, *flags: str) -> str:
    argv = [
        # as root, and in containers, it has no sandbox, and few of them have a large /dev/shm
        *(chromium, "--headless=new", "--no-sandbox", "--disable-dev-shm-usage"),
        *("--disable-gpu", "--hide-scrollbars"),
        # one file may look into another here, which pages from the network may not
        "--allow-file-access-from-files",
        *(f"--user-data-dir={folder / 'profile'}", "--virtual-time-budget=5000"),
        *flags,
    ]
    done = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=120)
    return done.stdout


@pytest.mark.parametrize("width", [PHONE, DESKTOP])
@pytest.mark.parametrize(
    "found",
    [dossier(), ill(), cluster(4), reworded(ill(), lambda text: f"{HOSTILE}{'x' * 300} {text}")],
    ids=["well", "ill", "cluster", "hostile"],
)
def test_the_page_fits_and_is_inert(
    chromium: str, tmp_path: Path, found: Dossier, width: int
) -> None:
    (tmp_path / "page.html").write_bytes(page(found))
    look = tmp_path / "look.html"
    look.write_text(LOOK.replace("WIDTH", str(width)))
    told = re.search(r"<pre>(.*)</pre>", browsed(chromium, tmp_path, "--dump-dom", look.as_uri()))
    assert told is not None
    seen = json.loads(told[1].replace("&gt;", ">").replace("&lt;", "<").replace("&amp;", "&"))
    assert seen["title"] == f"Smoke report: {found.verdict}"
    assert seen["scroll"] <= width
    assert seen["beyond"] == []
    assert seen["loaded"] == 0
    assert min(seen["texts"]) >= 10


def test_a_picture_of_it_can_be_taken(chromium: str, tmp_path: Path) -> None:
    (tmp_path / "page.html").write_bytes(page(ill()))
    picture = tmp_path / "page.png"
    address = (tmp_path / "page.html").as_uri()
    flags = (f"--window-size={DESKTOP},1600", f"--screenshot={picture}")
    browsed(chromium, tmp_path, *flags, address)
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
