from __future__ import annotations

import math
import random
from itertools import pairwise

import numpy as np
import pytest
import torch
from scipy import stats

from headrace.worker.engine.sampling import gumbel_noise, noise_key

MASK = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB


def mix(bits: int) -> int:
    """SplitMix64's output function, on whole numbers cut to 64 bits."""
    bits = (bits ^ (bits >> 30)) * MIX_1 & MASK
    bits = (bits ^ (bits >> 27)) * MIX_2 & MASK
    return bits ^ (bits >> 31)


def unmix(bits: int) -> int:
    """Its inverse."""
    bits = unshift(bits, 31) * pow(MIX_2, -1, 2**64) & MASK
    bits = unshift(bits, 27) * pow(MIX_1, -1, 2**64) & MASK
    return unshift(bits, 30)


def unshift(bits: int, by: int) -> int:
    """What gives `bits` when it is combined with itself shifted to the right."""
    result = bits
    for _ in range(64 // by + 1):
        result = bits ^ (result >> by)
    return result


def signed(bits: int) -> int:
    return bits - 2**64 if bits >= 2**63 else bits


def noise_of(key: int, position: int, token: int) -> float:
    """The definition, on whole numbers."""
    state = mix(mix(key & MASK) + position * GOLDEN & MASK)
    bits = mix(state + (token + 1) * GOLDEN & MASK)
    return -math.log(-math.log(((bits >> 12) + 0.5) / 2**52))


def noise(key: int, position: int, tokens: list[int]) -> list[float]:
    found: list[float] = gumbel_noise(torch.tensor([[key]]), torch.tensor([[position]]), torch.tensor([tokens]))[
        0
    ].tolist()
    return found


def test_the_reference_is_splitmix64() -> None:
    # The published first outputs of the seed 1234567.
    outputs = [mix(1234567 + GOLDEN * i & MASK) for i in range(1, 6)]
    assert outputs == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    assert all(unmix(mix(bits)) == bits for bits in (0, 1, MASK, *outputs))


def test_the_noise_is_the_one_defined_for_key_position_and_token() -> None:
    generator = random.Random(1)
    for _ in range(200):
        key = generator.getrandbits(64) - 2**63
        position = generator.choice([0, 1, 77, 2**31, generator.randrange(100_000)])
        tokens = [generator.randrange(200_000) for _ in range(5)]
        assert noise(key, position, tokens) == pytest.approx([noise_of(key, position, t) for t in tokens], rel=1e-13)


def test_the_noise_follows_gumbels_distribution_over_tokens_positions_and_keys() -> None:
    one, many = torch.tensor([[3]]), torch.arange(100_000)
    over_tokens = gumbel_noise(one, one, many[None])[0]
    over_positions = gumbel_noise(one, many[:, None], one)[:, 0]
    keys = torch.tensor([[noise_key(i)] for i in range(100_000)])
    over_keys = gumbel_noise(keys, one, one)[:, 0]
    small_keys = gumbel_noise(many[:, None], one, one)[:, 0]
    for values in (over_tokens, over_positions, over_keys, small_keys):
        assert stats.kstest(values.numpy(), stats.gumbel_r.cdf).pvalue > 1e-3


def test_noise_at_neighbouring_tokens_positions_and_keys_is_unrelated() -> None:
    keys, positions, tokens = torch.arange(40), torch.arange(40), torch.arange(60)
    grid = torch.stack([gumbel_noise(key.expand(40)[:, None], positions[:, None], tokens[None]) for key in keys])
    values = np.exp(-np.exp(-grid.numpy()))  # uniform: (key, position, token)
    for axis in range(3):
        for step in (1, 2, 3):
            near = np.moveaxis(values, axis, 0)
            correlation = np.corrcoef(near[:-step].ravel(), near[step:].ravel())[0, 1]
            assert abs(correlation) < 4 / math.sqrt(values.size)


def test_no_two_of_many_draws_share_their_noise() -> None:
    keys = torch.tensor([[noise_key(seed)] for seed in range(30)])
    rows = [
        gumbel_noise(keys, torch.full((30, 1), position), torch.arange(100)[None]).numpy() for position in range(30)
    ]
    assert len(np.unique(np.concatenate(rows))) == 30 * 30 * 100
    assert not any(np.isin(first, second).any() for first, second in pairwise(rows))


@pytest.mark.parametrize("bits", [0, 1, MASK, MASK - 1, MASK << 12 & MASK, 2**63, 2**63 - 1])
def test_the_noise_is_finite_at_the_very_ends_of_the_random_bits(bits: int) -> None:
    token, position = 5, 9
    state = unmix(bits) - (token + 1) * GOLDEN & MASK
    key = signed(unmix(unmix(state) - position * GOLDEN & MASK))
    found = noise(key, position, [token])[0]
    assert math.isfinite(found)
    assert found == pytest.approx(noise_of(key, position, token), rel=1e-13)


def test_the_noise_of_a_token_does_not_depend_on_what_is_asked_with_it() -> None:
    keys = torch.tensor([[noise_key(i)] for i in range(33)])
    positions = torch.arange(33)[:, None] * 7
    together = gumbel_noise(keys, positions, torch.arange(1000).expand(33, -1))
    for row in (0, 1, 17, 32):
        assert torch.equal(
            gumbel_noise(keys[row : row + 1], positions[row : row + 1], torch.arange(1000)[None])[0], together[row]
        )
        few = torch.tensor([[999, 3, 500, 4]])
        assert torch.equal(gumbel_noise(keys[row : row + 1], positions[row : row + 1], few)[0], together[row, few[0]])
