from pathlib import Path

from paceline.checkpoint.folders import extra_files, staged, verify


def save(final: Path, text: str) -> None:
    with staged(final) as folder:
        (folder / "model.safetensors").write_text(text)


def test_what_was_written_before_the_save_is_kept_and_sealed(tmp_path: Path) -> None:
    final = tmp_path / "checkpoint-3"
    (final / "parts").mkdir(parents=True)
    (final / "projector.bin").write_text("mine")
    (final / "parts" / "one.txt").write_text("mine, too")
    (final / "model.safetensors").write_text("another")
    save(final, "ours")
    assert (final / "projector.bin").read_text() == "mine"
    assert (final / "parts" / "one.txt").read_text() == "mine, too"
    assert (final / "model.safetensors").read_text() == "ours"  # of one name, the later file is there
    assert verify(final) == []
    assert extra_files(final) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-3"]


def test_of_an_older_checkpoint_what_its_manifest_does_not_list_is_kept(tmp_path: Path) -> None:
    final = tmp_path / "checkpoint-3"
    with staged(final) as folder:
        (folder / "optimizer.pt").write_text("old")
    (final / "notes.txt").write_text("mine")
    save(final, "new")
    assert sorted(path.name for path in final.iterdir()) == ["manifest.json", "model.safetensors", "notes.txt"]
    save(final, "newer")  # it is listed now
    assert sorted(path.name for path in final.iterdir()) == ["manifest.json", "model.safetensors"]


def test_no_weights_of_another_trainer_stay_beside_new_ones(tmp_path: Path) -> None:
    final = tmp_path / "checkpoint-3"
    (final / "global_step3").mkdir(parents=True)
    names = ("pytorch_model.bin", "model-00001-of-00002.safetensors", "optimizer.bin", "trainer_state.json", "mine.txt")
    for name in (*names, "global_step3/zero.pt"):
        (final / name).write_text("theirs")
    save(final, "ours")
    assert sorted(path.name for path in final.iterdir()) == ["manifest.json", "mine.txt", "model.safetensors"]
