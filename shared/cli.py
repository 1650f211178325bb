"""The `headrace` command. Each command is loaded when it is called, from the side that registered it."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any

import click

from headrace.shared.environment import refuse_unknown_variables
from headrace.shared.errors import HeadraceError

_GROUP = "headrace.commands"


class _Failure(click.ClickException):
    """An error that is shown as one line; the exit code says that nothing could be run."""

    exit_code = HeadraceError.exit_code

    def show(self, file: Any = None) -> None:
        click.echo(f"headrace: error: {self.format_message()}", err=True)


class _Commands(click.Group):
    """Commands from entry points, so that `headrace submit` never imports what only `headrace worker` needs."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(entry_points(group=_GROUP).names)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        for found in entry_points(group=_GROUP, name=cmd_name):
            command = found.load()
            assert isinstance(command, click.Command)
            return command
        return None

    def invoke(self, ctx: click.Context) -> Any:
        try:
            refuse_unknown_variables()
            return super().invoke(ctx)
        except HeadraceError as error:
            _Failure(str(error)).show()
            raise click.exceptions.Exit(error.exit_code) from error
        except ModuleNotFoundError as error:
            if (error.name or "").startswith("headrace"):
                raise
            raise _Failure(f"this needs {error.name}: pip install 'headrace[worker]'") from error


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="headrace")
def main() -> None:
    """Batched bulk text generation on Redis.

    Put prompts in a file and run `headrace run prompts.txt -o results.jsonl`, or start workers with `headrace
    worker` and submit to them from anywhere with `headrace submit` or headrace.producer.
    """
