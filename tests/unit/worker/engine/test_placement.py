from __future__ import annotations

from pathlib import Path

import pytest
import torch
from factories import CPU, kv_cache, model_config

from headrace.shared.errors import ModelError, SettingsError
from headrace.worker.engine import placement
from headrace.worker.engine.placement import choose_device, choose_dtype, choose_max_context, choose_slots

CONFIG = model_config(num_layers=2, num_kv_heads=2, num_heads=2, head_dim=16, max_positions=8192)
ROW_BYTES = 2 * 2 * 2 * 16 * 4 * 1000  # at 1,000 positions in float32


def slots(
    monkeypatch: pytest.MonkeyPatch, asked: int | None, free: int, max_context: int = 1000, most: int | None = None
) -> int:
    monkeypatch.setattr(placement, "_free_bytes", lambda device: free)
    return choose_slots(asked, most, CONFIG, max_context=max_context, dtype=torch.float32, device=CPU)


def test_as_many_slots_as_asked_for_if_they_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    assert slots(monkeypatch, 5, 2**30) == 5
    assert slots(monkeypatch, 500, 2**40) == 500


def test_more_slots_than_fit_are_refused_with_the_number_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    free = 10 * ROW_BYTES  # of which 6 tenths are used
    assert slots(monkeypatch, 6, free) == 6
    with pytest.raises(
        SettingsError, match=r"--slots 7 at 1000 positions needs .*; 6 slots fit, or lower --max-context"
    ):
        slots(monkeypatch, 7, free)


def test_without_being_asked_as_many_slots_as_fit_up_to_a_default(monkeypatch: pytest.MonkeyPatch) -> None:
    assert slots(monkeypatch, None, 10 * ROW_BYTES) == 6
    assert slots(monkeypatch, None, 2**40) == 256
    assert slots(monkeypatch, None, 2**40, most=46) == 46
    assert slots(monkeypatch, None, 10 * ROW_BYTES, most=46) == 6
    assert slots(monkeypatch, 5, 2**40, most=3) == 5


def test_a_model_of_which_not_one_row_fits_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match=r"at 1000 positions.*lower --max-context"):
        slots(monkeypatch, None, ROW_BYTES)
    with pytest.raises(SettingsError, match="0 slots fit"):
        slots(monkeypatch, 1, ROW_BYTES)


def test_the_cache_takes_what_was_reckoned_with(monkeypatch: pytest.MonkeyPatch) -> None:
    number = slots(monkeypatch, None, 10 * ROW_BYTES)
    assert kv_cache(CONFIG, slots=number, max_context=1000).num_bytes == number * ROW_BYTES


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"max": "1000000", "used": "300000"}, 700_000),
        ({"max": "max", "used": "300000"}, 5_000_000_000),
        ({"max": "1000", "used": "2000"}, 0),
        ({}, 5_000_000_000),
    ],
)
def test_free_memory_is_what_machine_and_container_both_leave(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, files: dict[str, str], expected: int
) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    monkeypatch.setattr(placement, "_CGROUP_FILES", [(tmp_path / "max", tmp_path / "used")])
    monkeypatch.setattr(placement, "_machine_free_bytes", lambda: 5_000_000_000)
    assert placement._free_bytes(CPU) == expected


def test_this_machine_has_some_free_memory() -> None:
    assert 2**20 < placement._free_bytes(CPU) < 2**50


def test_the_context_is_as_asked_for_within_the_models_positions() -> None:
    assert choose_max_context(100, CONFIG) == 100
    assert choose_max_context(8192, CONFIG) == 8192
    with pytest.raises(SettingsError, match="--max-context is 8193; the model has 8192 positions"):
        choose_max_context(8193, CONFIG)


def test_without_being_asked_the_context_is_the_models_up_to_a_default() -> None:
    assert choose_max_context(None, CONFIG) == 2048
    assert choose_max_context(None, model_config(max_positions=512)) == 512


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("bfloat16", torch.bfloat16), ("float16", torch.float16), ("float32", torch.float32)],
)
def test_a_type_is_taken_by_its_name(name: str, dtype: torch.dtype) -> None:
    assert choose_dtype(name, CPU) is dtype


@pytest.mark.parametrize(
    ("capabilities", "dtype"),
    [
        ({"avx512_bf16": True}, torch.bfloat16),
        ({"amx_bf16": True}, torch.bfloat16),
        ({"avx512_bf16": False, "avx2": True}, torch.float32),
        ({}, torch.float32),
    ],
)
def test_a_cpu_gets_bfloat16_only_if_it_multiplies_it(
    monkeypatch: pytest.MonkeyPatch, capabilities: dict[str, bool], dtype: torch.dtype
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)
    assert choose_dtype("auto", CPU) is dtype


def test_a_device_that_is_not_there_is_a_settings_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto") == CPU
    assert choose_device("cpu") == CPU
    with pytest.raises(SettingsError, match="finds no CUDA device here; use --device cpu"):
        choose_device("cuda")


def test_the_number_of_a_cuda_device_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose_device("auto") == torch.device("cuda")
    assert choose_device("cuda:1") == torch.device("cuda:1")
    with pytest.raises(SettingsError, match="--device is cuda:2; torch finds 2 CUDA devices"):
        choose_device("cuda:2")


@pytest.mark.parametrize("name", ["cuda:x", "cpu:-3", "cuda:", "auto:1"])
def test_a_device_that_torch_cannot_read_is_a_settings_error(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(SettingsError, match=f"--device is '{name}'"):
        choose_device(name)
