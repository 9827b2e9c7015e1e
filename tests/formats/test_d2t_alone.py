"""A folder with d2t and no t2d: what may be something else than offsets is refused, by import, export and lint alike."""

from pathlib import Path
from typing import Any

import pytest
import torch

from eagle.cli.main import main
from eagle.errors import EagleError
from eagle.formats.read import read_head
from tests import eagle3_reference as reference
from tests.formats import folders
from tests.tiny import save_tiny_target


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_target(tmp_path_factory.mktemp("target"), num_hidden_layers=8)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda ids_D: torch.zeros_like(ids_D), "d2t is zero at all 90 draft ids, as if never filled"),
        (lambda ids_D: torch.arange(len(ids_D)), r"90 different numbers, 0 \.\. 89, as a list of target ids has"),
        (lambda ids_D: ids_D[ids_D < 300], r"different numbers, \d+ \.\. 29\d, as a list of target ids has"),
        (lambda ids_D: ids_D[ids_D < 300].flip(0), "different numbers"),
    ],
)
def test_a_map_that_no_t2d_confirms_is_not_guessed(
    wrong: Any, message: str, target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Zeros, 0 .. D-1 and ids lead, read as offsets, to tokens that exist: nothing would show it but the acceptance."""
    ids_D = torch.randperm(reference.V)[: reference.D].sort().values
    d2t = wrong(ids_D)
    state = reference.random_state(draft=len(d2t)) | {"d2t": d2t}
    source = folders.write(tmp_path / "source", *folders.modelopt(state))
    with pytest.raises(EagleError, match=message):
        read_head(source)
    assert main(["import", str(source), str(tmp_path / "out"), "--target", str(target)]) == 2
    assert "beside it t2d (bool, 384 long" in capsys.readouterr().err
    assert main(["export", str(source), str(tmp_path / "out"), "--to", "vllm", "--target", str(target)]) == 2
    assert main(["lint", str(source), "--for", "vllm"]) == 1
    assert not (tmp_path / "out").exists()


def test_a_map_of_the_first_tokens_is_taken_where_t2d_says_so(tmp_path: Path) -> None:
    state = reference.random_state() | {
        "d2t": torch.zeros(90, dtype=torch.int64),
        "t2d": torch.arange(reference.V) < 90,
    }
    config, named = folders.modelopt(state)
    head = read_head(folders.write(tmp_path, config, {**named, "t2d": state["t2d"]})).head
    assert head.vocabulary is not None
    assert head.vocabulary.target_ids_D.tolist() == list(range(90))
