"""What headrace.producer exports, and what importing it must not cost."""

from __future__ import annotations

import subprocess
import sys

import headrace.producer as producer


def test_all_names_what_is_exported() -> None:
    assert producer.__all__ == sorted(producer.__all__)
    for name in producer.__all__:
        assert hasattr(producer, name)


def test_importing_it_and_its_commands_loads_neither_torch_nor_rq_nor_the_worker() -> None:
    program = (
        "import sys, headrace.producer, headrace.producer.cli;"
        "heavy = {'torch', 'transformers', 'numpy', 'rq', 'tqdm', 'zstandard', 'headrace.worker'};"
        "sys.exit(str(heavy & set(sys.modules)) if heavy & set(sys.modules) else 0)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
