"""`draftsmith completion bash`: the script by which a shell completes the commands, their options and their choices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class CompletionConfig:
    """Prints what completes `draftsmith` in a shell: draftsmith completion bash > ~/.bash_completion.d/draftsmith

    For bash, source the file; for zsh, call it `_draftsmith` and put it into a folder of `fpath`. Make it again after
    an update.

    Attributes:
        shell: The shell that reads the script.
    """

    shell: Literal["bash", "zsh", "fish"]


def run(config: CompletionConfig) -> None:
    from cyclopts import App

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
        parent.command(application(last, command.config_class(), command.positional))
    print(root.generate_completion(shell=config.shell))
