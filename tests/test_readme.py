"""README.md: its code runs, its links lead somewhere, its tables are those of the recorded rows."""

import re
from pathlib import Path

import pytest

README = Path("README.md").read_text()
DOCUMENTS = ["README.md", "RESULTS.md", "SPECIFICATION.md"]


def test_the_first_block_of_python_trains_on_a_cpu(capsys):
    (block, *_) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len([line for line in block.splitlines() if line]) <= 12
    names = {}
    exec(block, names)
    assert names["p"].mean.shape == (1, 4, 1)
    losses = re.findall(r"^\d+ (-?\d+\.\d+)$", capsys.readouterr().out, re.MULTILINE)
    assert len(losses) == 100 and float(losses[-1]) < float(losses[0])


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_to_files_of_the_repository(document):
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", Path(document).read_text())
    assert not [link for link in links if not Path(link).exists()]


def test_every_question_is_linked():
    linked = set(re.findall(r"\((workflow/questions/\w+\.sql)\)", README))
    assert linked == {str(path) for path in Path("workflow/questions").glob("*.sql")}
