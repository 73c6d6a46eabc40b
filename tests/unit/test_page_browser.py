"""The page in a real browser: it loads from disk, fits a phone and a desktop, and runs nothing."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from tests.unit.dossiers import cluster, dossier, ill, reworded

from muster.dossier import Dossier
from muster.page.page import page

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
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

pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="needs Chromium: apt-get install chromium, on Debian"
)


def browsed(folder: Path, *flags: str) -> str:
    assert CHROMIUM is not None
    argv = [
        *(CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"),
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
def test_the_page_fits_and_is_inert(tmp_path: Path, found: Dossier, width: int) -> None:
    (tmp_path / "page.html").write_bytes(page(found))
    look = tmp_path / "look.html"
    look.write_text(LOOK.replace("WIDTH", str(width)))
    told = re.search(r"<pre>(.*)</pre>", browsed(tmp_path, "--dump-dom", look.as_uri()))
    assert told is not None
    seen = json.loads(told[1].replace("&gt;", ">").replace("&lt;", "<").replace("&amp;", "&"))
    assert seen["title"] == f"Smoke report: {found.verdict}"
    assert seen["scroll"] <= width
    assert seen["beyond"] == []
    assert seen["loaded"] == 0
    assert min(seen["texts"]) >= 10


def test_a_picture_of_it_can_be_taken(tmp_path: Path) -> None:
    (tmp_path / "page.html").write_bytes(page(ill()))
    picture = tmp_path / "page.png"
    address = (tmp_path / "page.html").as_uri()
    browsed(tmp_path, f"--window-size={DESKTOP},1600", f"--screenshot={picture}", address)
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
