"""The commands of ``onefold`` by name, each imported when it is used.

Importing all of them takes longer than most commands, so the list of commands has their summaries here, and a command
imports only its own module.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

#: The first paragraph of each command's help, in the order of the list.  The command is the function or group of its
#: name in the module of its name.
SUMMARIES = {
    "worker": "Run the handlers of an app until stopped.",
    "workers": "Show the running workers and the messages that they have leased.",
    "preflight": "Check every open run, every pending message and every schedule against this code.",
    "cancel": "Cancel a message; one that runs can no longer commit.",
    "chain": "Show what caused a message and what it caused, as a tree, with uncertain effects.",
    "migrate": "Bring a database's schema to this version.  Safe to run twice, and on several machines at once.",
    "restored": "End all leases after a restore from backup; run it before any worker is started on the database.",
    "version": "Print the version.",
    "runs": "Show workflows, send them signals, cancel, resume or restart them.",
    "effects": "Show and resolve uncertain effects and stuck undos.",
    "events": "Show events and their subscribers.",
    "dead": "Show dead letters, let them run again, or close them.",
    "schedules": "Show and change the schedules of recurring tasks.",
}


class _Commands(MutableMapping[str, Any]):
    """The commands by name; reading one imports it."""

    def __init__(self, markup: Any) -> None:
        self._markup = markup
        self._loaded: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in SUMMARIES:
            raise KeyError(name)
        if name not in self._loaded:
            self._loaded[name] = self._load(name)
        return self._loaded[name]

    def __setitem__(self, name: str, command: Any) -> None:
        raise TypeError(f"add {name} to SUMMARIES, with a module of this name")

    def __delitem__(self, name: str) -> None:
        raise TypeError(f"remove {name} from SUMMARIES")

    def __iter__(self) -> Iterator[str]:
        return iter(SUMMARIES)

    def __len__(self) -> int:
        return len(SUMMARIES)

    def _load(self, name: str) -> Any:
        found = getattr(importlib.import_module(f"onefold.cli.{name}"), name)
        # Typer makes commands only as parts of an app.
        holder = typer.Typer(add_completion=False, rich_markup_mode=self._markup)
        if isinstance(found, typer.Typer):
            holder.add_typer(found, name=name)
        else:
            holder.callback()(_nothing)
            holder.command(name)(found)
        return typer.main.get_group(holder).commands[name]


def _nothing() -> None:
    """Do nothing; with a callback, Typer makes a group also of a single command."""


class LazyGroup(TyperGroup):
    """The group of all commands; its help, and completion of its words, import none of them."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = _Commands(self.rich_markup_mode)
        self._lists = False

    def list_commands(self, ctx: Any) -> list[str]:
        return list(SUMMARIES)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if self._lists:
            return TyperCommand(cmd_name, help=SUMMARIES[cmd_name])
        return self.commands.get(cmd_name)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        with self._listing():
            super().format_help(ctx, formatter)

    def shell_complete(self, ctx: Any, incomplete: str) -> Any:
        with self._listing():
            return super().shell_complete(ctx, incomplete)

    @contextmanager
    def _listing(self) -> Iterator[None]:
        """Let ``get_command`` return summaries meanwhile."""
        self._lists = True
        try:
            yield
        finally:
            self._lists = False
