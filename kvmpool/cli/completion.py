"""`kvmpool completion`: the script that makes a shell complete commands and live names (see complete.py)."""

from __future__ import annotations

from typing import ClassVar

import click
from click.shell_completion import BashComplete, FishComplete, ShellComplete, ZshComplete

# bash splits the line at the colons of a PCI address: the words are taken from the line itself, and what stands before
# the last colon of the current word is not repeated.
_BASH = r"""
%(complete_func)s() {
    local IFS=$' \t\n' line=${COMP_LINE:0:COMP_POINT} response kind value current
    local -a words
    read -ra words <<< "$line"
    [[ $line == *[[:space:]] ]] && words+=("")
    current=${words[-1]}
    response=$(env COMP_WORDS="$line" COMP_CWORD=$((${#words[@]} - 1)) %(complete_var)s=bash_complete "$1")
    COMPREPLY=()
    while IFS=, read -r kind value; do
        case $kind in
            dir) compopt -o dirnames ;;
            file) compopt -o default ;;
            plain) COMPREPLY+=("${value#"${current%%"${current##*[:=]}"}"}") ;;
        esac
    done <<< "$response"
}
complete -o nosort -F %(complete_func)s %(prog_name)s
"""


class _Bash(BashComplete):
    source_template: ClassVar[str] = _BASH.lstrip()


_SHELLS: dict[str, type[ShellComplete]] = {"bash": _Bash, "zsh": ZshComplete, "fish": FishComplete}


@click.command()
@click.argument("shell", type=click.Choice(list(_SHELLS)))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the completion script of SHELL.

    \b
    bash: kvmpool completion bash > /etc/bash_completion.d/kvmpool
    zsh:  kvmpool completion zsh > "${fpath[1]}/_kvmpool"
    fish: kvmpool completion fish > ~/.config/fish/completions/kvmpool.fish
    """
    script = _SHELLS[shell](ctx.find_root().command, {}, "kvmpool", "_KVMPOOL_COMPLETE")
    click.echo(script.source())
