"""Tests that every figure is valid, self-contained and complete over every kind of database."""

import json
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from functools import cache
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import vl_convert

from tests.figures import conftest as sample
from tests.figures.conftest import CPU, GPU, Build
from tnp.dispatch.registry import catalog
from tnp.figures import FIGURES, data, draw, render, render_index, training
from tnp.figures.layout import PHONE
from tnp.figures.words import WORDS, words
from tnp.model.variants import named_specs

MANY = "gpu and cpu, some failed"
STAGES = {
    (stage, pass_): factor * time
    for stage, time in {"embed": 1, "attention": 20, "mlp": 9, "heads": 5, "loss": 0.1}.items()
    for pass_, factor in (("forward", 1.0), ("backward", 2.2))
} | {("optimizer", "optimizer"): 0.6, ("other", "forward"): 0.01}


class Elements(HTMLParser):
    """Collects every element of a page with its attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def everything(device: str, variants: list[str]) -> dict:
    times = {
        (shape, name): 10.0 + i for shape in ("small", "mid") for i, name in enumerate(variants)
    }
    return sample.merged(
        sample.steps(times, device),
        sample.steps(times, device, checkpoint=True),
        sample.stage_rows(STAGES, device),
        sample.stage_rows({place: 0.7 * ms for place, ms in STAGES.items()}, device, "separate"),
        sample.training_rows(0.5, -1.5, device=device),
        sample.paired_rows(device),
        sample.roofline_rows({(name, "mid"): 0.5 for name in variants}, device),
        sample.ablation_rows({("mlp", shape): 1.0 for shape in ("small", "mid")}, device),
        sample.equal_rows([0.99, 1.0, 1.01], device),
        sample.operator_rows({("llama3_8b/train", "forward"): (9.0, "faster")}, device),
        sample.profile_rows({"torch": 70.0, "triton": 90.0}, device),
        sample.host_rows({("torch", "forward"): 9.0, ("triton", "chain"): 12.0}, device),
        sample.language_rows({"hf": 100.0, "vllm": "unsupported", "ours": 900.0}, device),
        sample.step_host_rows({(name, False): (9.0, 12.0) for name in variants}, device),
    )


def failed(device: str) -> dict:
    times = {("mid", "sdpa_flash"): "oom", ("mid", "separate"): "gate_failed"}
    return sample.merged(
        sample.steps(times, device),
        sample.roofline_rows({("separate", "mid"): "timeout"}, device),
        sample.ablation_rows({("mlp", "mid"): "oom"}, device),
        sample.profile_rows({"torch": "unsupported"}, device),
        sample.language_rows({"hf": "oom"}, device, batch=8),
    )


@cache
def databases() -> dict[str, dict]:
    """Returns {name: rows}; no rows at all are a test of their own."""
    gpu = sample.environments((GPU, "NVIDIA H200", "recorded"))
    cpu = sample.environments((CPU, "CPU", "runs"))
    variants = ["sdpa_flash", "sdpa_cudnn", "separate"]
    return {
        "gpu": sample.merged(gpu, everything(GPU, variants)),
        "cpu, one variant": sample.merged(cpu, everything(CPU, ["sdpa_flash"])),
        MANY: sample.merged(gpu, cpu, everything(GPU, variants), failed(GPU), failed(CPU)),
        "all failed": sample.merged(gpu, failed(GPU)),
        "no environment": everything(GPU, variants),
        "fourteen variants": sample.merged(
            gpu, everything(GPU, ["sdpa_flash", *(f"kernel_{i}" for i in range(13))])
        ),
    }


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Returns the database of the rows of a name, which no test changes; "" has no rows."""

    @cache
    def made(name: str) -> Path:
        path = tmp_path_factory.mktemp("database") / "results.duckdb"
        return sample.write(path, **databases().get(name, {}))

    return made


def texts_of(specification: dict) -> str:
    """Returns all texts of a figure that Vega-Lite compiles."""
    svg = vl_convert.vegalite_to_svg(specification)
    assert len(svg) > 1000
    texts = " ".join(ElementTree.fromstring(svg).itertext())
    assert not re.search(r"\b(null|NaN|undefined|Infinity)\b", texts)
    return texts


# Every figure with rows of all kinds; the others where they matter: `failed` has rows of some views
# alone, texts about the machine are one function, and only figures of steps draw many variants.
ROWS = {
    MANY: FIGURES,
    "all failed": (
        "speedup",
        "matrix",
        "memory",
        "roofline",
        "ablation",
        "profiles",
        "language_models",
    ),
    "cpu, one variant": ("speedup", "stages", "training"),
    "no environment": ("operators",),
    "fourteen variants": ("matrix", "memory", "host"),
}


@pytest.mark.parametrize(
    ("figure", "rows"), [(figure, rows) for rows, figures in ROWS.items() for figure in figures]
)
def test_every_figure_compiles_over_any_rows(
    database: Callable[[str], Path], figure: str, rows: str
) -> None:
    texts = texts_of(draw(figure, database(rows)).to_dict())
    if rows == MANY and figure in ("speedup", "memory", "matrix"):  # each device with its origin
        assert "NVIDIA H200" in texts and "recorded 2026-02-01" in texts
        assert "this machine, 2026-02-01" in texts


@pytest.mark.parametrize("figure", FIGURES)
def test_a_figure_without_rows_says_what_to_run(
    database: Callable[[str], Path], figure: str
) -> None:
    specification = draw(figure, database("")).to_dict()
    assert specification["title"]["text"][0].startswith("No rows yet")
    assert "Run:  snakemake" in str(specification["datasets"])
    if figure == "speedup":  # all are drawn by one function
        assert "snakemake" in texts_of(specification)


def test_a_page_loads_nothing_and_holds_both_layouts_and_their_rows_once(
    build: Build, tmp_path: Path
) -> None:
    path, html, svg = (tmp_path / "new" / f"memory.{name}" for name in ("png", "html", "svg"))
    database = build(**databases()["gpu"])
    render("memory", database, html, svg)
    written, elements = html.read_text(), Elements()
    elements.feed(written)
    assert ("script", {}) in elements.found
    links = {
        attributes[name]
        for _, attributes in elements.found
        for name in {"src", "href"} & set(attributes)
    }
    assert len(links) == 2 and "index.html" in links  # and what is next
    head = re.sub(r"<script.*?</script>", "", written, flags=re.DOTALL)
    assert head.count("<title>") == 1 and "<title>tnp: memory</title>" in head
    assert '<meta name="viewport" content="width=device-width' in head
    assert re.search("<h1>.* on NVIDIA H200", head)
    charts, _ = json.JSONDecoder().raw_decode(written.split("const charts = ")[1])
    assert set(charts) == {"screen", "phone", "datasets"}
    assert charts["screen"] != charts["phone"]
    used = set(re.findall(r"'data': {'name': '([^']+)'", str(charts["screen"])))
    assert used and used <= set(charts["datasets"])
    ElementTree.fromstring(svg.read_text())
    render("roofline", database, html, path)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert {one.name for one in html.parent.iterdir()} == {"memory.html", "memory.svg", path.name}


def test_the_index_leads_to_every_figure_by_what_it_found(tmp_path: Path) -> None:
    found = {figure: f"<{figure}> is faster" for figure in FIGURES if figure != "noise"}
    for figure in found.keys() - {"memory"}:
        (tmp_path / f"{figure}.html").touch()
    render_index(tmp_path / "index.html", found)
    written = (tmp_path / "index.html").read_text()
    assert "snakemake --cores 1 figures/memory.html" in written and '"memory.html' not in written
    for figure in found.keys() - {"memory"}:
        assert f'<a href="{figure}.html">&lt;{figure}&gt; is faster</a>' in written
        assert re.search(rf"<dd>{figure}: \w.{{20,}}\.</dd>", written)
    assert "noise could not be drawn" in written
    assert written.index("Is it faster?") < written.index("speedup.html") < written.index("memory")


@pytest.mark.parametrize(
    ("figure", "rows"), [(figure, MANY) for figure in FIGURES] + [("speedup", "")]
)
def test_a_figure_for_phones_is_as_narrow_as_one(
    database: Callable[[str], Path], figure: str, rows: str
) -> None:
    specification = draw(figure, database(rows), PHONE).to_dict()
    # The page writes the title, and has margins of its own.
    del specification["title"]
    svg = vl_convert.vegalite_to_svg(specification | {"padding": 0})
    assert float(ElementTree.fromstring(svg).get("width")) <= 390 - 2 * 8


def test_every_configured_name_is_said_in_words_of_its_own() -> None:
    names = [*named_specs(), *WORDS, *catalog().titles()]
    assert named_specs().keys() <= WORDS.keys()
    assert len({words(name) for name in names}) == len(set(names))


def test_unknown_figure_names_the_known_ones(build: Build, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'sped': it must be one of speedup, matrix"):
        render("sped", build(), tmp_path / "sped.html")
    assert not (tmp_path / "sped.html").exists()


def test_a_variant_has_one_colour_in_all_figures(build: Build) -> None:
    path = build(**databases()["gpu"])
    scales = set()
    for figure in ("speedup", "memory", "host"):
        specification = str(draw(figure, path).to_dict())
        (scale,) = set(
            re.findall(r"\{'domain': \[[^]]*'plain PyTorch'[^}]*'range': [^}]*\}", specification)
        )
        scales.add(scale)
    assert len(scales) == 1


MARKS = [*data.COLORS.values(), training.LINES, [color for _, color, _ in training.SERIES.values()]]


@pytest.mark.parametrize("color", sorted({color for colors in MARKS for color in colors}))
def test_a_mark_is_seen_on_light_and_on_dark_pages(color: str) -> None:
    """WCAG 2.1 asks for a contrast of 3 : 1 between graphics and what is around them."""

    def on_dark(light: np.ndarray) -> np.ndarray:
        """The filter of `pages.STYLE`: invert(0.9), then hue-rotate(180deg)."""
        inverted = 0.9 - 0.8 * light
        return np.clip(2 * inverted @ [0.213, 0.715, 0.072] - inverted, 0, 1)

    def luminance(rgb: np.ndarray) -> float:
        linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
        return float(linear @ [0.2126, 0.7152, 0.0722])

    mark = np.array([int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)])
    for page, seen in ((np.ones(3), mark), (on_dark(np.ones(3)), on_dark(mark))):
        low, high = sorted((luminance(page), luminance(seen)))
        assert (high + 0.05) / (low + 0.05) > 3
