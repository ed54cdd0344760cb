"""README.md: its code runs, its links lead somewhere, its tables are those of the recorded rows."""

import math
import re
from pathlib import Path

import pytest

README = Path("README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
DOCUMENTS = ["README.md", "RESULTS.md", "SPECIFICATION.md"]


def test_the_first_block_of_python_trains_on_a_cpu(capsys):
    assert len([line for line in BLOCKS[0].splitlines() if line]) <= 12
    names = {}
    exec(BLOCKS[0], names)
    assert names["p"].mean.shape == (1, 4, 1)
    losses = re.findall(r"^\d+ (-?\d+\.\d+)$", capsys.readouterr().out, re.MULTILINE)
    assert len(losses) == 100 and float(losses[-1]) < float(losses[0])


def on_a_cpu(block: str, instead: dict[str, str]) -> dict:
    """The names that a block for a GPU leaves, run on a CPU and with some of its text replaced."""
    for text, other in ({'"cuda"': '"cpu"'} | instead).items():
        assert text in block
        block = block.replace(text, other)
    names: dict = {}
    exec(block, names)
    return names


def test_the_block_for_a_gpu_trains(capsys):
    """One small step of it, without a CUDA graph."""
    smaller = {"cuda_graph=True": "cuda_graph=False", "range(1000)": "range(1)"}
    smaller |= {"batch=64, n_context=64, n_target=500": "batch=1, n_context=8, n_target=8"}
    names = on_a_cpu(BLOCKS[1], smaller)
    assert math.isfinite(names["loss"].item()) and capsys.readouterr().out.startswith("0 ")


def test_the_block_of_operators_runs():
    smaller = {"torch.bfloat16": "torch.float32", "300": "30", "1408": "128"}
    names = on_a_cpu(BLOCKS[2], smaller)
    assert names["o"].shape == names["q"].shape and names["y"].shape == names["x"].shape


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_to_files_of_the_repository(document):
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", Path(document).read_text())
    assert not [link for link in links if not Path(link).exists()]


def test_every_question_is_linked():
    linked = set(re.findall(r"\((workflow/questions/\w+\.sql)\)", README))
    assert linked == {str(path) for path in Path("workflow/questions").glob("*.sql")}
