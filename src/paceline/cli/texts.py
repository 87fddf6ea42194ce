"""The texts of `--help`."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

from paceline.cli.options import argument_fields, is_option_of_tensorflow

HELP = """\
paceline: trains any PyTorch module, and Keras models with TensorFlow

  paceline demo                 train a small language model on real text, about two minutes
  paceline demo digits          classify handwritten digits (needs scikit-learn)
  paceline train CONFIG.yaml    train what a file describes
  paceline launch SCRIPT        run a script of yours on several processes, one for each GPU
  paceline report RUN [RUN ...] write a page with the curves and settings of a run, or compare several
  paceline verify RUN           check every checkpoint of a run
  paceline export CHECKPOINT OUTPUT  convert a sharded checkpoint to a folder for from_pretrained
  paceline replay RUN --step N  rerun one optimizer step of a run, and show its samples
  paceline COMMAND --help       more on a command
  paceline --version            the version

Ctrl-C stops a run with a checkpoint; the same command resumes from there."""

DEMO = """\
paceline demo [text|digits] [--fresh] [--option value ...]

  text      a small language model on the English that every Python carries (default)
  digits    scikit-learn's handwritten digits

  --fresh             start over; the earlier run is renamed
  --seconds N         text: training time if no number of steps is given (default 90)
  --framework tf      digits: train with TensorFlow instead of torch (needs the extra `tf`)
  --prompt TEXT       text: the prompt of the generated sample
  --output_dir DIR    output folder (default runs/demo, runs/digits)

Every option of TrainingArguments is accepted: --max_steps 200 --learning_rate 1e-3 --bf16 ...
"paceline demo --help WORD" lists those that contain WORD."""

TRAIN = """\
paceline train CONFIG.yaml [--fresh] [--option value ...] [--section.key value ...]

A configuration:

  model: gpt2-folder                 # a folder or name for transformers,
  # model: {model_type: gpt2, n_layer: 4, task: causal_lm}      or its configuration,
  # model: my_package.my_module:make_model                      or your function or class
  # model: {factory: my_package.my_module:make_model, width: 64}
  tokenizer: gpt2-folder             # default: the model's folder
  data: corpus.txt                   # text, JSONL, CSV, Parquet; a folder of datasets.save_to_disk;
  # data: {train: [a.jsonl, b.jsonl], eval: c.jsonl, text_column: body, block_size: 512, num_proc: 4}
  # data: {train: corpus.txt, eval_fraction: 0.05}
  # data: my_package.my_module:make_data      returns a dataset, (train, eval), or {train:, eval:, test:}
  preprocess: my_module:function     # for datasets.map: {factory: ..., batched: true, num_proc: 4};
                                     #   remaining text is tokenised and split into blocks
  data_collator: my_module:collate   # also: compute_metrics, compute_loss_func,
                                     #   preprocess_logits_for_metrics, trainer (a subclass of Trainer)
  callbacks: [my_module:MyCallback, {factory: paceline:EarlyStoppingCallback, early_stopping_patience: 3}]
  arguments:                         # TrainingArguments; the names may also stand at the top level
    output_dir: runs/my-run
    learning_rate: 3e-4

Modules are searched for in the configuration's folder, the current folder, and installed packages; relative
files in the configuration's folder, then the current folder. The command line overrides the file.
A run resumes where it stopped; --fresh starts over. --do_eval and --do_predict without --do_train only
evaluate, or predict on the test set.

With TensorFlow (the extra `tf`): --framework tf, or `framework: tf` in the file. Then the model is a .keras file or
your function, class or object; the options are those of TFTrainingArguments, `trainer` a subclass of TFTrainer; a
function for data gives arrays as {train: (features, labels), eval: ...}; text without labels is split into blocks for
language models of transformers only. Everything else is the same.

"paceline train --help WORD" lists the options that contain WORD."""

LAUNCH = """\
paceline launch [--nproc-per-node N] [option of torchrun ...] SCRIPT [option of the script ...]

Runs SCRIPT on several processes with torchrun: one process per GPU of this machine unless --nproc-per-node is given.
Without --nnodes or --rdzv-... only this machine is used.

  --max-restarts N    restart all processes, up to N times, when one dies: a Trainer resumes from its last checkpoint
  -m                  SCRIPT is a module

A Trainer in the script needs no other change: per_device_train_batch_size is that of each process."""

VERIFY = """\
paceline verify RUN [RUN ...]

Reads every file of every checkpoint in the folder of a run (or of one checkpoint) and verifies its checksum.
Exit code 1 if anything is damaged. A checkpoint of another trainer has no manifest: only its structure
can be checked."""

REPORT = """\
paceline report RUN [RUN ...] [--output FILE]

Writes report.html to the folder of a run: curves of every optimizer step, evaluations, options that differ from their
defaults, checkpoints, environment. It is one file that needs no network. A run that ends writes it by itself; this
command also does it for a run that is going on or was interrupted. Several runs are compared in one page.

  --output FILE  where to write it (default: report.html in the folder; comparison.html in
                 the first of several)"""

REPLAY = """\
paceline replay RUN --step N [--show M] [--trust]

Reruns one optimizer step of a run from the newest checkpoint before it, and prints its loss, gradient norm and learning
rate, their bitwise comparison with the recorded ones, and its samples, to find the batch that caused a spike. The run
itself is not changed.

  RUN          the folder of a run of `paceline train` or `paceline demo`
  --step N     the optimizer step, as counted by log.jsonl and the progress bar
  --show M     number of its samples to show (default 3)

The code that a run of `paceline train` names is imported, after a confirmation; --trust skips it, if you know who
wrote the run's job.json.

For a run of your own script: paceline.replay(trainer, step)."""

EXPORT = """\
paceline export CHECKPOINT OUTPUT [--max-shard-size 5GB] [--files-from FOLDER]

Writes the model of a checkpoint as safetensors, with its configuration and tokenizer, into a new folder that
from_pretrained loads. The weights are copied one tensor at a time, so that the model need not fit into memory. The
folder is created atomically.

  CHECKPOINT             sharded or full, of paceline, or of accelerate under FSDP (pytorch_model_fsdp_0/,
                         pytorch_model_fsdp.bin); of a run's folder the newest valid one
  --max-shard-size SIZE  maximum size of one file (default 50GB)
  --files-from FOLDER    also take configuration and tokenizer from there: other trainers' checkpoints may lack them"""

TEXTS = {
    "demo": DEMO,
    "train": TRAIN,
    "launch": LAUNCH,
    "report": REPORT,
    "verify": VERIFY,
    "export": EXPORT,
    "replay": REPLAY,
}


def help_on(command: str, words: Sequence[str]) -> str:
    """Returns the help of a command or, with words after `--help`, the options that contain one of the words."""
    if command in ("launch", "report", "verify", "replay"):
        return TEXTS[command]
    wanted = [word for word in words if not word.startswith("-") and word != "help"]
    if command == "demo":
        wanted = [word for word in wanted if word not in ("text", "digits")]
    else:
        wanted = [word for word in wanted if not word.endswith((".yaml", ".yml", ".json"))]
    return list_options(wanted) if wanted else TEXTS[command]


def list_options(words: Iterable[str]) -> str:
    """Lists name, default and help of the options whose name or help contains one of the words."""
    wanted = [word.lower().replace("-", "_") for word in words]
    lines = []
    for name, item in argument_fields().items():
        text = str(item.metadata.get("help", ""))
        if not any(word in name or word.replace("_", " ") in text.lower() for word in wanted):
            continue
        default = "[]" if callable(item.default_factory) else str(item.default)
        condition = "; with --framework tf" if is_option_of_tensorflow(name) else ""
        lines.append(f"  --{name} (default {default}{condition})")
        lines += textwrap.wrap(text, width=108, initial_indent="      ", subsequent_indent="      ")
    return "\n".join(lines) if lines else f"no option contains {' or '.join(wanted)}"
