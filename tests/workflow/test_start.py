"""Checks before the first job: one sentence each, and nothing was changed."""

import os
from pathlib import Path

import pytest

from workflow import start
from workflow.targets import refusal

TARGETS = ["all", "again", "cpu", "figures", "figures/matrix.html", "figures/speedup.html"]


@pytest.mark.parametrize(
    ("target", "sentence"),
    [
        ("cqu", "unknown target 'cqu': did you mean 'cpu'?"),
        ("everything", "unknown target 'everything': choose from again, all, cpu, figures"),
        ("figures/speedupp.html", "unknown target 'figures/speedupp.html': did you mean 'figu"),
        ("speedup", "unknown target 'speedup': did you mean 'figures/speedup.html'?"),
        ("figures/speedup.html", "write 'figures/speedup.html' as it stands here"),
        ("figures/headline.svg", "'figures/headline.svg' is drawn from the recorded rows alone"),
        ("data/runs/cpu/steps/a.parquet", "unknown target 'data/runs/cpu/steps/a.parquet': choo"),
    ],
)
def test_a_target_that_is_not_there_is_one_sentence(target, sentence):
    assert refusal(target, TARGETS).startswith(sentence)


@pytest.mark.parametrize("folder", ["data", "figures", "data/runs/cpu"])
def test_a_file_in_the_way_of_a_folder_is_named(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path(folder.split("/")[0]).write_text("a file where the folder should be")
    with pytest.raises(ValueError, match=f"cannot write to {folder}/: {folder.split('/')[0]} is"):
        start.check_no_file_for_folder([folder])
    with pytest.raises(ValueError, match=f"cannot write to {folder}/ "):
        start.check_folders([folder])


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("figures").mkdir(mode=0o500)
    with pytest.raises(ValueError, match=r"cannot write to figures/ \(Permission denied\)"):
        start.check_folders(["figures"])


@pytest.mark.parametrize("file", ["data/recorded/cpu/steps/a", "data/runs/cpu/gates/mlp"])
def test_a_table_that_the_store_could_not_load_is_named(file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    bad = Path(f"{file}.parquet")
    bad.parent.mkdir(parents=True)
    start.check_tables()
    os.mkfifo(bad)  # to be read, it would wait for ever
    with pytest.raises(ValueError, match=f"{bad} is no regular file: remove it"):
        start.check_tables()
    bad.unlink()
    bad.write_bytes(b"PAR1 half a file")
    with pytest.raises(ValueError, match=str(bad)):
        start.check_tables()


def test_a_gpu_that_is_named_and_not_here_is_one_sentence():
    with pytest.raises(ValueError, match="^config.yaml: device 'nvidia-none' is not here: .*auto"):
        start.check_device("nvidia-none")


def test_a_second_workflow_is_told_who_is_running(tmp_path):
    held = start.take_lock(tmp_path / "lock")
    with pytest.raises(ValueError, match=rf"another workflow \(process {os.getpid()}\) is runn"):
        start.take_lock(tmp_path / "lock")
    os.close(held)
    os.close(start.take_lock(tmp_path / "lock"))
