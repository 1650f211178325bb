"""Where the engine runs, in which number type, and how many rows fit there."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import torch

from headrace.shared.errors import ModelError, SettingsError
from headrace.worker.engine import int8
from headrace.worker.engine.config import ModelConfig
from headrace.worker.engine.kv_cache import KVCache

DEFAULT_MAX_CONTEXT = 2048
_MOST_SLOTS = 256
_CGROUP_FILES = (  # a container's limit and use, in both versions of cgroups
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"), Path("/sys/fs/cgroup/memory/memory.usage_in_bytes")),
)
_CACHE_SHARE = 0.6  # of the memory that is free once the model is loaded


def choose_device(name: str) -> torch.device:
    """The device for `auto`, `cpu`, `cuda` or `cuda:N`. Raises SettingsError if it is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise SettingsError(f"--device is {name!r}; allowed are auto, cpu, cuda and cuda:N") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SettingsError(f"--device is {name}, but torch finds no CUDA device here; use --device cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise SettingsError(f"--device is {name}; torch finds {torch.cuda.device_count()} CUDA devices, from cuda:0 on")
    return device


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """The number type for a name; `auto` is bfloat16 where the hardware multiplies it, else what it does best."""
    if name != "auto":
        dtype = getattr(torch, name)
        assert isinstance(dtype, torch.dtype)
        return dtype
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    return torch.bfloat16 if _cpu_multiplies_bfloat16() else torch.float32


def _cpu_multiplies_bfloat16() -> bool:
    capabilities = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    names = ("avx512_bf16", "amx_bf16", "bf16")
    return any(capabilities.get(name, False) for name in names)


def choose_int8(quantization: str, device: torch.device) -> bool:
    """Whether products are done in eight bits. Raises SettingsError if that is asked for where it can't be done."""
    if quantization == "none":
        return False
    if not int8.is_supported(device):
        raise SettingsError(
            f"--quantization is {quantization}, which needs a CPU with VNNI (and --device cpu); leave it out here"
        )
    return True


def choose_max_context(asked: int | None, config: ModelConfig) -> int:
    """Positions a row gets, prompt and answer together. Raises SettingsError if more are asked than the model has."""
    if asked is not None and asked > config.max_positions:
        raise SettingsError(f"--max-context is {asked}; the model has {config.max_positions} positions")
    return asked or min(config.max_positions, DEFAULT_MAX_CONTEXT)


def choose_slots(
    asked: int | None,
    most: int | None,
    config: ModelConfig,
    *,
    max_context: int,
    dtype: torch.dtype,
    device: torch.device,
) -> int:
    """Rows of the KV cache: as asked if they fit; if nothing is asked as many as fit, up to a default and to `most`.

    Raises SettingsError if what is asked for does not fit into the free memory, ModelError if not even one row does.
    """
    row_bytes = config.kv_bytes_per_position(dtype.itemsize) * max_context
    free = int(_free_bytes(device) * _CACHE_SHARE)
    if asked is None:
        slots = min(_MOST_SLOTS if most is None else min(most, _MOST_SLOTS), free // row_bytes)
        if slots < 1:
            raise ModelError(
                f"the KV cache of one row takes {row_bytes / 2**20:,.0f} MiB at {max_context} positions, and "
                f"{free / 2**20:,.0f} MiB can be used; lower --max-context"
            )
        return slots
    if asked * row_bytes > free:
        raise SettingsError(
            f"--slots {asked} at {max_context} positions needs a KV cache of {asked * row_bytes / 2**20:,.0f} MiB, and "
            f"{free / 2**20:,.0f} MiB can be used; {free // row_bytes} slots fit, or lower --max-context"
        )
    return asked


def make_cache(
    config: ModelConfig, *, num_slots: int, max_context: int, dtype: torch.dtype, device: torch.device
) -> KVCache:
    """The fastest KV cache for the device: one with compiled kernels if they can be had, else the plain one."""
    if device.type == "cpu" and importlib.util.find_spec("numba") is not None:
        from headrace.worker.engine import cpu_kv_cache

        if cpu_kv_cache.is_supported(config, dtype, device):
            return cpu_kv_cache.CpuKVCache(config, num_slots=num_slots, max_context=max_context, dtype=dtype)
    spare_slots = 1 if device.type == "cuda" else 0  # for captured decode steps, see cuda_graphs
    return KVCache(
        config, num_slots=num_slots, max_context=max_context, dtype=dtype, device=device, spare_slots=spare_slots
    )


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    limits = [_machine_free_bytes()]
    for limit_file, used_file in _CGROUP_FILES:
        try:
            limits.append(int(limit_file.read_text()) - int(used_file.read_text()))
        except (OSError, ValueError):  # no such limit here, or "max"
            continue
    return max(0, min(limits))


def _machine_free_bytes() -> int:
    try:
        fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        # Not Linux: half of what the machine has is a careful guess.
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
