"""``outpace convert``."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from outpace.heads.base import TargetShape
from outpace.heads.checkpoint import save_head
from outpace.methods.heads.medusa import Medusa, MedusaConfig

Run = Callable[..., Any]


def test_a_head_is_written_in_another_format_and_a_full_folder_is_kept(
    run: Run, tmp_path: Path
) -> None:
    source, out = tmp_path / "own", tmp_path / "public"
    save_head(Medusa(TargetShape(8, 20, 2, "a model"), MedusaConfig(depths=2)), source)
    assert run("convert", str(source), "--to", "medusa", "--out", str(out)).exit_code == 0
    about = json.loads((out / "config.json").read_text())
    assert about["medusa_num_heads"] == 2
    assert about["base_model_name_or_path"] == "a model"
    again = run("convert", str(source), "--to", "medusa", "--out", str(out))
    assert again.exit_code == 2
    assert "exists already" in again.stderr
    wrong = run("convert", str(source), "--to", "medsa", "--out", str(tmp_path / "x"))
    assert wrong.exit_code == 2
    assert "did you mean 'medusa'" in wrong.stderr


def test_weights_are_kept_in_4_bits_where_that_is_asked(run: Run, tmp_path: Path) -> None:
    source, out = tmp_path / "own", tmp_path / "small"
    save_head(Medusa(TargetShape(32, 64, 2, "a model"), MedusaConfig(depths=2)), source)
    wrong = run(
        "convert", str(source), "--to", "medusa", "--quantization", "int4", "--out", str(out)
    )
    assert wrong.exit_code == 2
    assert "keeps no weights in 4 bits: use --to outpace" in wrong.stderr
    assert not out.exists()
    found = run(
        "convert", str(source), "--to", "outpace", "--quantization", "int4", "--out", str(out)
    )
    assert found.exit_code == 0
    assert json.loads((out / "config.json").read_text())["weights_in_blocks"] == "Q4_1"
