"""No document of a packed row sees another: every attention, on one process and on several."""

from __future__ import annotations

from typing import Any

import isolation_job
import processes
import pytest
import torch

pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:_compile flag on create_block_mask:DeprecationWarning"),  # of transformers
]

MESHES = ("ddp", "fsdp", "cp=2", "sp=2")
IN_PARTS = "masks for the parts of a sequence"
WAYS = {
    "eager": "the model's own masks for eager",
    "sdpa": "attention by document",
    "flex_attention": "the model's own masks for flex_attention",
    "cu_seqlens": "cu_seqlens",
    "attention_mask": "a mask over pairs of tokens as attention_mask",
    "again": "a mask over pairs of tokens as attention_mask",
}
REFUSED = {(mesh, "cu_seqlens") for mesh in ("cp=2", "sp=2")}  # whose bounds are those of whole sequences

Found = dict[str, isolation_job.Result]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Found]]:
    """The results of each process by mesh; "one" is that of a single process."""
    folder = tmp_path_factory.mktemp("isolation")
    processes.run("isolation_job.py", 2, str(folder), *MESHES)
    ranks = [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in (0, 1)]
    one = isolation_job.run_all(folder / "one", None)
    return {"one": [one], **{mesh: [rank[mesh] for rank in ranks] for mesh in MESHES}}


@pytest.fixture(scope="module")
def padded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, isolation_job.Result]:
    """The numbers of a single process without packing."""
    folder = tmp_path_factory.mktemp("padded")
    names = [name for name in isolation_job.MODELS if name not in isolation_job.ONLY_FORWARD]
    make: Any = isolation_job.MODELS
    return {name: isolation_job.run(folder / name, make[name](), None, per_device_train_batch_size=4) for name in names}


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("mesh", ["one", *MESHES])
def test_a_change_of_one_document_changes_no_output_of_the_others(
    found: dict[str, list[Found]], padded: dict[str, isolation_job.Result], mesh: str, name: str
) -> None:
    for result in (rank[name] for rank in found[mesh]):
        if (mesh, name) in REFUSED:
            assert "TakesBounds cannot isolate the documents of a row (its forward takes no att" in result["error"]
            assert "Use packing='group'" in result["error"]
            assert (result["way"], result["losses"]) == ("", [])
            continue
        assert result["error"] == ""
        assert result["way"] == (IN_PARTS if mesh in ("cp=2", "sp=2") else WAYS[name])
        assert result["leak"] <= 1e-6 < 1e-2 < result["change"]
        if name in padded:
            assert result["losses"] == pytest.approx(padded[name]["losses"], rel=1e-5)
            assert result["norms"] == pytest.approx(padded[name]["norms"], rel=1e-4)
