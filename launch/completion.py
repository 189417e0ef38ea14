"""`draftsmith completion bash`: script by which a shell completes commands, options and their choices."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class CompletionConfig:
    """Print the completion script of a shell: draftsmith completion bash > ~/.bash_completion.d/draftsmith

    For bash, source the file; for zsh, name it `_draftsmith` and put it into a folder of `fpath`; for fish, put it into
    ~/.config/fish/completions. Generate it again after an update.

    Attributes:
        shell: The shell that reads the script.
    """

    shell: Literal["bash", "zsh", "fish"]


def run(config: CompletionConfig) -> None:
    """Print the script, which completes files too where --config has names."""
    from cyclopts import App

    from draftsmith.data.console import print_text
    from draftsmith.launch.arguments import application
    from draftsmith.launch.commands import COMMANDS

    root = App(name="draftsmith", help_flags=("--help",), version_flags=("--version",))
    groups: dict[str, App] = {}
    for name, command in COMMANDS.items():
        *group, last = name.split()
        parent = root
        for word in group:
            if word not in groups:
                groups[word] = App(name=word)
                root.command(groups[word])
            parent = groups[word]
        parent.command(application(f"draftsmith {name}", command.config_class(), command.positional, name=last))
    script = root.generate_completion(shell=config.shell)

    # cyclopts completes choices or files, not both.
    if config.shell == "bash":  # files, if nothing else fits
        script = script.replace("complete -F ", "complete -o default -F ")
    elif config.shell == "fish":
        script = re.sub(r"(-l config) -x -a", r"\1 -r -F -a", script)
    else:
        script = re.sub(r"(?<=:config:)\(([\w. -]+)\)", r"{compadd -- \1; _files}", script)
        script = re.sub(r"(compset -P '--config='\n\s*compadd -- .*)", r"\1; _files", script)
    print_text(script)
