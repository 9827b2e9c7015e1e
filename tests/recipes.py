"""A recipe for the whole path on a tiny random target: seconds on one core."""

import json
from pathlib import Path
from typing import Any

import yaml

from tests.tiny import save_tiny_target, write_conversations


def write_recipe(folder: Path, **sections: dict[str, Any]) -> Path:
    """Writes target, conversations, prompts and recipe.yaml into `folder`; `sections` replace keys of its sections."""
    if not (folder / "target").is_dir():
        save_tiny_target(folder / "target")
    write_conversations(folder / "conversations.jsonl", 24)
    turns = ["hello to the cat", "what is 1 + 1"]
    prompts = [{"question_id": i, "category": "ab"[i], "turns": turns} for i in range(2)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    recipe: dict[str, Any] = {
        "output_dir": str(folder / "run"),
        "target": {"model": str(folder / "target"), "device": "cpu"},
        "data": {"sources": [str(folder / "conversations.jsonl")], "max_len": 128, "validation_fraction": 0.1},
        "features": {"dtype": "float32", "batch_tokens": 512, "shard_tokens": 512},
        "train": {
            "epochs": 1,
            "lr": 1e-3,
            "warmup_steps": 2,
            "precision": "fp32",
            "eval_every": 4,
            "save_every": 4,
            "eval_documents": 2,
            "chain_depth": 2,
            "log_every": 1,
        },
        "decode": {"drafter": {"budget": 6, "top_k": 2, "depth": 3}},
        "eval": {"prompts": [str(folder / "prompts.jsonl")], "max_new_tokens": 12, "chain_depth": 3, "ledger": "off"},
    }
    for name, section in sections.items():
        recipe[name] = {**recipe[name], **section}
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return path
