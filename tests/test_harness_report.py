"""The report: what it says, that it is self-contained, and, in a real browser, how it behaves."""

from __future__ import annotations

import base64
import itertools
import json
import math
import re
import shutil
import subprocess
import time
import urllib.request
from pathlib import Path

import numpy as np
import pytest
from harness_support import write_hellaswag, write_run

from harness import baseline as baselines
from harness import report
from harness.__main__ import main


def test_one_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run = write_run(tmp_path / "runs" / "first", val_loss=3.456789)
    write_hellaswag(run, acc_norm=0.2955)
    assert main(["report", "first"]) == 0
    assert capsys.readouterr().out.split() == ["runs/first/report.html", "runs/first/report.md"]
    page, text = (run / "report.html").read_text(), (run / "report.md").read_text()
    for content in (page, text):
        assert "3.4568" in content  # val loss
        assert "29.55%" in content  # HellaSwag, apart
        assert "my texts" in content  # the command, quoted
    # From its start and into a folder of its own: with --run-dir and --resume it would go back within this run.
    assert "python train_gpt2.py sample --seed 1 --data 'my texts'\n" in text
    assert text.index("3.4568") < text.index("## HellaSwag") < text.index("29.55%")
    assert "all 10,042 examples" in page
    # 95% interval: 0.2955 +- 1.96 * sqrt(p (1 - p) / n)
    half = 1.96 * math.sqrt(0.2955 * 0.7045 / 10042)
    assert f"{100 * (0.2955 - half):.2f}%" in page and f"{100 * (0.2955 + half):.2f}%" in page


def test_the_page_is_self_contained(tmp_path):
    run = write_run(tmp_path / "run")
    assert main(["report", str(run)]) == 0
    page = (run / "report.html").read_text()
    assert "<script" not in page
    assert not re.search(r"""(src|href)\s*=\s*["'](?!data:)""", page)
    assert "url(" not in page and "@import" not in page
    assert not re.search(r"https?://", page)


def test_names_and_values_are_escaped(tmp_path):
    run = write_run(tmp_path / "<script>alert(1)<")
    assert main(["report", str(run)]) == 0
    page = (run / "report.html").read_text()
    assert "<script" not in page and "&lt;script" in page


def test_curves_pass_through_the_rows(tmp_path):
    """Points of the drawn path, turned back into losses, are those of the metrics file."""
    run = report.load(write_run(tmp_path / "run", steps=100))
    plot = report.Plot("Validation loss", "val", "val_loss", report.plain)
    drawn = report.chart(plot, report.collect([run], plot, "tokens"), report.human_count, None)
    points = np.array([list(map(float, p.split())) for p in drawn["curves"][0]["path"][1:].split("L")])
    tokens, losses = run.column("val", "tokens"), run.column("val", "val_loss")
    np.testing.assert_allclose(points[:, 0] / 1000 * tokens[-1], tokens, atol=tokens[-1] / 5000)
    pad = 0.06 * (losses.max() - losses.min())
    low, high = losses.min() - pad, losses.max() + pad
    np.testing.assert_allclose(high - points[:, 1] / 1000 * (high - low), losses, atol=(high - low) / 5000)
    # ticks are where their labels say
    for tick in drawn["y_ticks"]:
        assert high - tick["at"] / 100 * (high - low) == pytest.approx(float(tick["text"]), abs=(high - low) / 5000)


def test_bins_keep_the_worst_gradient_and_the_mean_loss():
    x, y = np.arange(1, 20001.0), np.ones(20000)
    y[12345] = 99.0
    bx, by = report.bin_rows(x, y, "max")
    assert len(bx) == report.BINS and by.max() == 99.0 and bx[-1] == 20000
    _, means = report.bin_rows(x, y, "mean")
    assert means.max() == pytest.approx((49 + 99) / 50)
    assert np.all(np.diff(bx) > 0)


def test_a_resumed_step_counts_once(tmp_path):
    run = write_run(tmp_path / "run", steps=20)
    again = {"kind": "val", "step": 20, "tokens": 20480, "val_loss": 2.5, "train_s": 6.0, "val_s": 1.0}
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(again) + "\n")
    values = report.load(run).column("val", "val_loss")
    assert values[-1] == 2.5 and len(values) == 11


def test_a_run_that_is_still_going(tmp_path):
    run = write_run(tmp_path / "run")
    (run / "result.json").unlink()
    assert main(["report", str(run)]) == 0
    page = (run / "report.html").read_text()
    assert "still running" in page and "not measured" in page


def test_baseline_band_is_lowest_to_highest(tmp_path, monkeypatch):
    seeds = [write_run(tmp_path / f"seed{i}", seed=i, shift=0.1 * i) for i in range(3)]
    folder = tmp_path / "baselines"
    folder.mkdir()
    frozen = baselines.from_runs("three", [baselines.read_run(seed) for seed in seeds])
    baselines.write(frozen, folder, None)
    monkeypatch.setattr(baselines, "FOLDER", folder)
    monkeypatch.setattr(baselines.load, "__defaults__", (folder,))
    _, low, high, mean = report.baseline_band(baselines.load("three"))
    first, last = (
        report.load(seeds[0]).column("val", "val_loss"),
        report.load(seeds[2]).column("val", "val_loss"),
    )
    np.testing.assert_allclose(low, first)
    np.testing.assert_allclose(high, last)
    np.testing.assert_allclose(mean, first + 0.1)
    assert main(["report", str(seeds[0]), "--baseline", "three"]) == 0
    page = (seeds[0] / "report.html").read_text()
    assert 'class="band"' in page and "over 3 seeds" in page


def test_step_split_and_memory_from_a_profile(tmp_path):
    run = write_run(tmp_path / "run")
    parts = {"forward": 30.0, "backward": 60.0, "loader_wait": 0.0}
    memory = {"weights": 1_110_000_000, "activations": 23_000_000_000}
    content = {"schema": 1, "parts_ms": parts, "memory_bytes": memory, "sentence": "compute binds: 70% of the step"}
    (run / "profile.json").write_text(json.dumps(content))
    assert main(["report", str(run)]) == 0
    page = (run / "report.html").read_text()
    for text in ("60.00 ms", "width:50.0%", "loader wait", "compute binds: 70% of the step", "activations 23.00 GB"):
        assert text in page


def test_promotions_are_listed(tmp_path, monkeypatch):
    from harness import ledger

    run = write_run(tmp_path / "run")
    decision = {"kind": "decision", "date": "2026-12-01T04:00:00", "candidate": "parallel=fsdp2", "verdict": "rejected"}
    ledger.append(decision | {"reason": "memory <b>does not</b> bind"}, tmp_path / "ledger.jsonl")
    monkeypatch.setattr(ledger.read, "__defaults__", (tmp_path / "ledger.jsonl",))
    assert main(["report", str(run)]) == 0
    page = (run / "report.html").read_text()
    assert "parallel=fsdp2" in page and "rejected" in page and "memory &lt;b&gt;does not" in page


@pytest.mark.parametrize("argv", [["nowhere"], ["run", "--baseline", "none-such"], ["run", "--out", "no/folder/x.html"]])
def test_bad_input_is_one_line(argv, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "run")
    before = sorted(tmp_path.rglob("*"))
    assert main(["report", *argv]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ") and captured.err.count("\n") == 1
    assert sorted(tmp_path.rglob("*")) == before


def test_size_of_ten_long_runs(tmp_path):
    """Bins bound the page: it does not grow with the steps."""
    run = write_run(tmp_path / "run", steps=3000, recipe="speedrun")
    pages = [report.render("report.html.jinja", report.gather([report.load(run)] * n, None, 0)) for n in (1, 10)]
    assert len(pages[1]) < 2_000_000


# ------------------------------------------------------------------------------------ a real browser


class Browser:
    """Headless Chromium through chromedriver, by the W3C WebDriver protocol."""

    def __init__(self, folder: Path, width: int, dark: bool):
        driver = shutil.which("chromedriver")
        assert driver and shutil.which("chromium"), "install chromium and chromium-driver"
        port = None
        for _ in range(5):  # it picks a port twice, for IPv4 and IPv6, and gives up where the second is taken
            self.process = subprocess.Popen([driver, "--port=0"], stdout=subprocess.PIPE, text=True)
            assert self.process.stdout
            found = (re.search(r"successfully on port (\d+)", line) for line in self.process.stdout)
            if port := next((m[1] for m in found if m), None):
                break
        assert port, "chromedriver does not start"
        self.base = f"http://127.0.0.1:{port}/session"
        flags = [
            "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
            "--disable-sync",
            "--disable-background-networking", "--disable-component-update", f"--user-data-dir={folder}",
        ]  # fmt: skip
        options = {"args": flags, "binary": shutil.which("chromium")}
        wanted = {
            "goog:chromeOptions": options,
            "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"},
        }
        started = self.call("POST", "", {"capabilities": {"alwaysMatch": wanted}})
        self.base += f"/{started['sessionId']}"
        self.cdp(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=800,
            deviceScaleFactor=1,
            mobile=width < 500,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.cdp("Emulation.setEmulatedMedia", features=[scheme])

    def call(self, method: str, path: str, body: dict | None = None):
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.base + path, data, {"Content-Type": "application/json"}, method=method)
        with urllib.request.urlopen(request, timeout=60) as reply:
            return json.loads(reply.read())["value"]

    def cdp(self, command: str, **parameters):
        return self.call("POST", "/goog/cdp/execute", {"cmd": command, "params": parameters})

    def open(self, path: Path) -> float:
        """Seconds until the page is loaded and laid out."""
        started = time.perf_counter()
        self.call("POST", "/url", {"url": path.as_uri()})
        self.run("return document.body.offsetHeight")
        return time.perf_counter() - started

    def run(self, script: str):
        return self.call("POST", "/execute/sync", {"script": script, "args": []})

    def press_tab(self) -> None:
        for kind in ("keyDown", "keyUp"):
            self.cdp("Input.dispatchKeyEvent", type=kind, key="Tab", code="Tab", windowsVirtualKeyCode=9)

    def screenshot(self, path: Path) -> np.ndarray:
        from PIL import Image

        path.write_bytes(base64.b64decode(self.cdp("Page.captureScreenshot", captureBeyondViewport=True)["data"]))
        return np.asarray(Image.open(path).convert("RGB"))

    def log(self, kind: str) -> list[dict]:
        return self.call("POST", "/se/log", {"type": kind})

    def close(self) -> None:
        self.call("DELETE", "")
        self.process.terminate()
        self.process.wait()


@pytest.fixture(scope="module")
def ten_runs(tmp_path_factory) -> Path:
    """A report over ten runs of 20,000 steps."""
    root = tmp_path_factory.mktemp("ten")
    runs = [write_run(root / f"seed{i}", steps=20_000, seed=i, shift=0.05 * i, recipe="speedrun") for i in range(10)]
    write_hellaswag(runs[0])
    assert main(["report", *map(str, runs)]) == 0
    return runs[0] / "report.html"


@pytest.mark.full
@pytest.mark.parametrize(("width", "dark"), itertools.product((360, 1200), (False, True)))
def test_in_chromium(ten_runs, tmp_path, width, dark):
    assert ten_runs.stat().st_size < 5_000_000
    browser = Browser(tmp_path / "profile", width, dark)
    try:
        assert browser.open(ten_runs) < 2.0
        assert browser.log("browser") == []  # no console message of any kind
        events = [json.loads(entry["message"])["message"] for entry in browser.log("performance")]
        asked = [e["params"] for e in events if e["method"] == "Network.requestWillBeSent"]
        urls = [p["request"]["url"] for p in asked if p["documentURL"] == ten_runs.as_uri()]
        assert urls[0] == ten_runs.as_uri()
        assert all(url.startswith("data:") for url in urls[1:])

        assert browser.run("return document.documentElement.scrollWidth") <= width
        # what is read is not smaller than 11 px
        sizes = browser.run(
            "return [...document.querySelectorAll('.ticks-x span, td, p')].map(e => parseFloat(getComputedStyle(e).fontSize))"
        )
        assert min(sizes) >= 11
        # no cell is squeezed until its words break into letters
        heights = browser.run("return [...document.querySelectorAll('[aria-label=Runs] td')].map(e => e.offsetHeight)")
        assert max(heights) < 40
        curves = browser.run(
            "return [...document.querySelectorAll('.by-tokens .curve')].map(c => "
            "{const b = c.getBoundingClientRect();"
            " return [b.width, b.height, getComputedStyle(c).stroke]})"
        )
        assert len(curves) == 10 * 7  # seven charts with data: no MFU in these runs
        assert all(w > 100 for w, _, _ in curves)
        assert len({color for _, _, color in curves}) == 10

        page = browser.screenshot(tmp_path / "page.png")
        background = page[2, 2].astype(int)
        assert (background.mean() < 60) if dark else (background.mean() > 240)
        ink = browser.run("return getComputedStyle(document.body).color")
        r, g, b = map(int, re.findall(r"\d+", ink)[:3])
        assert abs(np.mean([r, g, b]) - background.mean()) > 150  # text stands out

        # Everything that opens or switches is reached with the Tab key alone, in the order of reading.
        wanted = browser.run(
            "return [...document.querySelectorAll('summary, input:checked, [tabindex]')].filter(e => e.checkVisibility()).length"
        )
        reached = []
        for _ in range(wanted + 2):
            browser.press_tab()
            reached.append(
                browser.run("const e = document.activeElement; return e.tagName + (e.id || e.textContent.slice(0, 40))")
            )
        assert len({name for name in reached if not name.startswith(("BODY", "HTML"))}) >= wanted - 1
        # The switch shows the other axis, without a script.
        browser.run("document.getElementById('by-time').click()")
        shown = "return [...document.querySelectorAll('figure')].filter(f => f.checkVisibility()).map(f => f.className)"
        assert {name for name in browser.run(shown) if name.startswith("by-")} == {"by-time"}
    finally:
        browser.close()
