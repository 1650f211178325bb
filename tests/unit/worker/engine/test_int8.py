"""Products in eight bits: against exact integers, row by row, and refused where they can't be exact."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from factories import CPU, decoder, record, row
from torch import Tensor
from transformers import LlamaForCausalLM

from headrace.shared.errors import SettingsError
from headrace.worker.engine import int8
from headrace.worker.engine.config import ModelConfig
from headrace.worker.engine.elementwise import quantize_rows
from headrace.worker.engine.linear import Linear
from headrace.worker.engine.placement import choose_int8
from headrace.worker.engine.weights import load_decoder

Make = Callable[..., tuple[LlamaForCausalLM, Path]]
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
needs_vnni = pytest.mark.skipif(not int8.is_supported(CPU), reason="this processor has no VNNI")


def rounded(values: Tensor) -> tuple[Tensor, Tensor]:
    """Rows as whole numbers up to 127 and their scales, exactly: (N, K) -> (N, K), (N, 1)."""
    scales = values.double().abs().amax(dim=1, keepdim=True).clamp_min(1e-30) / 127
    return (values.double() / scales).round(), scales


@DTYPES
def test_rows_are_rounded_to_within_half_a_step(kind: str, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    hidden = (torch.randn(9, 100) * torch.logspace(-6, 6, 9)[:, None]).to(dtype)
    hidden[4] = 0
    whole, scales = quantize_rows(hidden)
    assert whole.dtype is torch.uint8
    assert (whole >= 1).all()
    step = hidden.double().abs().amax(dim=1) / 127
    torch.testing.assert_close(
        scales.double(), step.clamp_min(torch.finfo(torch.float32).tiny / 127), rtol=1e-6, atol=0
    )
    back = (whole.double() - 128) * scales.double()[:, None]
    assert ((back - hidden.double()).abs() <= 0.5001 * scales.double()[:, None]).all()


@DTYPES
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_row_that_is_not_finite_has_no_scale_and_its_neighbours_do(
    kind: str, dtype: torch.dtype, value: float
) -> None:
    hidden = torch.ones(3, 40, dtype=dtype)
    hidden[1, 33] = value
    _, scales = quantize_rows(hidden)
    assert scales.isnan().tolist() == [False, True, False]


@needs_vnni
@DTYPES
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@torch.inference_mode()
def test_a_product_is_that_of_the_rounded_numbers(kind: str, dtype: torch.dtype, bias: bool) -> None:
    torch.manual_seed(2)
    layer = Linear(576, 100, bias=bias).to(dtype)
    hidden = torch.randn(33, 576).to(dtype)
    weight, weight_scales = rounded(layer.weight)
    offset = layer.bias.double() if bias else 0.0
    exact = hidden.double() @ layer.weight.double().T + offset
    whole, scales = quantize_rows(hidden)
    expected = (whole.double() - 128) @ weight.T * scales.double()[:, None] * weight_scales.T + offset
    layer.pack(int8=True)
    found = layer(hidden)
    assert found.dtype == dtype
    # A weight that lies between two steps may be rounded to either.
    torch.testing.assert_close(found.double(), expected, rtol=2 * torch.finfo(dtype).eps, atol=2e-3)
    assert ((found.double() - exact).norm() / exact.norm()) < 0.02


@needs_vnni
@DTYPES
@torch.inference_mode()
def test_a_row_is_multiplied_alike_however_many_there_are(dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    layer = Linear(64, 96, bias=False).to(dtype)
    layer.pack(int8=True)
    rows = torch.randn(64, 64).to(dtype)
    whole = layer(rows)
    for count in (1, 2, 3, 7, 33):
        for start in (0, 1, 30):
            assert torch.equal(layer(rows[start : start + count]), whole[start : start + count]), (start, count)


@needs_vnni
@DTYPES
def test_a_model_in_eight_bits_is_near_the_whole_one_and_the_same_in_any_batch(
    checkpoint: Make, dtype: torch.dtype, kind: str
) -> None:
    folder = checkpoint(hidden_size=64)[1]
    config = ModelConfig.from_folder(folder)
    model = load_decoder(folder, config, max_context=256, dtype=dtype, device=CPU, int8=True)
    rows = [(str(number), [5 + number] * (1 + 9 * number)) for number in range(8)]
    alone = [record(model, [row(name, prompt, max_tokens=6)], slots=1, kind=kind) for name, prompt in rows]
    together = record(model, [row(name, prompt, max_tokens=6) for name, prompt in rows], slots=5, kind=kind)
    whole = record(
        decoder(folder, dtype=dtype), [row(name, prompt, max_tokens=6) for name, prompt in rows], slots=5, kind=kind
    )
    for single, (name, _) in zip(alone, rows, strict=True):
        together.assert_same(single, name)
        ours, theirs = together.logits[name][0].double(), whole.logits[name][0].double()
        assert (ours - theirs).norm() / theirs.norm() < 0.2
        assert not torch.equal(ours, theirs)


def test_eight_bits_are_refused_where_they_are_not_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not choose_int8("none", torch.device("cuda"))
    with pytest.raises(SettingsError, match="needs a CPU with VNNI"):
        choose_int8("int8", torch.device("cuda"))
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True})
    with pytest.raises(SettingsError, match="needs a CPU with VNNI"):
        choose_int8("int8", CPU)
