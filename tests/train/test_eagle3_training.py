"""An EAGLE-3 head from a recipe: how it starts, that it learns, and that what was trained decodes."""

import dataclasses
from typing import Any

import pytest
import torch

from eagle.config import DataConfig, FeaturesConfig, HeadConfig, Recipe, TargetConfig, TrainConfig
from eagle.data.features import extract
from eagle.data.prepare import prepare
from eagle.data.store import FeatureStore
from eagle.decode.decoder import SpeculativeDecoder
from eagle.errors import EagleError
from eagle.formats.checkpoint import load_head
from eagle.heads.eagle3 import Eagle3Head
from eagle.heads.vocabulary import DraftVocabulary
from eagle.target.target import Target
from eagle.train import run
from eagle.train.loop import train
from tests.tiny import VOCAB, save_tiny_target, write_conversations
from tests.train.stores import SMALL, with_train
from tests.train.test_step import metrics_of


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    """A target of 8 layers and a float32 store of two documents with what an EAGLE-3 head reads."""
    folder = tmp_path_factory.mktemp("eagle3")
    made = Recipe(
        output_dir=str(folder / "run"),
        target=TargetConfig(model=str(save_tiny_target(folder / "target", num_hidden_layers=8)), device="cpu"),
        data=DataConfig(sources=(str(write_conversations(folder / "chat.jsonl", 2)),), validation_fraction=0.0),
        features=FeaturesConfig(dtype="float32"),
        head=HeadConfig(version="eagle3"),
        train=TrainConfig(**SMALL),
    )
    prepare(made)
    extract(made)
    return made


def test_the_store_holds_the_layers_that_the_head_reads(recipe: Recipe) -> None:
    store = FeatureStore.open(recipe.store_dir)
    assert store.manifest["layers"] == [2, 4, 5]
    aux_TA = store[0].aux_TA
    assert aux_TA is not None
    assert aux_TA.shape[-1] == 3 * 32


@pytest.mark.parametrize("start", ["target", "random"])
def test_its_lm_head_starts_as_the_recipe_says(start: Any, recipe: Recipe) -> None:
    tokens = FeatureStore.open(recipe.store_dir).token_layers()
    vocabulary = DraftVocabulary(target_ids_D=torch.tensor([3, 5, 40, 100]), target_size=VOCAB)
    one = dataclasses.replace(recipe, head=dataclasses.replace(recipe.head, lm_head_init=start))
    head = run.build_head(one, hidden_size=32, vocabulary=vocabulary, tokens=tokens)
    assert isinstance(head, Eagle3Head)
    assert head.aux_layers == (2, 4, 5)
    assert head.vocabulary is not None
    rows_DH = tokens.lm_head_VH[vocabulary.target_ids_D]
    assert torch.equal(head.lm_head.weight, rows_DH) == (start == "target")
    assert all(parameter.requires_grad for parameter in head.parameters())


def test_what_does_not_go_with_the_version_is_refused(recipe: Recipe) -> None:
    for head, message in (
        (HeadConfig(version="eagle3", fc_bias=True), "fc has no bias"),
        (HeadConfig(version="eagle3", aux_layers=(2, 9)), r"hidden states 0 \.\. 7"),
        (HeadConfig(aux_layers=(2, 4)), "eagle1 looks at the last feature alone"),
    ):
        with pytest.raises(EagleError, match=message):
            run.build_head(dataclasses.replace(recipe, head=head), hidden_size=32)


@pytest.mark.slow
def test_two_documents_are_learnt_by_heart(recipe: Recipe) -> None:
    """They are also what it is validated on: its drafts are the target's choice there, over its own features too."""
    long = with_train(
        recipe, epochs=250, lr=1e-2, noise=0.0, unroll_steps=3, log_every=50, eval_every=500, save_every=500
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FeatureStore, "split", lambda store, name: [0, 1])
        head = load_head(train(long))
    last = metrics_of(long)[-1]
    assert last["val_top1_agreement"] > 0.95
    assert last["val_agreement"][1] > 0.9  # what unrolling trains
    assert isinstance(head, Eagle3Head)

    target = Target.from_config(long.target)
    decoder = SpeculativeDecoder.from_pretrained(target, head)
    ids_1T = FeatureStore.open(long.store_dir)[0].input_ids_T[None, :20]
    out = decoder.generate(ids_1T, max_new_tokens=16, eos_token_id=[])
    assert torch.equal(out.sequences, decoder.plain().generate(ids_1T, max_new_tokens=16, eos_token_id=[]).sequences)
