"""One machine with eight GPUs, on Modal.

    modal run --detach launch/modal_app.py --output-dir s3://bucket/team/digits

Modal starts the function again after a preemption, and `retries` times after an error: the run goes on from the store.
What to change: the secret with the keys of the bucket, the number of GPUs.
"""

import subprocess

import modal

GPUS = 8
HOURS = 24  # the longest that Modal lets a function run

image = (
    modal.Image.debian_slim(python_version="3.12")
    .pip_install("paceline[demo,s3]")
    .add_local_dir("launch", remote_path="/workspace/launch")
)
app = modal.App("paceline")


@app.function(
    image=image,
    gpu=f"H100:{GPUS}",
    timeout=HOURS * 3600,
    retries=3,
    secrets=[modal.Secret.from_name("s3-credentials")],
)
def train(output_dir: str) -> None:
    words = ["paceline", "launch", "--nproc-per-node", str(GPUS), "launch/train.py"]
    words += ["--output_dir", output_dir, "--resume_from_checkpoint", "auto", "--parallel", "fsdp"]
    subprocess.run(words, check=True, cwd="/workspace")


@app.local_entrypoint()
def main(output_dir: str = "s3://bucket/team/digits") -> None:
    train.remote(output_dir)
