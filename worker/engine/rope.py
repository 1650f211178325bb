"""Rotary position embeddings (Su et al. 2021, RoFormer), in the half-split form of the Llama checkpoints."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from headrace.worker.engine.config import ModelConfig, RopeScaling


def inverse_frequencies(config: ModelConfig) -> Tensor:
    """Radians a position, for each pair of a head's dimensions, after scaling: (D/2,) float32."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    frequencies = 1.0 / config.rope_theta**exponents / config.rope_factor
    return frequencies if config.rope_scaling is None else _stretch(frequencies, config.rope_scaling)


def _stretch(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Llama 3.1's rule: waves longer than the original context are slowed, short ones kept, those between blended."""
    wavelength = 2 * math.pi / frequencies
    longest_kept = scaling.original_max_position / scaling.high_freq_factor
    shortest_slowed = scaling.original_max_position / scaling.low_freq_factor
    blend = (scaling.original_max_position / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    blended = (1 - blend) * frequencies / scaling.factor + blend * frequencies
    stretched = torch.where(wavelength > shortest_slowed, frequencies / scaling.factor, blended)
    return torch.where(wavelength < longest_kept, frequencies, stretched)


def rotation_table(config: ModelConfig, positions: int, dtype: torch.dtype) -> Tensor:
    """Cosines and sines of every position: (positions, 2, D), computed in float32 and rounded once."""
    angles = torch.outer(torch.arange(positions).float(), inverse_frequencies(config))  # (P, D/2)
    angles = torch.cat((angles, angles), dim=-1)  # (P, D)
    return torch.stack((angles.cos(), angles.sin()), dim=1).to(dtype)


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each head's pairs by its token's angle: (T, heads, D), (T, 1, D) twice -> (T, heads, D)."""
    first, second = heads.chunk(2, dim=-1)
    return heads * cos + torch.cat((-second, first), dim=-1) * sin
