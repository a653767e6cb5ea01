"""Open each notebook in JupyterLab under headless Chromium, run it, and look at it in two widths.

make test-browser [NOTEBOOKS="notebooks/00_paged_kv_cache.ipynb ..."]

A fault is a cell that ends in an error, SILENT seconds in which a running notebook shows nothing
new, an output or a text that is wider than the page, or a printed line that breaks because it is.
Screenshots go to figures/local/browser, which git ignores: look at them. Lines of code that scroll
are counted, and are no fault.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from playwright.sync_api import Page, sync_playwright

ROOT = Path(__file__).parents[2]
PICTURES = ROOT / "figures/local/browser"
WIDTHS = (1200, 760)
HEIGHT = 1600
SILENT = 60.0  # seconds

# -- JupyterLab

SETTINGS = {
    # every cell is in the page, also those that are out of sight
    "notebook-extension/tracker": {"windowingMode": "none", "scrollPastEnd": False},
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
    "docmanager-extension/plugin": {"autosave": False},
}


class Lab(NamedTuple):
    address: str
    token: str

    def notebook(self, name: str) -> str:
        return f"{self.address}/doc/tree/notebooks/{name}?reset&token={self.token}"


@contextlib.contextmanager
def lab(folder: Path) -> Iterator[Lab]:
    """A JupyterLab on this machine alone, behind a token, in a copy of the project's files."""
    for name in ("notebooks", "figures", "docs"):
        ignored = shutil.ignore_patterns("local", ".ipynb_checkpoints")
        shutil.copytree(ROOT / name, folder / "work" / name, ignore=ignored)
    for name, values in SETTINGS.items():
        path = folder / "settings/@jupyterlab" / f"{name}.jupyterlab-settings"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(values), encoding="utf-8")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    token = secrets.token_hex(16)
    environment = os.environ | {
        "JUPYTERLAB_SETTINGS_DIR": str(folder / "settings"),
        "JUPYTERLAB_WORKSPACES_DIR": str(folder / "workspaces"),
        "JUPYTER_CONFIG_DIR": str(folder / "config"),
        "JUPYTER_TOKEN": token,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
    }
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root"]
    command += ["--ServerApp.ip=127.0.0.1", f"--port={port}", "--ServerApp.port_retries=0"]
    command += [f"--ServerApp.root_dir={folder / 'work'}", "--LabApp.expose_app_in_browser=True"]
    log = (folder / "log").open("w")
    server = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    try:
        served = Lab(f"http://127.0.0.1:{port}", token)
        _wait_for(served, server)
        yield served
    finally:
        server.terminate()
        server.wait()
        log.close()


def _wait_for(served: Lab, server: subprocess.Popen, seconds: float = 60) -> None:
    request = urllib.request.Request(
        f"{served.address}/api/status", headers={"Authorization": f"token {served.token}"}
    )
    end = time.monotonic() + seconds
    while server.poll() is None and time.monotonic() < end:
        with contextlib.suppress(urllib.error.URLError, ConnectionError):
            urllib.request.urlopen(request, timeout=5)
            return
        time.sleep(0.3)
    sys.exit("JupyterLab did not start")


# -- a notebook in the page

READY = """() => {
    const session = window.jupyterapp?.shell.currentWidget?.sessionContext;
    return session?.isReady && session.session?.kernel?.status === 'idle';
}"""

RUN = """() => {
    window.ended = null;
    const commands = window.jupyterapp.commands;
    commands.execute('notebook:run-all-cells').then(
        () => { window.ended = true; }, reason => { window.ended = String(reason); });
}"""

# What a reader sees change: prompts, texts, how many bytes of pictures there are.
SEEN = """() => {
    const cells = [...document.querySelectorAll('.jp-Notebook .jp-Cell')];
    const prompt = cell => cell.querySelector('.jp-InputPrompt')?.textContent ?? '';
    const shown = cells.map(cell => {
        const area = cell.querySelector('.jp-OutputArea');
        const pictures = [...(area?.querySelectorAll('img') ?? [])];
        return [prompt(cell), area?.textContent, pictures.map(picture => picture.src.length)];
    });
    return {
        running: cells.findIndex(cell => prompt(cell).includes('*')),
        shown: JSON.stringify(shown), ended: window.ended};
}"""

ERRORS = """() => window.jupyterapp.shell.currentWidget.content.widgets.flatMap((cell, number) => {
    const outputs = cell.model.sharedModel.outputs ?? [];
    return outputs.filter(output => output.output_type === 'error').map(
        error => `cell ${number} ends in ${error.ename}: ${error.evalue}`);
})"""

# Anything that sticks out of the notebook, or that must be scrolled sideways to be read.
WIDE = """() => {
    const kinds = {
        output: '.jp-OutputArea-output', text: '.jp-MarkdownOutput', code: '.cm-scroller'};
    const found = [];
    [...document.querySelectorAll('.jp-Notebook .jp-Cell')].forEach((cell, number) => {
        const edge = cell.getBoundingClientRect().right;
        for (const [kind, selector] of Object.entries(kinds)) {
            for (const area of cell.querySelectorAll(selector)) {
                let over = 0;
                for (const part of [area, ...area.querySelectorAll('*')]) {
                    const box = part.getBoundingClientRect();
                    const hidden = getComputedStyle(part).overflowX === 'visible'
                        ? 0 : part.scrollWidth - part.clientWidth;
                    over = Math.max(over, hidden, box.width ? box.right - edge : 0);
                }
                if (over > 1) found.push({kind, cell: number, size: Math.round(over)});
            }
        }
        for (const text of cell.querySelectorAll('.jp-OutputArea-output pre')) {
            const pen = document.createElement('canvas').getContext('2d');
            pen.font = getComputedStyle(text).font;
            const longest = Math.max(...text.textContent.split('\\n').map(line => line.length));
            const fits = Math.floor(text.clientWidth / pen.measureText('0').width);
            if (longest > fits) found.push({kind: 'line', cell: number, size: longest});
        }
    });
    return found;
}"""


def open_notebook(page: Page, url: str) -> None:
    page.goto(url)
    page.wait_for_selector(".jp-Notebook .jp-CodeCell", timeout=60_000)
    # A notebook that is run before its kernel is there asks which kernel it should be.
    page.wait_for_function(READY, timeout=60_000)


def run_all(page: Page) -> list[str]:
    """Run all cells. Returns what went wrong: errors, and what was silent for too long."""
    page.evaluate(RUN)
    faults, shown, since, told = [], None, time.monotonic(), None
    while True:
        seen = page.evaluate(SEEN)
        now = time.monotonic()
        if seen["shown"] != shown:
            shown, since, told = seen["shown"], now, None
        if seen["ended"] is not None:
            break
        if now - since > SILENT and told is None:
            told = seen["running"]
            faults.append(f"cell {told} shows nothing new for {SILENT:.0f} s")
        page.wait_for_timeout(500)
    if seen["ended"] is not True:
        faults.append(f"did not run: {seen['ended']}")
    return faults + page.evaluate(ERRORS)


def look(page: Page, name: str, width: int) -> tuple[list[str], int]:
    """Photograph a notebook from top to bottom. Returns its faults, and how much code scrolls."""
    page.set_viewport_size({"width": width, "height": HEIGHT})
    page.wait_for_timeout(1000)  # the page lays itself out anew
    wide = page.evaluate(WIDE)
    scroller = page.locator(".jp-WindowedPanel-outer").first
    whole = scroller.evaluate("panel => [panel.scrollHeight, panel.clientHeight]")
    for number, top in enumerate(range(0, whole[0], whole[1] - 40)):
        scroller.evaluate("(panel, top) => panel.scrollTo(0, top)", top)
        page.wait_for_timeout(150)
        page.screenshot(path=PICTURES / f"{name}_{width}_{number:02}.png")
    says = {
        "output": "an output is {} px too wide",
        "text": "a text is {} px too wide",
        "line": "a printed line of {} characters breaks",
    }
    faults = [
        f"cell {w['cell']}, at {width} px: {says[w['kind']].format(w['size'])}"
        for w in wide
        if w["kind"] in says
    ]
    return faults, sum(w["kind"] == "code" for w in wide)


def check(page: Page, served: Lab, path: Path) -> list[str]:
    page.set_viewport_size({"width": WIDTHS[0], "height": HEIGHT})
    open_notebook(page, served.notebook(path.name))
    start = time.monotonic()
    faults = run_all(page)
    seconds = time.monotonic() - start
    scrolling = []
    for width in WIDTHS:
        more, code = look(page, path.stem, width)
        faults += more
        scrolling.append(f"{code} at {width} px")
    print(f"{path.stem}: {len(faults)} faults, {seconds:.0f} s; code cells that scroll:", end=" ")
    print(", ".join(scrolling), flush=True)
    for fault in faults:
        print("   ", fault, flush=True)
    page.evaluate("() => window.jupyterapp.serviceManager.sessions.shutdownAll()")
    return faults


def main(paths: list[Path]) -> int:
    names = ("chromium", "chromium-browser", "google-chrome")
    chromium = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, names)), None)
    if chromium is None:
        sys.exit("no Chromium: apt-get install chromium, or name one with CHROMIUM=...")
    PICTURES.mkdir(parents=True, exist_ok=True)
    faults = []
    with tempfile.TemporaryDirectory() as folder, lab(Path(folder)) as served:
        with sync_playwright() as play:
            browser = play.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
            for path in paths:
                with browser.new_context() as context:
                    faults += check(context.new_page(), served, path)
            browser.close()
    print("screenshots:", PICTURES.relative_to(ROOT))
    return bool(faults)


if __name__ == "__main__":
    named = [Path(name).resolve() for name in sys.argv[1:]]
    sys.exit(main(named or sorted((ROOT / "notebooks").glob("*.ipynb"))))
