"""One machine with 8 GPUs, on Modal.

    modal run --detach launch/modal_app.py

Modal starts the function again after a preemption, and `retries` times after an error: the run goes on from the store.
What to change: packages, the secret with the keys of the bucket, the kind of GPU.
"""

import subprocess

import modal

GPUS = 8
HOURS = 24  # the longest that Modal lets a function run
WORDS = [
    "launch/train.py",
    "--output_dir",
    "s3://bucket/team/digits",
    "--resume_from_checkpoint",
    "auto",
    "--parallel",
    "fsdp",
]

image = (
    modal.Image.debian_slim(python_version="3.12")
    .pip_install("paceline[demo,s3]")
    .add_local_dir(".", remote_path="/workspace", ignore=[".git", ".venv", "runs"])
)
app = modal.App("train")


@app.function(
    image=image,
    gpu=f"H100:{GPUS}",
    timeout=HOURS * 3600,
    retries=3,
    secrets=[modal.Secret.from_name("s3-credentials")],
)
def train() -> None:
    subprocess.run(["paceline", "launch", "--nproc-per-node", str(GPUS), *WORDS], check=True, cwd="/workspace")


@app.local_entrypoint()
def main() -> None:
    train.remote()
