"""The page of the benchmarks: whole in itself, and readable on a phone."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from bench.__main__ import main

pytest.importorskip("matplotlib", reason="the extra `bench`")
BROWSER = next(filter(None, map(shutil.which, ("chromium", "google-chrome", "chrome"))), None)
in_a_browser = pytest.mark.skipif(BROWSER is None, reason="needs chromium")
RUNS = {
    "kernels": ["--operations", "swiglu", "verify_matmul"],
    "cycle": ["--context", "32", "64"],
    "e2e": ["--max-tokens", "8", "--peers"],
    "memory": ["--shape", "tiny"],
}


@pytest.fixture(scope="module")
def documents(tmp_path_factory):
    """Files of a run of each command; in `e2e` a peer that did not run is put in."""
    folder = tmp_path_factory.mktemp("documents")
    for command, more in RUNS.items():
        assert main([command, "--quick", "--json", *more, "--save", str(folder)]) == 0
    (path,) = folder.glob("e2e-*.json")
    document = json.loads(path.read_text("utf-8"))
    document["results"].append({"contender": "dflash-mlx", "why": "<no> such & such"})
    path.write_text(json.dumps(document), "utf-8")
    return sorted(folder.glob("*.json"))


@pytest.fixture(scope="module")
def page(documents):
    output = documents[0].parent / "report.html"
    assert main(["report", *map(str, documents), "--output", str(output)]) == 0
    return output


def test_the_page_has_every_command_figure_and_reason(page, documents):
    text = page.read_text("utf-8")
    assert text.count("<figure>") == text.count("<svg") == 7
    for path in documents:
        command = json.loads(path.read_text("utf-8"))["command"]
        assert command in text.replace("&#x27;", "'")
    assert "&lt;no&gt; such &amp; such" in text and "Expected, not measured on text" in text


def test_the_page_names_no_other_file(page):
    text = page.read_text("utf-8")
    links = re.findall(r"""(?:src|href|url)\s*[=(]\s*["']?([^"')\s>]+)""", text)
    assert links and all(link.startswith("#") for link in links), links
    assert "<script" not in text and "@import" not in text


def test_a_picture_of_each_machine_lies_beside_it(page):
    (picture,) = page.parent.glob("report-*.png")
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 50_000


def test_two_machines_have_a_section_each(documents, tmp_path):
    document = json.loads(documents[0].read_text("utf-8"))
    document["machine"] |= {"backend": "cuda", "device": "NVIDIA H200"}
    other = tmp_path / "other.json"
    other.write_text(json.dumps(document), "utf-8")
    output = tmp_path / "report.html"
    given = ["report", str(documents[0]), str(other), "--output", str(output)]
    assert main(given) == 0
    text = output.read_text("utf-8")
    assert text.count("<h2>") == 2 and "<h2>NVIDIA H200</h2>" in text
    assert (tmp_path / "report-nvidia-h200.png").exists()


def test_what_is_no_document_is_refused(tmp_path):
    path = tmp_path / "other.json"
    for content in ("[]", "{}", '{"benchmark": "kernels", "schema": 2}', "nonsense"):
        path.write_text(content, "utf-8")
        with pytest.raises(SystemExit, match=r"expected a result of these benchmarks in .*other"):
            main(["report", str(path), "--output", str(tmp_path / "report.html")])


def framed(page: Path, folder: Path, width: int) -> dict[str, int]:
    """The page in a frame of so many pixels: its widths, and the files that it asked for."""
    frame = page.parent / f"frame-{os.getpid()}.html"
    frame.write_text(
        f'<iframe src="{page.name}" style="width:{width}px;height:800px;border:0"></iframe>'
        "<script>onload = () => { const frame = document.querySelector('iframe');"
        "const page = frame.contentDocument.documentElement;"
        "document.title = JSON.stringify({wide: page.scrollWidth, seen: page.clientWidth,"
        "asked: frame.contentWindow.performance.getEntriesByType('resource').length}) }</script>",
        "utf-8",
    )
    command = [BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    command += ["--disable-background-networking", "--host-resolver-rules=MAP * ~NOTFOUND"]
    command += ["--allow-file-access-from-files", "--virtual-time-budget=3000"]
    command += [f"--user-data-dir={folder / 'profile'}", "--window-size=1000,900"]
    done = subprocess.run(
        [*command, frame.as_uri()], capture_output=True, text=True, timeout=120, check=True
    )
    found: dict[str, int] = json.loads(re.findall(r"<title>(.*?)</title>", done.stdout)[0])
    return found


@in_a_browser
@pytest.mark.parametrize("width", [390, 794])  # a phone; A4 at 96 dots an inch
def test_the_page_fits_its_screen_and_asks_for_nothing(page, tmp_path, width):
    """Tables scroll in their own place. The control asks for a picture and is too wide."""
    found = framed(page, tmp_path, width)
    assert found["wide"] <= found["seen"] <= width and found["asked"] == 0
    control = tmp_path / "control.html"
    control.write_text(
        '<p style="width:900px">wide</p><img src="http://control.invalid/picture.png">', "utf-8"
    )
    found = framed(control, tmp_path, width)
    assert found["wide"] > found["seen"] and found["asked"] == 1
