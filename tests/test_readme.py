"""Tests that code of README and other pages runs, and that links and commands lead somewhere."""

import importlib.util
import math
import re
from pathlib import Path

import pytest

from tnp.bench import isolate, provenance
from tnp.bench.outcome import failure_rows
from tnp.model.variants import named_specs

PATTERNS = (
    "*.md",
    "docs/**/*.md",
    "results/*.md",
    "tnp/ops/*/NOTES.md",
    "[!.]*/README.md",
    "lab/*.md",
)
DOCUMENTS = sorted({path for pattern in PATTERNS for path in Path().glob(pattern)})
README, OPERATORS = Path("README.md").read_text(), Path("docs/operators.md").read_text()
TRAIN, GPU, DATA, LOOP, PREDICT = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
LAYERS, COMPARE, ATTENTION = re.findall(r"```python\n(.*?)```", OPERATORS, re.DOTALL)
TITLE = re.compile(r"^#+ (.*)$", re.MULTILINE)


def run(block: str, instead: dict[str, str], names: dict | None = None) -> dict:
    """Returns the names that a block leaves, run on a CPU and with some of its text replaced."""
    for text, other in instead.items():
        assert text in block, text
        block = block.replace(text, other)
    names = {} if names is None else names
    exec(block.replace('"cuda"', '"cpu"'), names)
    return names


def test_the_first_block_trains_on_a_cpu_and_draws(capsys, tmp_path, monkeypatch):
    assert len([line for line in TRAIN.splitlines() if line]) <= 14
    monkeypatch.chdir(tmp_path)
    run(TRAIN, {"600": "150"})
    reports = [eval(line) for line in capsys.readouterr().out.splitlines()]
    assert [report["step"] for report in reports] == [0, 100, 150]
    assert reports[-1]["loss"] < reports[1]["loss"]
    assert "vega" in (tmp_path / "curve.html").read_text()


def test_the_block_for_a_gpu_trains(capsys, tmp_path, monkeypatch):
    """Runs one small step of it, without a CUDA graph."""
    monkeypatch.chdir(tmp_path)
    smaller = {"cuda_graph=True": "cuda_graph=False", "range(1000)": "range(1)"}
    smaller |= {"batch=64, n_context=64, n_target=500": "batch=1, n_context=8, n_target=8"}
    names = run(GPU, smaller)
    assert math.isfinite(names["loss"].item()) and capsys.readouterr().out.startswith("0 ")


def test_a_table_is_read_trained_on_and_predicted(capsys, tmp_path, monkeypatch):
    """Runs the three blocks about one's own data, in their order, with a value missing."""
    monkeypatch.chdir(tmp_path)
    rows = [
        f"{day},{station},{east * 1e3},{north * 1e3},"
        f"{'nan' if (day, station) == (3, 5) else 280 + 5 * math.sin(day + east) + north}"
        for day in range(40)
        for station, (east, north) in enumerate((i % 7, i // 7) for i in range(40))
    ]
    header = "day,station,east,north,kelvin"
    Path("stations.csv").write_text("\n".join([header, *rows]))
    names = run(DATA, {" 500, ": " 4, every=2, "})
    assert "heldout_log_likelihood" in capsys.readouterr().out
    assert sum(len(x) for x, *_ in names["days"]) == 40 * 40 - 1
    assert Path("stations/latest.pt").exists()
    run(LOOP, {"range(20)": "range(2)"}, names)
    run(PREDICT, {}, names)
    assert (names["low"] < names["high"]).all()
    assert 200 < names["mean"].mean() < 400, "predictions are in kelvin"
    assert names["curves"].shape == (5, *names["task"].y_target.shape)


def test_the_blocks_of_operators_run():
    names = run(LAYERS, {"torch.bfloat16": "torch.float32", "300": "30", "1408": "128"})
    assert names["o"].shape == names["q"].shape and names["y"].shape == names["x"].shape
    smaller = {"torch.bfloat16": "torch.float32", "3000": "30", "1000": "10", "500": "5"}
    names = run(ATTENTION, smaller | {"1, 32,": "1, 2,", "2, 1, 8,": "2, 1, 1,", "128": "16"})
    assert names["o"].shape == names["q"].shape and names["lse"].shape == names["q"].shape[:3]


def test_the_block_that_compares_runs(monkeypatch, capsys):
    def run_isolated(kind, parameters, timeout_s):
        return failure_rows(kind, parameters, "oom", "out of memory")

    monkeypatch.setattr(isolate, "run_isolated", run_isolated)
    monkeypatch.setattr(provenance, "device_slug", lambda: "cpu")
    names = run(COMPARE, {})
    assert [row["implementation"] for row in names["found"].rows] == ["torch", "fused"]
    assert capsys.readouterr().out.startswith("None {} [{")


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_links_lead_to_files_of_the_repository(document):
    for link in re.findall(r"\]\((?!https?:)([^)]+)\)", document.read_text()):
        file, _, title = link.partition("#")
        path = document.parent / file if file else document
        assert path.exists(), link
        if title:
            titles = [
                re.sub(r"[^\w -]", "", one.lower()) for one in TITLE.findall(path.read_text())
            ]
            assert title in [one.replace(" ", "-") for one in titles], link


def test_commands_of_documents_exist():
    text = "".join(path.read_text() for path in DOCUMENTS)
    targets = re.findall(r"^(\w+):", Path("Makefile").read_text(), re.MULTILINE)
    assert set(re.findall(r"(?:^|`|&& )make (\w+)", text, re.MULTILINE)) <= set(targets)
    for module in re.findall(r"python -m ((?:tnp|tests|workflow)[\w.]*)", text):
        assert importlib.util.find_spec(module), module


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_paths_that_pages_name_exist(document):
    named = re.findall(r"`((?:tnp|tests|workflow|docs|examples)/[\w./-]+)`", document.read_text())
    gone = [one for one in named if not Path(one).exists() and not Path(f"{one}.py").exists()]
    assert not gone


def test_variants_of_the_readme_exist():
    in_readme = set(re.findall(r"^\| `(\w+)` \|", README, re.MULTILINE))
    assert "auto" in in_readme and in_readme <= named_specs().keys()


def test_pages_stay_short():
    """Notes beside kernels are not counted. results/ and the specification are long tables."""
    assert len(README.encode()) <= 12_000
    pages = [path for path in DOCUMENTS if path.parts[0] == "docs" or len(path.parts) == 1]
    pages.remove(Path("SPECIFICATION.md"))
    assert sum(path.stat().st_size for path in pages) <= 150_000
