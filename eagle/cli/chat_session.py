"""A conversation with a decoder: the turns so far, the settings, and what each answer cost. No terminal here."""

import json
import statistics
import time
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from eagle.cli.decoding import DEFAULT_NEW_TOKENS, keywords_of
from eagle.decode.arguments import NO_EFFECT_ON_GREEDY, resolve
from eagle.decode.decoder import SpeculativeDecoder
from eagle.decode.pieces import Piece
from eagle.errors import EagleError
from eagle.files import atomic_path
from eagle.sample.presets import preset as preset_named
from eagle.sample.stats import AcceptanceLength, DecodeStats
from eagle.target.prompt import prompt_ids

SETTINGS: dict[str, type] = {
    "temperature": float,
    "top_k": int,
    "top_p": float,
    "min_p": float,
    "repetition_penalty": float,
    "max_new_tokens": int,
    "seed": int,
}
"""What `/set` takes, with the type of each."""


@dataclass(kw_only=True)
class Turn:
    """What one answer cost."""

    stats: DecodeStats
    first_token_ms: float = 0.0
    """From the call to the first token: TTFT."""
    seed: int | None = None
    """The seed that gives the answer again; None: greedy."""
    interrupted: bool = False
    cut_by_context: bool = False
    """Whether the target's positions, not max_new_tokens, ended the answer."""

    def line(self) -> str:
        """Tokens, speed, tau, TTFT and the end, in one line."""
        stats, drafted = self.stats, self.stats.origins.count("drafted")
        parts = [f"{stats.new_tokens} tokens", f"{stats.tokens_per_second:.1f} tok/s"]
        if stats.attempts_per_depth:
            parts.append(f"tau {stats.tau:.2f}")
            parts += [f"tree {stats.tree}"] if stats.tree else []
            parts.append(f"{drafted} drafted ({100 * drafted / max(stats.new_tokens, 1):.0f}%)")
        parts.append(f"TTFT {self.first_token_ms / 1e3:.2f} s")
        end = "stopped by you" if self.interrupted else f"ended by {stats.finish_reason}"
        parts += [end] if self.seed is None else [end, f"seed {self.seed}"]
        return ", ".join(parts) + ("" if stats.lossless else f", rule {stats.rule}: lossy")


@dataclass(kw_only=True)
class ChatSession:
    """messages: the conversation, the system message first where there is one. settings: what `/set` and options said."""

    decoder: SpeculativeDecoder
    settings: dict[str, Any] = field(default_factory=dict)
    preset: str | None = None
    messages: list[dict[str, str]] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    _saved: set[Path] = field(default_factory=set, init=False)

    def __post_init__(self) -> None:
        self._check(self.settings, self.preset)

    def answer(self, text: str) -> Generator[list[Piece], None, None]:
        """Asks `text`; yields the pieces of every verify step and keeps the answer, as far as it came, in the conversation.

        Raises EagleError, the conversation unchanged, when it does not fit into the target's positions or the chat template
        rejects it. `turns[-1]` is this answer's from the first piece on.
        """
        start = time.perf_counter()
        tokenizer, device = self.decoder.target.tokenizer, self.decoder.target.device
        assert tokenizer is not None
        messages = [*self.messages, {"role": "user", "content": text}]
        ids = prompt_ids(tokenizer, messages)
        keywords, limited = self._keywords(prompt_tokens=len(ids))
        stream = self.decoder.pieces(torch.tensor([ids], device=device), **keywords)
        turn = Turn(stats=stream.stats, seed=keywords.get("seed"), interrupted=True)
        try:
            for pieces in stream.blocks():
                if not turn.first_token_ms:
                    turn.first_token_ms = 1e3 * (time.perf_counter() - start)
                    self.turns.append(turn)
                yield pieces
            turn.interrupted = False
            turn.cut_by_context = limited and stream.stats.finish_reason == "length"
        finally:
            if stream.tokens:
                said = tokenizer.decode(stream.tokens, skip_special_tokens=True)
                self.messages = [*messages, {"role": "assistant", "content": said}]

    def reset(self) -> None:
        """Forgets the turns; the system message and the settings stay."""
        self.messages = [message for message in self.messages if message["role"] == "system"]

    def set_system(self, text: str) -> None:
        """Replaces the system message ("": the chat template's own, if it has one) and forgets the turns."""
        self.messages = [{"role": "system", "content": text}] if text else []

    def set(self, name: str, value: str) -> None:
        """Changes a setting; "default" takes it back. Raises EagleError for an unknown name or a value that does not fit."""
        if name not in SETTINGS:
            raise EagleError(f"no setting {name}; there are: {', '.join(SETTINGS)}")
        settings = {key: old for key, old in self.settings.items() if key != name}
        if value != "default":
            try:
                settings[name] = SETTINGS[name](value)
            except ValueError:
                kind = "a whole number" if SETTINGS[name] is int else "a number"
                raise EagleError(f"{name} is {value!r}, expected {kind}, or default") from None
        self._check(settings, self.preset)
        self.settings = settings

    def set_preset(self, name: str | None) -> None:
        """Takes a template, and back every setting that it bounds; None: none. Raises EagleError for an unknown name."""
        bounded = {key for key, _ in preset_named(name).bounds()} if name is not None else set()
        settings = {key: value for key, value in self.settings.items() if key not in bounded}
        self._check(settings, name)
        self.preset, self.settings = name, settings

    def samples(self) -> bool:
        """Whether answers are sampled, so that a seed has an effect."""
        return "seed" in keywords_of(self.settings, preset=self.preset)

    def described(self) -> str:
        """The settings in one line."""
        said = [f"{key} {value}" for key, value in self.settings.items()]
        if self.preset is not None:
            return f"preset {self.preset}" + (f" with {', '.join(said)}" if said else "")
        defaults = [] if "temperature" in self.settings else ["temperature 0 (greedy)"]
        defaults += [] if "max_new_tokens" in self.settings else [f"max_new_tokens {DEFAULT_NEW_TOKENS}"]
        return ", ".join(said + defaults)

    def totals(self) -> dict[str, Any]:
        """Figures over all answers so far; tau: of those that were drafted for, None of none."""
        stats = [turn.stats for turn in self.turns]
        drafted = [one for one in stats if one.attempts_per_depth]
        length = AcceptanceLength.of((one.new_tokens, one.accepted) for one in drafted)
        tokens, seconds = sum(one.new_tokens for one in stats), sum(one.total_ms for one in stats) / 1e3
        origins = [origin for one in stats for origin in one.origins]
        return {
            "answers": len(stats),
            "tokens": tokens,
            "tokens_per_second": tokens / seconds if seconds else 0.0,
            **length.as_dict(),
            "origins": {name: origins.count(name) for name in ("drafted", "bonus", "correction", "plain")},
            "median_first_token_ms": statistics.median(turn.first_token_ms for turn in self.turns)
            if self.turns
            else None,
            "verify_steps": length.steps,
        }

    def save(self, path: Path) -> None:
        """Writes the conversation: .jsonl as one row of training data (messages), else JSON with settings and figures.

        Raises EagleError for a file that was there before this chat, and for one that cannot be written.
        """
        if path.exists() and path.resolve() not in self._saved:
            raise EagleError(f"{path} exists already; choose another name")
        whole: Mapping[str, Any] = {"messages": self.messages}
        if path.suffix != ".jsonl":
            turns = [{"line": turn.line(), **turn.stats.as_dict()} for turn in self.turns]
            whole = {
                **whole,
                "preset": self.preset,
                "settings": self.settings,
                "totals": self.totals(),
                "answers": turns,
            }
        text = json.dumps(whole, ensure_ascii=False, indent=None if path.suffix == ".jsonl" else 2) + "\n"
        try:
            with atomic_path(path) as temporary:
                temporary.write_text(text, encoding="utf-8")
        except OSError as error:
            raise EagleError(f"{path} cannot be written ({error.strerror}); choose another place") from error
        self._saved.add(path.resolve())

    def _keywords(self, *, prompt_tokens: int) -> tuple[dict[str, Any], bool]:
        """Keywords of `generate`, the answer no longer than the positions left; whether that shortened it."""
        settings = dict(self.settings)
        wanted = settings.get("max_new_tokens")
        if wanted is None:
            wanted = DEFAULT_NEW_TOKENS if self.preset is None else int(preset_named(self.preset).max_new_tokens.value)
        most = self.decoder.target.max_positions
        room = wanted if most is None else min(wanted, most - prompt_tokens)
        if room < 1:
            raise EagleError(
                f"the context is full: this conversation has {prompt_tokens:,} tokens, {self.decoder.target.name} takes {most:,} "
                "with the answer; /reset forgets the turns (after /save FILE, if you want to keep them), or ask in fewer words"
            )
        keywords = keywords_of({**settings, "max_new_tokens": room}, preset=self.preset)
        return {"eos_token_id": list(self.decoder.target.eos_token_ids), **keywords}, room < wanted

    def _check(self, settings: Mapping[str, Any], preset: str | None) -> None:
        """Raises EagleError for settings under which `generate` would refuse."""
        keywords = keywords_of({"max_new_tokens": 1, **settings}, preset=preset)
        try:
            resolve(self.decoder.target, torch.tensor([[0]]), torch.tensor([[1]]), **keywords)
        except EagleError as error:
            if error.code != NO_EFFECT_ON_GREEDY:
                raise
            name = next(key for key in ("top_k", "top_p", "min_p") if key in keywords)
            raise EagleError(
                f"{name} {keywords[name]} does nothing at temperature 0 (greedy); /set temperature 0.7 first"
            ) from error
