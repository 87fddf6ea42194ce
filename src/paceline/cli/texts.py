"""The texts of `--help`."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import Field
from typing import Any

from paceline.args.option_docs import choices_of
from paceline.args.synonyms import meant_by
from paceline.cli.options import argument_fields, is_option_of_tensorflow, option_hints

HELP = """\
paceline: trains any PyTorch module, and Keras models with TensorFlow

  paceline demo                 train a small language model on real text, about two minutes
  paceline demo digits          classify handwritten digits (needs scikit-learn)
  paceline init TASK            write a commented file for `paceline train`
  paceline plan CONFIG.yaml     show what a run will take: memory, disk, steps
  paceline doctor CONFIG.yaml   look for common mistakes in model, data and options
  paceline train CONFIG.yaml    train what a file describes
  paceline schema               print the JSON schema of these files, for editors
  paceline completion SHELL     print the script that completes commands and options in bash or zsh
  paceline launch SCRIPT        run your script on several processes, one for each GPU
  paceline launch --on SERVICE CONFIG.yaml   write the file for a job on Slurm, Kubernetes or a cloud service
  paceline report RUN [RUN ...]  write a page with the curves and settings of a run, or compare several
  paceline compare RUN RUN      what runs differ in, and the first step at which they do
  paceline runs FOLDER          a table of the runs below a folder
  paceline serve FOLDER         the pages of these runs in a browser, up to date while they train
  paceline watch RUN            a dashboard of a live run in the terminal
  paceline verify RUN           check every checkpoint of a run
  paceline export CHECKPOINT OUTPUT  convert a sharded checkpoint to a folder for from_pretrained
  paceline average A B -o OUTPUT  write the mean of the weights of checkpoints (a model soup)
  paceline replay RUN --step N  rerun one optimizer step of a run, and show its samples
  paceline control RUN COMMAND  save, evaluate, stop a live run, or change its learning rate
  paceline search CONFIG.yaml   search the hyperparameters of what a file describes (needs optuna)
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

SEARCH = """\
paceline search CONFIG.yaml [--n_trials N] [--n_parallel N] [--json] [--option value ...] [--section.key value ...]

A configuration of `paceline train` with one more section (the extra `optuna`):

  search:
    space:
      learning_rate: {low: 1e-5, high: 1e-3, log: true}   # whole numbers if both bounds are; step: 8
      per_device_train_batch_size: [4, 8, 16]             # one of several values
      model.width: [16, 32]                               # a key of the section `model`
    # space: my_module:hp_space                           # your function of an optuna trial
    objective: eval_loss             # a metric, or my_module:function of the metrics
    direction: minimize
    n_trials: 20
    n_parallel: 2                    # processes; each has its own CUDA device, if there are any
    sampler: {name: TPESampler, seed: 0}
    pruner: MedianPruner             # not with halving
    halving: {min_steps: 100}        # successive halving: the best third continues
    timeout: 3600                    # seconds

--json prints the trials as JSON in the end, and everything else to the error output. The same command continues a
search that was interrupted. See docs/hyperparameter_search.md."""

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
                                     #   remaining text is tokenized and split into blocks
  metrics: [accuracy, f1]            # of the eval set, by scikit-learn or torchmetrics (the extra `metrics`)
  data_collator: my_module:collate   # also: compute_metrics, compute_loss_func,
                                     #   preprocess_logits_for_metrics, trainer (a subclass of Trainer)
  callbacks: [my_module:MyCallback, {factory: paceline:EarlyStoppingCallback, early_stopping_patience: 3}]
  members: [{learning_rate: 1e-3}, {learning_rate: 1e-2}]  # several models, trained at once
  augmentation: [shift_left, shift_right]   # or calibration: temperature, or ensemble: [runs/a, runs/b]:
                                     #   how the job predicts; see docs/predictions.md
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

PLAN = """\
paceline plan CONFIG.yaml [--processes N] [--time] [--print-config] [--json] [--option value ...]
                          [--section.key value ...]

States what `paceline train` with the same words will take, before its first step: memory of an optimizer step, disk,
steps, samples and tokens, evaluations. The step is traced on tensors without data. Trains nothing, and writes nothing.

  --processes N   plan a run of N processes (data, shards, mesh) on this one: nothing is sent, no GPU is needed
  --time          run two optimizer steps in memory, and state the time of the second
  --print-config  also print every option as YAML; those that differ from their defaults are marked
  --json          print all of it as one JSON object"""

DOCTOR = """\
paceline doctor CONFIG.yaml [--json] [--option value ...] [--section.key value ...]

Checks what `paceline train` with the same words would train, on copies: targets, leaks, padding, inputs, rows in both
sets, vocabulary, gradients, modes, learning rate, one batch, accumulation. Writes nothing. Started by torchrun on
several processes, it also compares their gradient of a step with that of one process. Exit code 1 if an error was
found.

  --json  print the findings as one JSON object"""

INIT = """\
paceline init TASK [FILE.yaml]

Writes a commented configuration for `paceline train`. No existing file is overwritten.

  module                  a module and data of your own, in a Python file that is written too; it can be trained at once
  text_classification     a model of transformers and files of texts with labels
  language_model          a causal language model of transformers and text
  masked_language_model   a masked language model of transformers and text"""

SCHEMA = """\
paceline schema > paceline.schema.json

Prints the JSON schema (draft 2020-12) of the files of `paceline train`, with the text and default of every option. An
editor with a YAML language server completes and checks a file that begins with the line
# yaml-language-server: $schema=paceline.schema.json"""

COMPLETION = """\
paceline completion bash|zsh

Prints the script with which the shell completes commands, options and their choices. In ~/.bashrc or ~/.zshrc:

  source <(paceline completion bash)"""

LAUNCH = """\
paceline launch [--nproc-per-node N] [option of torchrun ...] SCRIPT [option of the script ...]

Runs SCRIPT on several processes with torchrun: one process per GPU of this machine unless --nproc-per-node is given.
Without --nnodes or --rdzv-... only this machine is used.

  --max-restarts N    restart all processes, up to N times, when one dies: a Trainer resumes from its last checkpoint
  -m                  SCRIPT is a module

paceline launch --on SERVICE [--nodes N] [--gpus N] [--image IMAGE] [--output FILE] CONFIG.yaml|SCRIPT [option ...]

Writes the file that starts the job on a cluster or a service, and prints how to submit it and what to fill in. SERVICE
is slurm, kubernetes, skypilot, ray, modal, dstack, sagemaker, vertex, azure_ml or hf_jobs. Nothing is submitted.

  --nodes N           machines (default 1)
  --gpus N            GPUs of each machine (default 8)
  --image IMAGE       the container image
  --output FILE       the file to write (default: named after job and service); no file is overwritten

A Trainer in the script needs no other change: per_device_train_batch_size is that of each process."""

VERIFY = """\
paceline verify RUN [RUN ...] [--json]

Reads every file of every checkpoint in the folder of a run (or of one checkpoint) and verifies its checksum.
Exit code 1 if anything is damaged. A checkpoint of another trainer has no manifest: only its structure
can be checked.

  --json  print one JSON object for each checkpoint and line, instead of a table"""

REPORT = """\
paceline report RUN [RUN ...] [--output FILE] [--charts svg|bokeh]

Writes report.html to the folder of a run: curves of every optimizer step, evaluations, options that differ from their
defaults, checkpoints, environment. It is one file that needs no network. A run that ends writes it by itself; this
command also does it for a run that is in progress or was interrupted. Several runs are compared in one page.

  --output FILE  where to write it (default: report.html in the folder; comparison.html in
                 the first of several)
  --charts FORM  svg (the default), or bokeh: charts of BokehJS, 1.4 MB in the page, with
                 pip install 'paceline[report]'"""

COMPARE = """\
paceline compare RUN RUN [RUN ...] [--json] [--page FILE [--charts svg|bokeh]]

Compares each run with the first: arguments, model, plan, code, data, packages, hardware; then every optimizer step in
the journals, bit for bit. For the first step that differs it names loss, gradient norm, learning rate or samples, and
the causes that the records allow: argument, data order, data content, code or numerics.

  --json         print the comparisons as JSON
  --page FILE    also write a page with the curves of the runs in common charts, and what differs
  --charts FORM  svg (the default), or bokeh, as in `paceline report`

Exit code 0 if nothing differs but names, places and times; 1 if anything does, or no recorded step is common to the
runs; 2 for a folder without a run, or a damaged file."""

SERVE = """\
paceline serve FOLDER [--port N]

Serves the pages of the runs in a folder and below it at http://127.0.0.1:8765/: a table of the runs, the page of each,
and comparisons of those that are ticked. A page follows its run while it trains. The server answers to this machine
only, reads only the files of runs, and changes nothing. Ctrl-C ends it.

  --port N  the port (default 8765); 0 takes a free one"""

WATCH = """\
paceline watch RUN [--once] [--json] [--every SECONDS]

Shows a live or finished run in the terminal: state, steps, remaining time, loss, learning rate, speed, the last
evaluation, the seconds of each activity, and what went wrong. Ends when the run ends. Where the output is no terminal,
it prints a line whenever the run has made progress.

  --once           print one frame
  --json           print one record as JSON
  --every SECONDS  seconds between two updates (default 1)

Evaluations and the seconds of activities between two checkpoints are known of runs with report_to=["jsonl"]."""

RUNS = """\
paceline runs FOLDER [--sort COLUMN] [--json]

Lists the runs below a folder: name, state (running, finished, interrupted, failed), step, best metric, time, and the
options that differ from their defaults and are not the same in all listed runs. Folders with damaged or foreign files
are named below the table.

  --sort COLUMN  name, state, step, best, time, or started (default); -COLUMN reverses the order; runs without a value
                 come last
  --json         print the runs as JSON"""

REPLAY = """\
paceline replay RUN --step N [--show M] [--trust] [--blame] [--json]

Reruns one optimizer step of a run from the newest checkpoint before it, and prints its loss, gradient norm and learning
rate, their bitwise comparison with the recorded ones, and its samples, to find the batch that caused a spike. The run
itself is not changed.

  RUN          the folder of a run of `paceline train` or `paceline demo`
  --step N     the optimizer step, as counted by log.jsonl and the progress bar
  --show M     number of its samples to show (default 3)
  --blame      rank the samples by their own loss and gradient norm at the weights that the step started from
  --json       print one JSON object: the step, what was recorded, and the indices of its samples

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

AVERAGE = """\
paceline average CHECKPOINT CHECKPOINT [...] -o OUTPUT [--overwrite] [--max-shard-size 5GB]
paceline average CHECKPOINT CHECKPOINT [...] -o OUTPUT --greedy CONFIG.yaml

Writes the mean of the weights of checkpoints of one architecture as safetensors, one tensor at a time, with the
configuration and tokenizer of the first, into a folder that from_pretrained loads; soup.json names the checkpoints.
Tensors that are not floating-point must be equal. The folder is created atomically.

  CHECKPOINT             sharded or full; of a run's folder the newest valid one
  -o OUTPUT              a folder that is new or empty
  --greedy CONFIG.yaml   from the best on, take a checkpoint only if the mean with it is not worse in the evaluation of
                         this configuration, by its metric_for_best_model (default: loss)
  --overwrite            replace the folder if it exists; weights of other programs in it, which would stay, are refused
  --max-shard-size SIZE  maximum size of one file (default 50GB)"""

CONTROL = """\
paceline control RUN COMMAND [VALUE] [--timeout SECONDS]

Has a run that is training now do something at its next optimizer step, and prints the answer. RUN is its output folder,
on the same machine and of the same user.

  save                      write a checkpoint
  evaluate                  evaluate
  stop                      end the run, with a checkpoint if saving is on
  learning-rate VALUE       set the learning rate; the rest of the schedule is scaled by the same factor
  scale-learning-rate X     multiply the learning rate, and the rest of the schedule, by X
  weight-decay VALUE        set the weight decay of the parameters that have one
  max-grad-norm VALUE       clip gradients to this norm; 0 disables clipping

  --timeout SECONDS         how long to wait for the answer (default 60)

Changes of settings are recorded in control.jsonl, and a replay makes them too. Exit code 1 if the run refuses the
command, or does not answer."""

TEXTS = {
    "control": CONTROL,
    "demo": DEMO,
    "init": INIT,
    "plan": PLAN,
    "doctor": DOCTOR,
    "train": TRAIN,
    "schema": SCHEMA,
    "completion": COMPLETION,
    "launch": LAUNCH,
    "report": REPORT,
    "compare": COMPARE,
    "runs": RUNS,
    "serve": SERVE,
    "watch": WATCH,
    "verify": VERIFY,
    "export": EXPORT,
    "average": AVERAGE,
    "replay": REPLAY,
    "search": SEARCH,
}


def help_on(command: str, words: Sequence[str]) -> str:
    """Returns the help of a command or, with words after `--help`, the options that contain one of the words."""
    if command not in ("demo", "train"):
        return TEXTS[command]
    before = ["", *words]  # a word behind an option is its value
    wanted = [
        word
        for last, word in zip(before, words, strict=False)
        if not word.startswith("-") and word != "help" and (not last.startswith("-") or last in ("-h", "--help"))
    ]
    if command == "demo":
        wanted = [word for word in wanted if word not in ("text", "digits")]
    else:
        wanted = [word for word in wanted if not word.endswith((".yaml", ".yml", ".json"))]
    return list_options(wanted) if wanted else TEXTS[command]


def list_options(words: Iterable[str]) -> str:
    """Lists name, default, choices and help of the options whose name or help contains one of the words.

    A word that is the name of an option, or commonly means one, lists that option alone, and the names of the others.
    """
    wanted = [word.lower().lstrip("-").replace("-", "_") for word in words]
    items = argument_fields()
    meant = [name for word in wanted for name in ([word] if word in items else meant_by(word, items))]
    found = [
        name
        for name, item in items.items()
        if any(word in name or word.replace("_", " ") in help_of(item).lower() for word in wanted)
    ]
    lines = [line for name in meant or found for line in describe_option(name, items[name])]
    also = [name for name in items if name not in meant and any(word in name for word in wanted)] if meant else []
    if also:
        lines += textwrap.wrap("also: " + ", ".join(also), width=110, initial_indent="  ", subsequent_indent="    ")
    return "\n".join(lines) if lines else f"no option contains {' or '.join(wanted)}"


def help_of(item: Field[Any]) -> str:
    """Returns the text of an option."""
    return str(item.metadata.get("help", ""))


def describe_option(name: str, item: Field[Any]) -> list[str]:
    """Returns the lines about one option: its default, its text, and its choices if it has some."""
    default = "[]" if callable(item.default_factory) else str(item.default)
    condition = "; with --framework tf" if is_option_of_tensorflow(name) else ""
    choices = choices_of(item, option_hints().get(name))
    texts = [help_of(item), *([f"Choices: {', '.join(choices)}."] if choices else [])]
    lines = [f"  --{name} (default {default}{condition})"]
    for text in texts:
        lines += textwrap.wrap(text, width=108, initial_indent="      ", subsequent_indent="      ")
    return lines
