"""The pictures of `headrace bench --plot`. Needs the bench extra."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.shared.engine_report import CurvePoint, StepCurves
from headrace.shared.errors import SettingsError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STEP_COST = "step_cost.png"
KV_CACHE = "kv_cache.png"
_DOTS_PER_INCH = 150


def require_plotting() -> None:
    """Raise SettingsError if pictures can't be drawn."""
    if importlib.util.find_spec("matplotlib") is None:
        raise SettingsError("`headrace bench --plot` needs the bench extra: pip install 'headrace[bench]'")


def plot_curves(curves: StepCurves, folder: Path, title: str) -> list[Path]:
    """Draw both pictures into `folder`, which is made if need be, and return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    return [_step_cost(curves, folder / STEP_COST, title), _kv_cache(curves, folder / KV_CACHE, title)]


def _step_cost(curves: StepCurves, path: Path, title: str) -> Path:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    by_rows, by_cached = figure.subplots(1, 2)
    _draw(by_rows, curves.by_rows, f"{curves.cached_tokens} cached tokens a row")
    by_rows.set(xlabel="rows", title="time of a decode step by rows")
    _draw(by_cached, curves.by_cached_tokens, f"{curves.rows} rows")
    by_cached.set(xlabel="cached tokens a row", title="time of a decode step by cached tokens")
    for axes in (by_rows, by_cached):
        axes.set_ylim(0, 1.1 * axes.dataLim.ymax)
        axes.set_ylabel("milliseconds")
        axes.legend()
    figure.suptitle(title)
    figure.savefig(path, dpi=_DOTS_PER_INCH)
    return path


def _kv_cache(curves: StepCurves, path: Path, title: str) -> Path:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    _draw(axes, curves.next_token_cached, "with the KV cache")
    _draw(axes, curves.next_token_recomputed, "the whole prefix recomputed")
    axes.set(xlabel="tokens before it", ylabel="milliseconds", title="time of one row's next token")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    axes.legend()
    figure.suptitle(title)
    figure.savefig(path, dpi=_DOTS_PER_INCH)
    return path


def _draw(axes: Axes, points: Sequence[CurvePoint], label: str) -> None:
    axes.plot([point.at for point in points], [point.seconds * 1e3 for point in points], marker="o", label=label)
    axes.grid(visible=True, alpha=0.3)
