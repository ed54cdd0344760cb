"""What the last lines of a run say."""

from workflow import summary


def test_success_names_what_there_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert summary.success(drawn=True) == ""
    for file in ("figures/speedup.html", summary.DATABASE):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    said = summary.success(drawn=True)
    assert said == f"Figures: figures/speedup.html\nAsk the results: {summary.QUERY}"
    assert summary.success(drawn=False).endswith("snakemake --cores 1 figures")
