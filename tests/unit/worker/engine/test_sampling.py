from __future__ import annotations

import math
import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import stats
from torch import Tensor

from headrace.worker.engine import sampling
from headrace.worker.engine.largest import block_maxima, largest, likeliest
from headrace.worker.engine.sampling import BatchSampling, SamplingParams, noise_key, sample

CPU = torch.device("cpu")
Probabilities = NDArray[np.float64]


def exact_distribution(logits: Sequence[float], params: SamplingParams) -> Probabilities:
    """The probability of each token, by sorting everything and applying one rule after the other."""
    values = np.asarray(logits, dtype=np.float64)
    order = sorted(range(len(values)), key=lambda token: (-values[token], token))
    if params.temperature == 0:
        order = order[:1]
    kept = order[: params.top_k] if params.top_k else order
    weights = np.exp((values[kept] - values[kept[0]]) / (params.temperature or 1.0))
    probs = weights / weights.sum()
    if params.top_p < 1:
        num = 1
        while num < len(kept) and probs[:num].sum() < params.top_p:
            num += 1
        kept, probs = kept[:num], probs[:num]
    survivors = probs >= params.min_p * probs.max()
    result = np.zeros(len(values))
    result[np.asarray(kept)[survivors]] = probs[survivors] / probs[survivors].sum()
    return result


def draw(logits: Tensor, rows: Sequence[SamplingParams], positions: Sequence[int] | None = None) -> list[int]:
    """Tokens of a batch in which no row fails."""
    at = torch.tensor(positions if positions is not None else [5] * len(rows))
    tokens, failed = sample(logits, BatchSampling(list(rows), CPU), at)
    assert not failed.any()
    found: list[int] = tokens.tolist()
    return found


def counts(logits: Sequence[float], settings: Sequence[SamplingParams], draws: int) -> NDArray[np.int64]:
    """How often each token is drawn under each of the settings, all of them in each batch: (settings, V)."""
    chunk = 1000
    rows = [
        SamplingParams(
            temperature=each.temperature,
            top_k=each.top_k,
            top_p=each.top_p,
            min_p=each.min_p,
            noise_key=noise_key(f"{number} {index}"),
        )
        for number in range(chunk)
        for index, each in enumerate(settings)
    ]
    batch = BatchSampling(rows, CPU)
    values = torch.tensor(logits).expand(len(rows), -1)
    found = np.zeros((len(settings), len(logits)), dtype=np.int64)
    for position in range(draws // chunk):
        tokens, _ = sample(values, batch, torch.full((len(rows),), position))
        for index in range(len(settings)):
            found[index] += np.bincount(tokens[index :: len(settings)].numpy(), minlength=len(logits))
    return found


def p_value(found: NDArray[np.int64], expected: Probabilities) -> float:
    """Of the chi-square test, tokens that are expected fewer than five times taken together."""
    wanted = expected * found.sum()
    rare = wanted < 5
    observed, theory = np.append(found[~rare], found[rare].sum()), np.append(wanted[~rare], wanted[rare].sum())
    if theory[-1] == 0:
        observed, theory = observed[:-1], theory[:-1]
    return 1.0 if len(theory) == 1 else float(stats.chisquare(observed, theory, sum_check=False).pvalue)


# Ties at the top, at the 3rd and at the 8th place; a tail that is likely enough to be seen.
PEAKED = [1.5, 3.0, 0.5, 3.0, 2.0, 2.0, 2.0, -1.0, 0.5, 0.5, 0.0, -0.5, -2.0, 1.0, 0.5, -8.0, -math.inf, 0.25]
PEAKED_SETTINGS = [
    SamplingParams(),
    SamplingParams(temperature=0.5),
    SamplingParams(temperature=2.5),
    SamplingParams(temperature=0.0, top_k=3, top_p=0.5),
    SamplingParams(top_k=4),
    SamplingParams(top_k=9, temperature=1.7),
    SamplingParams(top_k=1000),
    SamplingParams(top_p=0.75),
    SamplingParams(top_p=0.9, temperature=0.7),
    SamplingParams(top_p=0.999, temperature=3.0),
    SamplingParams(min_p=0.2),
    SamplingParams(min_p=0.3, temperature=2.0),
    SamplingParams(top_k=7, top_p=0.8),
    SamplingParams(top_k=10, top_p=0.95, min_p=0.15, temperature=1.3),
    SamplingParams(top_p=0.95, min_p=0.1),
]


def test_100_000_draws_have_the_exact_frequencies_for_all_settings_in_one_batch() -> None:
    found = counts(PEAKED, PEAKED_SETTINGS, 100_000)
    for params, frequencies in zip(PEAKED_SETTINGS, found, strict=True):
        expected = exact_distribution(PEAKED, params)
        assert frequencies.sum() == 100_000
        assert set(frequencies.nonzero()[0]) <= set(expected.nonzero()[0]), params
        assert p_value(frequencies, expected) > 1e-3, params


def test_the_chi_square_test_would_notice_a_wrong_distribution() -> None:
    found = counts(PEAKED, PEAKED_SETTINGS[:3], 100_000)
    assert p_value(found[0], exact_distribution(PEAKED, SamplingParams(temperature=1.03))) < 1e-3
    assert p_value(found[1], exact_distribution(PEAKED, SamplingParams(temperature=0.51))) < 1e-3


def test_a_flat_nucleus_of_more_tokens_than_are_looked_at_first_is_drawn_from_exactly() -> None:
    generator = np.random.default_rng(2)
    logits = (generator.normal(size=310) * 0.2).tolist()
    settings = [SamplingParams(top_p=0.9), SamplingParams(top_p=0.5), SamplingParams(top_p=0.05)]
    sizes = [np.count_nonzero(exact_distribution(logits, params)) for params in settings]
    assert sizes[0] > sizes[1] > sampling._NUCLEUS_WIDTH > sizes[2]
    for params, frequencies in zip(settings, counts(logits, settings, 40_000), strict=True):
        expected = exact_distribution(logits, params)
        assert set(frequencies.nonzero()[0]) <= set(expected.nonzero()[0])
        assert p_value(frequencies, expected) > 1e-3, params


@pytest.mark.parametrize("vocab", [1, 2, 63, 64, 65, 130, 1000])
def test_top_k_above_the_vocabulary_is_no_limit(vocab: int) -> None:
    logits = torch.randn(1, vocab, generator=torch.Generator().manual_seed(vocab))
    for position in range(20):
        free = draw(logits, [SamplingParams(noise_key=4)], [position])
        for top_k in (vocab, vocab + 1, 2**62, 2**63 - 1):
            assert draw(logits, [SamplingParams(noise_key=4, top_k=top_k)], [position]) == free


def test_greedy_ignores_all_other_parameters_and_takes_the_lower_of_equal_tokens() -> None:
    logits = torch.tensor([[1.0, 4.0, 4.0, 2.0]]).expand(5, -1)
    rows = [
        SamplingParams(temperature=0.0, top_k=k, top_p=p, min_p=m, noise_key=k)
        for k, p, m in [(0, 1.0, 0.0), (0, 0.5, 0.0), (0, 0.0, 0.0), (3, 0.1, 0.9), (9, 0.9, 1.0)]
    ]
    assert draw(logits, rows) == [1] * 5


@pytest.mark.parametrize("top_p", [0.0, 1e-300, 1e-12, 0.3])
@pytest.mark.parametrize("top_k", [0, 5])
def test_a_tiny_top_p_leaves_the_likeliest_token(top_p: float, top_k: int) -> None:
    logits = torch.randn(50, 300, generator=torch.Generator().manual_seed(1))
    logits[:, 7] = 8.0
    rows = [SamplingParams(top_p=top_p, top_k=top_k, noise_key=i) for i in range(50)]
    assert draw(logits, rows) == [7] * 50


@pytest.mark.parametrize("top_k", [0, 8, 30])
@pytest.mark.parametrize(("kept", "likely"), [(1, 2), (1, 4), (2, 4), (3, 4), (3, 8), (5, 8), (7, 8)])
def test_no_token_is_kept_once_those_before_it_hold_top_p(kept: int, likely: int, top_k: int) -> None:
    logits = torch.tensor([0.0] * likely + [-torch.inf] * 32).expand(400, -1)
    rows = [SamplingParams(top_p=kept / likely, top_k=top_k, noise_key=noise_key(i)) for i in range(400)]
    assert set(draw(logits, rows)) == set(range(kept))


def test_top_p_of_one_keeps_every_token() -> None:
    logits = torch.zeros(2000, 40)
    for top_k in (0, 40):
        rows = [SamplingParams(top_p=1.0, top_k=top_k, noise_key=noise_key(i)) for i in range(2000)]
        assert set(draw(logits, rows)) == set(range(40))


def test_min_p_of_one_keeps_only_the_likeliest() -> None:
    logits = torch.tensor([[0.0, 3.0, 2.99, 3.0]]).expand(400, -1)
    rows = [SamplingParams(min_p=1.0, noise_key=noise_key(i)) for i in range(400)]
    assert set(draw(logits, rows)) == {1, 3}


@pytest.mark.parametrize("vocab", [10, 64, 200, 20_000])
@pytest.mark.parametrize("top_k", [1, 2, 5])
def test_among_equal_logits_exactly_k_survive_those_of_the_lower_ids(vocab: int, top_k: int) -> None:
    logits = torch.zeros(1, vocab)
    logits[0, vocab - 1] = 0.5
    found = {
        token
        for position in range(100)
        for token in draw(logits, [SamplingParams(top_k=top_k, noise_key=9)], [position])
    }
    assert found == {vocab - 1, *range(top_k - 1)}


def random_params(generator: random.Random) -> SamplingParams:
    return SamplingParams(
        temperature=generator.choice([0.0, 1e-30, 0.3, 1.0, 2.0, 1e300]),
        top_k=generator.choice([0, 0, 1, 3, 40, 10**6]),
        top_p=generator.choice([1.0, 1.0, 0.0, 0.4, 0.95]),
        min_p=generator.choice([0.0, 0.0, 0.05, 1.0]),
        noise_key=generator.getrandbits(64) - 2**63,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("vocab", [5, 64, 300, 5001])
def test_a_row_draws_the_same_token_alone_and_in_any_batch(dtype: torch.dtype, vocab: int) -> None:
    generator = random.Random(vocab)
    torch.manual_seed(vocab)
    logits = (torch.randn(60, vocab) * torch.rand(60, 1) * 6).to(dtype)
    rows = [random_params(generator) for _ in range(60)]
    positions = [generator.randrange(2000) for _ in rows]
    alone = [draw(logits[i : i + 1], [rows[i]], [positions[i]])[0] for i in range(60)]
    for size in (2, 7, 32, 60):
        for _ in range(4):
            chosen = generator.sample(range(60), size)
            together = draw(logits[chosen], [rows[i] for i in chosen], [positions[i] for i in chosen])
            assert together == [alone[i] for i in chosen]


def test_every_drawn_token_is_one_that_the_rows_own_parameters_allow() -> None:
    generator = random.Random(5)
    torch.manual_seed(5)
    logits = torch.randn(400, 150) * 2
    rows = [random_params(generator) for _ in range(400)]
    for row, token in enumerate(draw(logits, rows)):
        params = rows[row]
        cold = SamplingParams(temperature=max(params.temperature, 1e-6) if params.temperature else 0.0)
        clipped = SamplingParams(
            temperature=min(cold.temperature, 1e30), top_k=params.top_k, top_p=params.top_p, min_p=params.min_p
        )
        assert exact_distribution(logits[row].tolist(), clipped)[token] > 0, params


def test_the_logits_are_not_changed() -> None:
    generator = random.Random(6)
    for dtype in (torch.float32, torch.bfloat16):
        logits = torch.randn(80, 200).to(dtype)
        logits[3, 5] = torch.nan
        before = logits.clone()
        sample(logits, BatchSampling([random_params(generator) for _ in range(80)], CPU), torch.arange(80))
        assert torch.equal(logits.nan_to_num(), before.nan_to_num())


@pytest.mark.parametrize("params", [SamplingParams(temperature=0.0), *PEAKED_SETTINGS], ids=str)
def test_a_row_without_a_finite_maximum_fails_alone(params: SamplingParams) -> None:
    torch.manual_seed(8)
    logits = torch.randn(7, 200)
    rows = [
        SamplingParams(
            temperature=params.temperature, top_k=params.top_k, top_p=params.top_p, min_p=params.min_p, noise_key=i
        )
        for i in range(7)
    ]
    sound = draw(logits, rows)
    broken = logits.clone()
    broken[1] = torch.nan
    broken[2, 17] = torch.nan
    broken[4, 0] = torch.inf
    broken[5] = -torch.inf
    tokens, failed = sample(broken, BatchSampling(rows, CPU), torch.full((7,), 5))
    assert failed.tolist() == [False, True, True, False, True, True, False]
    assert [tokens[i].item() for i in (0, 3, 6)] == [sound[i] for i in (0, 3, 6)]


@pytest.mark.parametrize("temperature", [5e-324, 1e-30, 1e-8])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e30])
@pytest.mark.parametrize("others", [{}, {"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.1}], ids=str)
def test_a_temperature_near_zero_is_greedy(temperature: float, scale: float, others: dict[str, float]) -> None:
    torch.manual_seed(9)
    logits = torch.randn(20, 300) * scale
    logits[:, 11] = logits.amax(dim=-1) * 1.5
    logits[:, 12] = -torch.inf
    rows = [SamplingParams(temperature=temperature, noise_key=i, **others) for i in range(20)]  # type: ignore[arg-type]
    assert draw(logits, rows) == [11] * 20


@pytest.mark.parametrize("temperature", [1e30, 1e39, 1.7e308])
@pytest.mark.parametrize("others", [{}, {"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.1}], ids=str)
def test_a_huge_temperature_draws_evenly_and_never_an_impossible_token(
    temperature: float, others: dict[str, float]
) -> None:
    logits = torch.tensor([[1.0, -torch.inf, 5.0, -3.0]]).expand(300, -1)
    rows = [SamplingParams(temperature=temperature, noise_key=noise_key(i), **others) for i in range(300)]  # type: ignore[arg-type]
    frequencies = np.bincount(draw(logits, rows), minlength=4)
    assert frequencies[1] == 0
    assert frequencies[[0, 2, 3]].min() > 70


def stable_order(scores: Tensor, count: int) -> list[list[int]]:
    return [
        sorted(range(scores.shape[1]), key=lambda token: (-values[token], token))[:count] for values in scores.tolist()
    ]


@pytest.fixture(params=["compiled", "plain"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Search with the compiled kernels, and without."""
    if request.param == "plain":
        monkeypatch.setattr("headrace.worker.engine.largest.has_cpu_kernels", lambda device_type, dtype: False)
    else:
        pytest.importorskip("numba")


DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@DTYPES
@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("vocab", [1, 63, 64, 65, 1000, 4096, 5003])
def test_the_largest_are_those_of_a_stable_sort_whatever_the_ties(vocab: int, dtype: torch.dtype) -> None:
    generator = random.Random(vocab)
    for trial in range(12):
        torch.manual_seed(trial)
        steps = generator.choice([1, 2, 5, 50])
        scores = torch.randint(-steps, steps + 1, (4, vocab)).float() / generator.choice([1, 3])
        scores[torch.rand(4, vocab) < generator.choice([0.0, 0.9, 0.999])] = -torch.inf
        scores[torch.rand(4, vocab) < 0.1] = -0.0
        scores = scores.to(dtype)
        count = generator.choice([1, 2, 7, 31, vocab])
        values, ids = largest(scores, min(count, vocab))
        assert ids.tolist() == stable_order(scores, min(count, vocab))
        assert torch.equal(values, scores.gather(1, ids))


@DTYPES
@pytest.mark.usefixtures("way")
def test_the_largest_are_right_for_floats_of_every_size(dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    bits = torch.randint(-(2**31), 2**31, (8, 6000)).int()
    scores = bits.view(torch.float32).nan_to_num(nan=0.0, posinf=3e38, neginf=-torch.inf).to(dtype)
    assert largest(scores, 40)[1].tolist() == stable_order(scores, 40)


@DTYPES
@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("nan", [torch.nan, -torch.nan])
def test_maxima_are_those_of_the_blocks_and_nan_where_there_is_one(dtype: torch.dtype, nan: float) -> None:
    torch.manual_seed(4)
    scores = torch.randn(5, 200).to(dtype)
    scores[1, 64:128] = -torch.inf
    scores[2, 130], scores[2, 70] = torch.inf, -0.0
    scores[3, 199] = nan
    maxima = block_maxima(scores)
    expected = torch.stack([part.amax(dim=-1) for part in scores.split(64, dim=-1)], dim=-1)
    assert torch.equal(maxima.nan_to_num(nan=9.0), expected.nan_to_num(nan=9.0))
    tokens, best = likeliest(scores, maxima)
    fine = [0, 1, 2, 4]
    assert tokens[fine].tolist() == [values.index(max(values)) for values in scores[fine].tolist()]
    assert best[:, 0].isnan().tolist() == [False, False, False, True, False]


def test_equal_seeds_give_equal_keys_and_others_do_not() -> None:
    assert noise_key(7) == noise_key(7)
    assert noise_key("job") == noise_key("job", 0)
    keys = {noise_key(seed, index) for seed in (*range(200), "a", "b", "ab", -1) for index in range(5)}
    assert len(keys) == 204 * 5
    assert all(-(2**63) <= key < 2**63 for key in keys)


def test_the_key_of_a_seed_never_changes() -> None:
    # BLAKE2b of b"7\x000", by coreutils: printf '7\0000' | b2sum -l 64
    assert noise_key(7) == int.from_bytes(bytes.fromhex("cb1f28672f9b3c7a"), "little", signed=True)
