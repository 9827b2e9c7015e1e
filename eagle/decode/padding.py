"""Prompts out of a padded batch. B rows, T tokens."""

import torch

from eagle.errors import EagleError


def unpadded(
    input_ids: torch.Tensor, attention_mask: torch.Tensor | None, *, pad: int | None, eos: list[int], vocab_size: int
) -> list[list[int]]:
    """The rows without their padding, left or right. input_ids: int64 [B, T]. attention_mask: [B, T], or None: guess.

    Raises EagleError for what is no batch of prompts.
    """
    if not isinstance(input_ids, torch.Tensor) or input_ids.is_floating_point():
        got = (
            f"a tensor of {input_ids.dtype}" if isinstance(input_ids, torch.Tensor) else f"a {type(input_ids).__name__}"
        )
        raise EagleError(f'input_ids is {got}; expected int64 [B, T]: call the tokenizer with return_tensors="pt"')
    if input_ids.ndim != 2 or 0 in input_ids.shape:
        raise EagleError(f"input_ids have shape {tuple(input_ids.shape)}; expected [B, T] with B and T >= 1")
    if attention_mask is None:
        attention_mask = _padding_mask(input_ids, pad, eos)
    if attention_mask is None:
        rows = input_ids.tolist()
    else:
        if attention_mask.shape != input_ids.shape:
            raise EagleError(
                f"attention_mask has shape {tuple(attention_mask.shape)}, input_ids {tuple(input_ids.shape)}; expected the same"
            )
        rows = []
        for number, (ids_T, mask_T) in enumerate(zip(input_ids, attention_mask.bool())):
            places = mask_T.nonzero().flatten()
            if len(places) == 0:
                raise EagleError(f"row {number} of attention_mask marks every token as padding; give each row a prompt")
            if int(places[-1] - places[0]) + 1 != len(places):
                raise EagleError(
                    f"row {number} of attention_mask has a hole; only padding on the left or right is supported"
                )
            rows.append(ids_T[mask_T].tolist())
    for number, row in enumerate(rows):
        outside = [token for token in row if not 0 <= token < vocab_size]
        if outside:
            raise EagleError(
                f"row {number} holds the token id {outside[0]}, outside the target's vocabulary of {vocab_size}; "
                "was it encoded with this target's tokenizer?"
            )
    return rows


def _padding_mask(input_ids: torch.Tensor, pad: int | None, eos: list[int]) -> torch.Tensor | None:
    """Hugging Face's guess, at the ends of a row only: pad tokens are padding, unless a pad token can be an EOS.

    Between other tokens a pad token is text: chat templates end every turn with what many models also pad with.
    """
    if pad is None or pad in eos or not bool((input_ids == pad).any()):
        return None
    text_BT = (input_ids != pad).int()
    return (text_BT.cumsum(1) > 0) & (text_BT.flip(1).cumsum(1).flip(1) > 0)
