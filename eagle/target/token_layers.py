"""The two layers of a target that touch tokens: its embedding and its LM head, frozen.

Training a head needs only these two of the target; they travel with the feature store. Shapes: B rows, T tokens,
H hidden, V vocabulary.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from eagle.errors import EagleError
from eagle.files import atomic_path, write_json
from eagle.target.engine import require_packable
from eagle.target.products import PackedLinear, Product, choose


class TokenLayers(nn.Module):
    """embed: ids -> embeddings; logits: features (after the final norm) -> logits, with the family's scaling and caps.

    logits = softcap * tanh(scale * (W f + b) / softcap), softcap and b being optional.
    """

    def __init__(
        self,
        *,
        embedding_VH: torch.Tensor,
        lm_head_VH: torch.Tensor,
        lm_head_bias_V: torch.Tensor | None = None,
        embedding_scale: float = 1.0,
        logit_scale: float = 1.0,
        logit_softcap: float | None = None,
    ):
        super().__init__()
        self.embedding_VH = _frozen(embedding_VH)
        self.lm_head_VH = self.embedding_VH if lm_head_VH is embedding_VH else _frozen(lm_head_VH)
        self.lm_head_bias_V = None if lm_head_bias_V is None else _frozen(lm_head_bias_V)
        self.embedding_scale, self.logit_scale, self.logit_softcap = embedding_scale, logit_scale, logit_softcap
        self._packed: PackedLinear | None = None

    @property
    def row_share(self) -> float:
        """What logits at one more position cost, as a share of those at the first. The weights are read once for all, which
        makes it little: as timed where the product was chosen by timing; where nothing was, on CPUs half as much."""
        if self._packed is not None:
            return self._packed.row_share
        return 0.5 if self.lm_head_VH.device.type == "cpu" else 0.05

    def packed(self, given: Mapping[str, Product] | None = None) -> "TokenLayers":
        """The same layers, sharing the weights, with an LM head that is fast for several rows (engine "compiled").

        given: the products, where an earlier run chose them.

        Raises EagleError where packing does not exist (see eagle/target/engine.py).
        """
        require_packable(self)
        layers = self._with_head(self.lm_head_VH, self.lm_head_bias_V)
        layers._packed = PackedLinear(layers.lm_head_VH, layers.lm_head_bias_V)
        choose([layers._packed], given)
        return layers

    def _with_head(self, lm_head_VH: torch.Tensor, bias_V: torch.Tensor | None) -> "TokenLayers":
        return TokenLayers(
            embedding_VH=self.embedding_VH,
            lm_head_VH=lm_head_VH,
            lm_head_bias_V=bias_V,
            embedding_scale=self.embedding_scale,
            logit_scale=self.logit_scale,
            logit_softcap=self.logit_softcap,
        )

    @classmethod
    def of_model(cls, model: PreTrainedModel, config: PreTrainedConfig) -> "TokenLayers":
        """The layers of a loaded model; the weights are shared, not copied."""
        embedding, lm_head = model.get_input_embeddings(), model.get_output_embeddings()
        if lm_head is None:
            raise EagleError(
                f"{type(model).__name__} has no LM head; load it as a causal LM (AutoModelForCausalLM), not as a bare model"
            )
        scale = 1.0
        if getattr(config, "logit_scale", None) is not None:  # Cohere
            scale = float(config.logit_scale)
        if getattr(config, "logits_scaling", None) is not None:  # Granite
            scale = 1.0 / float(config.logits_scaling)
        return cls(
            embedding_VH=embedding.weight,
            lm_head_VH=lm_head.weight,
            lm_head_bias_V=getattr(lm_head, "bias", None),
            embedding_scale=float(getattr(embedding, "scalar_embed_scale", getattr(embedding, "embed_scale", 1.0))),
            logit_scale=scale,
            logit_softcap=getattr(config, "final_logit_softcapping", None),
        )

    @property
    def vocab_size(self) -> int:
        return int(self.lm_head_VH.shape[0])

    @property
    def hidden_size(self) -> int:
        return int(self.lm_head_VH.shape[1])

    def embed(self, ids_BT: torch.Tensor) -> torch.Tensor:
        """int64 [B, T] -> [B, T, H], in the weights' dtype."""
        embeddings_BTH = nn.functional.embedding(ids_BT.to(self.embedding_VH.device), self.embedding_VH)
        if self.embedding_scale == 1.0:
            return embeddings_BTH
        return embeddings_BTH * torch.tensor(self.embedding_scale).to(embeddings_BTH.dtype)

    def logits(self, features: torch.Tensor) -> torch.Tensor:
        """[..., H] -> [..., V], in the weights' dtype."""
        features = features.to(device=self.lm_head_VH.device, dtype=self.lm_head_VH.dtype)
        if self._packed is not None:
            logits = self._packed(features)
        else:
            logits = nn.functional.linear(features, self.lm_head_VH, self.lm_head_bias_V)
        if self.logit_scale != 1.0:
            logits = logits * self.logit_scale
        if self.logit_softcap is not None:
            logits = torch.tanh(logits / self.logit_softcap) * self.logit_softcap
        return logits

    def restricted(self, ids_D: torch.Tensor) -> "TokenLayers":
        """The same embedding, and an LM head for the tokens ids_D (int64 [D]) alone: logits become [..., D]. Copies D rows."""
        ids_D = ids_D.to(self.lm_head_VH.device)
        bias_D = None if self.lm_head_bias_V is None else self.lm_head_bias_V[ids_D].contiguous()
        layers = self._with_head(self.lm_head_VH[ids_D].contiguous(), bias_D)
        return layers if self._packed is None else layers.packed()

    def save(self, directory: str | Path) -> None:
        """Writes token_layers.safetensors and token_layers.json into `directory`, atomically."""
        directory = Path(directory)
        tensors = {"embedding": self.embedding_VH}
        if self.lm_head_VH is not self.embedding_VH:
            tensors["lm_head"] = self.lm_head_VH
        if self.lm_head_bias_V is not None:
            tensors["lm_head_bias"] = self.lm_head_bias_V
        with atomic_path(directory / "token_layers.safetensors") as temporary:
            save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, temporary)
        scales = ("embedding_scale", "logit_scale", "logit_softcap")
        write_json(directory / "token_layers.json", {name: getattr(self, name) for name in scales})

    @classmethod
    def load(cls, directory: str | Path) -> "TokenLayers":
        """Reads what `save` wrote. Raises EagleError when a file is missing or damaged."""
        directory = Path(directory)
        try:
            tensors = load_file(directory / "token_layers.safetensors")
            scales = json.loads((directory / "token_layers.json").read_text(encoding="utf-8"))
        except (OSError, SafetensorError, json.JSONDecodeError) as error:
            raise EagleError(
                f"cannot read the target's embedding and LM head from {directory} ({error}); "
                "delete the folder and extract the features again with `eagle features`"
            ) from error
        embedding = tensors["embedding"]
        return cls(
            embedding_VH=embedding,
            lm_head_VH=tensors.get("lm_head", embedding),
            lm_head_bias_V=tensors.get("lm_head_bias"),
            **scales,
        )


def _frozen(tensor: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(tensor.detach(), requires_grad=False)
