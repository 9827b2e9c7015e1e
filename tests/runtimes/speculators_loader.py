"""speculators 0.9's form as vLLM takes it: its config is converted to a flat one, then vLLM's EAGLE-3 loader runs.

- speculators_model_type must be eagle3; speculators_config must name proposal_methods[0].speculative_tokens and
  verifier.name_or_path; transformer_layer_config must be an object.
- The flat config is transformer_layer_config plus draft_vocab_size, target_hidden_size, norm_before_residual (TRUE where it is
  missing), eagle_aux_hidden_state_layer_ids.
- speculators itself has parameters named as in the file: layers.0.*, fc (of as many states as there are ids, else 3), norm,
  lm_head, embed_tokens, and buffers d2t (int64) and t2d (bool); it makes no `midlayer`.
"""

from pathlib import Path

import torch

from tests.runtimes.loaded import Loaded, read
from tests.runtimes.vllm_loader import _theta, build


def load(folder: Path, *, target_layers: int, lm_head_VH: torch.Tensor) -> Loaded:
    values, state = read(folder)
    if "model_type" in values:
        raise ValueError("a top-level model_type is not speculators' form")
    if values["speculators_model_type"] != "eagle3":
        raise ValueError("Expected one of eagle3")
    proposal = values["speculators_config"]["proposal_methods"][0]
    assert type(proposal["speculative_tokens"]) is int
    assert isinstance(values["speculators_config"]["verifier"]["name_or_path"], str)
    assert values["architectures"] == ["Eagle3Speculator"]
    layer = dict(values["transformer_layer_config"])
    assert layer["model_type"] in ("llama", "qwen3")
    own = {key for key in state if not key.startswith("layers.0.")}
    assert own <= {"fc.weight", "norm.weight", "lm_head.weight", "embed_tokens.weight", "d2t", "t2d"}, own
    assert "embed_tokens.weight" in own
    ids = values.get("eagle_aux_hidden_state_layer_ids")
    assert state["fc.weight"].shape[1] == (len(ids) if ids else 3) * layer["hidden_size"]
    if "d2t" in own:
        assert (state["d2t"].dtype, state["t2d"].dtype) == (torch.int64, torch.bool)
        assert tuple(state["t2d"].shape) == (layer["vocab_size"],)
    flat = {
        **layer,
        "draft_vocab_size": values.get("draft_vocab_size"),
        "norm_before_residual": values.get("norm_before_residual", True),
    }
    if values.get("eagle_aux_hidden_state_layer_ids"):
        flat["eagle_aux_hidden_state_layer_ids"] = values["eagle_aux_hidden_state_layer_ids"]
    return build(flat, state, theta=_theta(flat), target_layers=target_layers, lm_head_VH=lm_head_VH, eagle3=True)
