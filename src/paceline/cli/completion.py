"""`paceline completion SHELL`: the script with which bash and zsh complete commands, options and their choices."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from paceline.args.option_docs import choices_of
from paceline.cli.errors import UsageError, check_no_option, suggest
from paceline.cli.init import TASKS
from paceline.cli.options import argument_fields, option_hints
from paceline.cli.texts import TEXTS
from paceline.core.commands import ACTIONS, CHANGES

# commands that take the options of the arguments
OF_ARGUMENTS = ("demo", "plan", "doctor", "train", "search")
SHELLS = ("bash", "zsh")
ZSH = "autoload -U +X compinit bashcompinit && compinit -u && bashcompinit\n"
SCRIPT = """\
# source <(paceline completion {shell})
{before}_paceline() {{
    local word="${{COMP_WORDS[COMP_CWORD]}}" command="${{COMP_WORDS[1]}}" words=""
    if [[ $COMP_CWORD -eq 1 ]]; then
        words="{commands}"
    elif [[ "$word" == -* ]]; then
        case "$command" in
{options}
        esac
    elif [[ $COMP_CWORD -eq 2 && "$command" == init ]]; then
        words="{tasks}"
    elif [[ $COMP_CWORD -eq 2 && "$command" == completion ]]; then
        words="{shells}"
    elif [[ $COMP_CWORD -eq 3 && "$command" == control ]]; then
        words="{controls}"
    else
        case "${{COMP_WORDS[COMP_CWORD - 1]}}" in
{choices}
        esac
    fi
    COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o default -F _paceline paceline
"""


def run(words: Sequence[str]) -> int:
    """Prints the script.

    Raises:
        UsageError: no shell is given, or one that is unknown.
    """
    if len(words) != 1 or words[0] not in SHELLS:
        wrong = next((word for word in words if word not in SHELLS), None)
        if wrong is None:
            raise UsageError("completion takes one shell, bash or zsh: source <(paceline completion bash)")
        check_no_option("completion", words)
        raise UsageError(f"completion: there is no shell {wrong!r}{suggest(wrong, SHELLS)}")
    print(make_script(words[0]), end="")
    return 0


def make_script(shell: str) -> str:
    """Returns the script for a shell. Where it has no words, the shell completes names of files."""
    hints = option_hints()
    choices = {f"--{name}": choices_of(item, hints.get(name)) for name, item in argument_fields().items()}
    return SCRIPT.format(
        shell=shell,
        before=ZSH if shell == "zsh" else "",
        commands=" ".join(TEXTS),
        options=_cases({command: options_of(command) for command in TEXTS}),
        tasks=" ".join(TASKS),
        shells=" ".join(SHELLS),
        controls=" ".join((*ACTIONS, *CHANGES)),
        choices=_cases(choices),
    )


def options_of(command: str) -> list[str]:
    """Returns the options of a command: those that its help names, and the arguments where it takes them."""
    named = re.findall(r"(?<![\w-])--[a-z][\w-]*", TEXTS[command])
    arguments = [f"--{name}" for name in argument_fields()] if command in OF_ARGUMENTS else []
    return sorted({"--help", *named, *arguments})


def _cases(words: Mapping[str, Sequence[str]]) -> str:
    return "\n".join(f'            {name}) words="{" ".join(given)}" ;;' for name, given in words.items() if given)
