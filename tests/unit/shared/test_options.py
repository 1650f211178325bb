"""The options that several commands share."""

from __future__ import annotations

import json
from dataclasses import asdict

import click
import pytest
from click.testing import CliRunner, Result

from headrace.shared.errors import SettingsError
from headrace.shared.options import EngineOptions, engine_options


@click.command()
@engine_options
@click.option("--other")
def show(engine: EngineOptions, other: str | None) -> None:
    click.echo(json.dumps({"engine": asdict(engine), "words": engine.words(), "other": other}))


def invoke(*words: str, **environment: str) -> Result:
    return CliRunner(env=environment).invoke(show, words)


@pytest.mark.parametrize(
    "words",
    [
        (),
        (
            "--model",
            "m",
            "--slots",
            "3",
            "--most-slots",
            "2",
            "--dtype",
            "float32",
            "--max-context",
            "99",
            "--other",
            "x",
        ),
    ],
)
def test_an_engines_options_reach_another_command_as_they_were_given(words: tuple[str, ...]) -> None:
    first = json.loads(invoke(*words).stdout)
    second = json.loads(invoke(*first["words"]).stdout)
    assert second["engine"] == first["engine"]
    assert first["other"] == ("x" if words else None)


def test_an_option_wins_over_its_variable_and_the_variable_over_the_default() -> None:
    outcome = invoke("--slots", "3", HEADRACE_SLOTS="5", HEADRACE_MAX_CONTEXT="99", HEADRACE_DTYPE="float16")
    engine = json.loads(outcome.stdout)["engine"]
    assert (engine["slots"], engine["max_context"], engine["dtype"], engine["device"]) == (3, 99, "float16", "auto")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--slots", "0"), "--slots is 0; it needs at least 1"),
        (("--most-slots", "0"), "--most-slots is 0; it needs at least 1"),
        (("--max-context", "1"), "--max-context is 1; it needs at least 2"),
        (("--dtype", "int4"), "--dtype is 'int4'; allowed are auto, bfloat16, float16, float32"),
        (("--quantization", "int4"), "--quantization is 'int4'; allowed are none, int8"),
        (("--device", "gpu"), "--device is 'gpu'; allowed are auto, cpu, cuda and cuda:N"),
    ],
)
def test_a_value_that_no_engine_has_is_refused_with_what_is_allowed(words: tuple[str, ...], says: str) -> None:
    error = invoke(*words).exception
    assert isinstance(error, SettingsError)
    assert str(error).startswith(says)
