"""The command-line options that several commands have, declared once: one name, one variable, one explanation."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import click

from headrace.shared import environment
from headrace.shared.errors import SettingsError

F = TypeVar("F", bound=Callable[..., Any])
DTYPES = ("auto", "bfloat16", "float16", "float32")
QUANTIZATIONS = ("none", "int8")
DEVICES = ("auto", "cpu", "cuda")


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """What decides an engine's shape. None means: chosen to fit the model and the machine. Raises SettingsError.

    `most_slots` bounds a number of slots that is chosen: more than there are jobs would be memory cleared for nothing.
    """

    model: str
    slots: int | None = None
    most_slots: int | None = None
    dtype: str = "auto"
    device: str = "auto"
    quantization: str = "none"
    max_context: int | None = None

    def __post_init__(self) -> None:
        if self.slots is not None and self.slots < 1:
            raise SettingsError(f"--slots is {self.slots}; it needs at least 1")
        if self.most_slots is not None and self.most_slots < 1:
            raise SettingsError(f"--most-slots is {self.most_slots}; it needs at least 1")
        if self.max_context is not None and self.max_context < 2:
            raise SettingsError(f"--max-context is {self.max_context}; it needs at least 2: a prompt and an answer")
        if self.dtype not in DTYPES:
            raise SettingsError(f"--dtype is {self.dtype!r}; allowed are {', '.join(DTYPES)}")
        if self.quantization not in QUANTIZATIONS:
            raise SettingsError(f"--quantization is {self.quantization!r}; allowed are {', '.join(QUANTIZATIONS)}")
        if self.device.partition(":")[0] not in DEVICES:
            raise SettingsError(f"--device is {self.device!r}; allowed are {', '.join(DEVICES)} and cuda:N")

    def words(self) -> list[str]:
        """The options as another command takes them."""
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        return [
            word
            for name, value in given.items()
            if value is not None
            for word in (f"--{name.replace('_', '-')}", str(value))
        ]


def together(*options: Callable[[F], F]) -> Callable[[F], F]:
    """Several options as one decorator; `--help` shows them in this order."""
    return lambda command: functools.reduce(lambda done, option: option(done), reversed(options), command)


model_option = click.option(
    "--model",
    envvar=environment.MODEL,
    default=environment.DEFAULT_MODEL,
    show_default=True,
    help="An alias (see `headrace models list`), a folder in the Hugging Face layout, a .gguf file, or a Hub id.",
)
queue_option = click.option(
    "--queue", envvar=environment.QUEUE, metavar="NAME", help="The RQ queue.  [default: the model's]"
)
tenant_option = click.option(
    "--tenant", envvar=environment.TENANT, metavar="NAME", help="Whose jobs they are: tenants share workers fairly."
)
_engine_options = together(
    model_option,
    click.option(
        "--slots", type=int, envvar=environment.SLOTS, metavar="N", help="Rows decoded at once.  [default: what fits]"
    ),
    click.option("--most-slots", type=int, hidden=True),
    click.option(
        "--dtype",
        envvar=environment.DTYPE,
        default=EngineOptions.dtype,
        metavar="TYPE",
        help=f"{', '.join(DTYPES)}.  [default: bfloat16 where the hardware has it]",
    ),
    click.option(
        "--device",
        envvar=environment.DEVICE,
        default=EngineOptions.device,
        metavar="DEVICE",
        help="auto, cpu, cuda or cuda:N.  [default: cuda if there is one]",
    ),
    click.option(
        "--quantization",
        envvar=environment.QUANTIZATION,
        default=EngineOptions.quantization,
        show_default=True,
        metavar="KIND",
        help="none or int8: matrix products in eight bits, faster on a CPU with VNNI and less exact.",
    ),
    click.option(
        "--max-context",
        type=int,
        envvar=environment.MAX_CONTEXT,
        metavar="N",
        help="Most tokens of prompt and answer together.  [default: the model's, at most 2048]",
    ),
)


def engine_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the engine's options, as one argument `engine`."""

    @functools.wraps(command)
    def bundled(**given: Any) -> Any:
        engine = EngineOptions(**{field.name: given.pop(field.name) for field in fields(EngineOptions)})
        return command(engine=engine, **given)

    return _engine_options(bundled)


def redis_option(default: str = "localhost") -> Callable[[F], F]:
    """`--redis`; `default` says what serves without it."""
    return click.option(
        "--redis",
        "redis_url",
        envvar=environment.REDIS_URL,
        metavar="URL",
        help=f"The server, as redis://host:port/db.  [default: {default}]",
    )
