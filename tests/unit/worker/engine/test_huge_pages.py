from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from factories import CPU

from headrace.worker.engine import huge_pages
from headrace.worker.engine.huge_pages import move_into_huge_pages, zeros

SIZE = 16 * 2**20
ENABLED = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def bytes_in_huge_pages() -> int:
    found = re.search(r"AnonHugePages:\s+(\d+) kB", Path("/proc/self/smaps_rollup").read_text())
    assert found is not None
    return int(found[1]) * 1024


@pytest.fixture
def asked_for() -> None:
    if not ENABLED.exists() or "[madvise]" not in ENABLED.read_text():
        pytest.skip("this system gives huge pages to nobody, or to all")


def test_it_is_torchs_zeros() -> None:
    for shape, dtype in (((3, 4), torch.bfloat16), ((SIZE // 4,), torch.float32), ((0,), torch.float32)):
        assert torch.equal(zeros(shape, dtype=dtype, device=CPU), torch.zeros(shape, dtype=dtype))


def test_zeros_lie_in_huge_pages(asked_for: None) -> None:
    before = bytes_in_huge_pages()
    tensor = zeros((4, SIZE), dtype=torch.uint8, device=CPU)
    if bytes_in_huge_pages() == before:
        pytest.skip("none is free")
    assert bytes_in_huge_pages() - before > 3 * SIZE
    assert not tensor.any()


def test_what_is_moved_stays_what_it_was(asked_for: None) -> None:
    tensor = torch.arange(SIZE)  # 8 bytes each
    expected = tensor.sum().item()
    before = bytes_in_huge_pages()
    move_into_huge_pages()
    if bytes_in_huge_pages() == before:
        pytest.skip("none is free, or this kernel does not move what is there")
    assert bytes_in_huge_pages() - before > 7 * SIZE
    assert tensor.sum().item() == expected == SIZE * (SIZE - 1) // 2


def test_a_system_that_does_not_say_what_lies_where_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huge_pages, "_MAPS", tmp_path / "none")
    monkeypatch.setattr(huge_pages, "_advise", lambda *given: pytest.fail("asked for memory that it does not know"))
    move_into_huge_pages()


def test_only_the_process_own_memory_is_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    maps = tmp_path / "maps"
    maps.write_text(
        "00400000-00800000 r-xp 00000000 fe:00 77   /usr/bin/python3\n"
        "01000000-01400000 rw-p 00000000 00:00 0    [heap]\n"
        "02000000-02400000 rw-p 00001000 fe:00 78   /usr/lib/libc.so\n"
        "03000000-03400000 rw-s 00000000 00:01 9    /dev/shm/other\n"
        "04000000-04400000 ---p 00000000 00:00 0 \n"
        "05000000-05400000 rw-p 00000000 00:00 0 \n"
    )
    monkeypatch.setattr(huge_pages, "_MAPS", maps)
    asked: list[tuple[int, int, int]] = []
    monkeypatch.setattr(huge_pages, "_advise", lambda *given: asked.append(given))
    move_into_huge_pages()
    assert {(start, end) for start, end, _ in asked} == {(0x1000000, 0x1400000), (0x5000000, 0x5400000)}
