"""What a decode cycle costs on a GPU, and the kernels' share of it: a roofline ESTIMATE, nothing is measured.

    python -m eagle.kernels.cycle_estimate --target llama-3.1-8b-shape --gpu h200 --context 1024 --nodes 60

Every launch takes max(bytes / bandwidth, FLOP / rate) of the device's data sheet: no launch gaps, no norms, rotations or
activations, and every kernel at its roofline. Bytes and FLOP of the kernels are their model.py's. Prints a table and one
JSON line.
"""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

import torch

from eagle.errors import EagleError
from eagle.kernels.commit import model as commit
from eagle.kernels.roofline import DEVICES, Cost, Device
from eagle.kernels.sample import model as sample
from eagle.kernels.tree_attention import model as tree_attention
from eagle.kernels.tree_attention.tiling import splits_for, tiling
from eagle.kernels.tree_build import model as tree_build
from eagle.kernels.verify import model as verify

DTYPE, ELEMENT = torch.bfloat16, 2


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A target's sizes."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int


SHAPES = {
    "llama-3.1-8b-shape": Shape(
        layers=32, hidden=4096, intermediate=14336, heads=32, kv_heads=8, head_dim=128, vocab_size=128256
    ),
    "qwen3-8b-shape": Shape(
        layers=36, hidden=4096, intermediate=12288, heads=32, kv_heads=8, head_dim=128, vocab_size=151936
    ),
    "vicuna-7b-shape": Shape(
        layers=32, hidden=4096, intermediate=11008, heads=32, kv_heads=32, head_dim=128, vocab_size=32000
    ),
    "smollm2-135m-shape": Shape(
        layers=30, hidden=576, intermediate=1536, heads=9, kv_heads=3, head_dim=64, vocab_size=49152
    ),
}
"""From the models' config.json on the hub."""


@dataclass(kw_only=True)
class Part:
    """Launches of one kind in a cycle."""

    name: str
    ours: bool
    """One of this package's kernels."""
    launches: list[Cost] = field(default_factory=list)

    def us(self, device: Device) -> float:
        """Microseconds at the roofline, one launch after the other."""
        return 1e6 * sum(device.seconds(cost, DTYPE) for cost in self.launches)

    def bound(self, device: Device) -> str:
        """What most of the time is bound by."""
        by = {"memory": 0.0, "compute": 0.0}
        for cost in self.launches:
            by[device.bound(cost, DTYPE)] += device.seconds(cost, DTYPE)
        return max(by, key=lambda kind: by[kind])


@dataclass(frozen=True, kw_only=True)
class Cycle:
    """The cycle's settings."""

    rows: int = 1
    context: int = 1024
    """Tokens in each row's cache."""
    nodes: int = 60
    """Tree nodes verified, the root included."""
    depth: int = 6
    """Levels that the head drafts; 0: plain decoding."""
    beam: int = 10
    """Nodes that a level expands."""
    tau: float = 3.5
    """Tokens that a cycle emits: what is committed, and fed to the head."""
    draft_vocab: int | None = None
    """None: the target's."""
    rule: str = "coupled"


def gemm(rows: int, inputs: int, outputs: int) -> Cost:
    """A linear layer: weights, inputs and outputs once."""
    return Cost(bytes=ELEMENT * (inputs * outputs + rows * (inputs + outputs)), flops=2 * rows * inputs * outputs)


def decoder_layer(shape: Shape, rows: int) -> list[Cost]:
    """The matrix products of a layer: q, k and v together, o, gate and up together, down."""
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    return [
        gemm(rows, shape.hidden, queries + 2 * keys),
        gemm(rows, queries, shape.hidden),
        gemm(rows, shape.hidden, 2 * shape.intermediate),
        gemm(rows, shape.intermediate, shape.hidden),
    ]


def attention(shape: Shape, cycle: Cycle, device: Device, *, queries: int, columns: int) -> Cost:
    """One layer's tree attention of `queries` nodes over the context and `columns` tree columns, split as `launch` splits."""
    packed = queries * shape.heads // shape.kv_heads
    blocks = -(-packed // tiling(packed, shape.head_dim, DTYPE, device.capability).rows)
    splits = splits_for(
        programs=blocks * cycle.rows * shape.kv_heads,
        packed_rows=packed,
        slots=cycle.context + columns,
        processors=device.processors,
    )
    return tree_attention.cost(
        rows=cycle.rows,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        nodes=queries,
        length=cycle.context + columns - queries,
        head_dim=shape.head_dim,
        element=ELEMENT,
        splits=splits,
    )


def parts(shape: Shape, cycle: Cycle, device: Device) -> list[Part]:
    """A cycle of drafting, verification and commit."""
    rows, nodes = cycle.rows, cycle.nodes
    emitted = math.ceil(cycle.tau)
    expanded = 1 + (cycle.depth - 1) * cycle.beam if cycle.depth else 0
    logits = sample.cost(rows=rows * nodes, vocab_size=shape.vocab_size, element=ELEMENT)
    walks = verify.walk_cost(rows=rows, nodes=nodes, visited=rows * emitted, by_token=cycle.rule == "coupled")
    drafted = Cost(bytes=0)
    if cycle.rule == "rejection":  # every node is decided; the logits are read again, and q of the expanded nodes
        drafted = verify.sweeps_cost(
            swept=rows * nodes,
            sampled=rows * min(expanded, nodes),
            accepted=0,
            accepted_sampled=0,
            vocab_size=shape.vocab_size,
            element=ELEMENT,
        )
    moves = commit.cost(
        buffers=2 * shape.layers,
        rows=rows,
        kv_heads=shape.kv_heads,
        accepted=emitted,
        moved=emitted - 1,
        head_dim=shape.head_dim,
        element=ELEMENT,
    )
    products = [*decoder_layer(shape, rows * nodes) * shape.layers, gemm(rows * nodes, shape.hidden, shape.vocab_size)]
    return [
        Part(name="target: matrix products", ours=False, launches=products),
        Part(
            name="target: tree attention",
            ours=True,
            launches=[attention(shape, cycle, device, queries=nodes, columns=nodes)] * shape.layers,
        ),
        *drafting(shape, cycle, device, fed=emitted),
        Part(name="tree build", ours=True, launches=[tree_build.cost(rows=rows, nodes=nodes, links=False)]),
        Part(name="sample", ours=True, launches=[logits]),
        Part(name=f"verify ({cycle.rule})", ours=True, launches=[walks + drafted]),
        Part(name="commit", ours=True, launches=[moves]),
    ]


def drafting(shape: Shape, cycle: Cycle, device: Device, *, fed: int) -> list[Part]:
    """The head: fc and one layer over the tokens just committed, then over a beam per level; its LM head at each level."""
    vocab_size = cycle.draft_vocab or shape.vocab_size
    products, attends, scores = [], [], []
    for level in range(cycle.depth):
        queries, scored = (fed, 1) if level == 0 else (cycle.beam, cycle.beam)
        products += [gemm(cycle.rows * queries, 2 * shape.hidden, shape.hidden)]
        products += decoder_layer(shape, cycle.rows * queries)
        products += [gemm(cycle.rows * scored, shape.hidden, vocab_size)]
        attends.append(attention(shape, cycle, device, queries=queries, columns=max(queries, level * cycle.beam)))
        scores.append(Cost(bytes=cycle.rows * scored * vocab_size * ELEMENT))
    return [
        Part(name="head: matrix products", ours=False, launches=products),
        Part(name="head: tree attention", ours=True, launches=attends),
        Part(name="head: top-k of its logits", ours=False, launches=scores),
    ]


def estimate(shape: Shape, cycle: Cycle, device: Device) -> dict[str, object]:
    """The parts with bytes, FLOP, microseconds and share; the kernels' share; plain decoding's step beside it."""
    listed = [part for part in parts(shape, cycle, device) if part.launches]
    total = sum(part.us(device) for part in listed)
    plain_cycle = Cycle(rows=cycle.rows, context=cycle.context, nodes=1, depth=0, tau=1.0)
    plain = sum(part.us(device) for part in parts(shape, plain_cycle, device))
    told = [
        {
            "part": part.name,
            "ours": part.ours,
            "launches": len(part.launches),
            "bytes": sum(cost.bytes for cost in part.launches),
            "flops": sum(cost.flops for cost in part.launches),
            "us": part.us(device),
            "bound": part.bound(device),
            "share": part.us(device) / total,
        }
        for part in listed
    ]
    return {
        "parts": told,
        "us": total,
        "kernels_share": sum(part.us(device) for part in listed if part.ours) / total,
        "plain_step_us": plain,
        "speedup_at_tau": cycle.tau * plain / total,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    gpus = {name.lower().replace(" ", "-"): name for name in DEVICES}
    parser = argparse.ArgumentParser(
        prog="python -m eagle.kernels.cycle_estimate", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--target", choices=list(SHAPES), default="llama-3.1-8b-shape", help="default: %(default)s")
    parser.add_argument("--gpu", choices=list(gpus), default="h200", help="default: %(default)s")
    parser.add_argument("--context", type=int, default=1024, help="tokens in the cache (default: %(default)s)")
    parser.add_argument("--nodes", type=int, default=60, help="nodes verified, with the root (default: %(default)s)")
    parser.add_argument("--rows", type=int, default=1, help="batch size (default: %(default)s)")
    parser.add_argument("--depth", type=int, default=6, help="levels drafted (default: %(default)s)")
    parser.add_argument("--beam", type=int, default=10, help="nodes expanded per level (default: %(default)s)")
    parser.add_argument("--tau", type=float, default=3.5, help="assumed tokens per cycle (default: %(default)s)")
    parser.add_argument("--draft-vocab", type=int, help="tokens of the head's LM head; default: the target's")
    parser.add_argument("--rule", choices=("coupled", "rejection"), default="coupled", help="default: %(default)s")
    args = parser.parse_args(arguments)
    for name in ("context", "nodes", "rows", "depth", "beam"):
        if getattr(args, name) < (0 if name == "context" else 1):
            raise EagleError(f"--{name} is {getattr(args, name)}, expected {0 if name == 'context' else 1} or more")
    if args.tau < 1:
        raise EagleError(f"--tau is {args.tau}, expected 1 (the bonus token alone) or more")
    settings = {name: getattr(args, name) for name in ("context", "nodes", "rows", "depth", "beam", "tau", "rule")}
    cycle = Cycle(**settings, draft_vocab=args.draft_vocab)
    device = DEVICES[gpus[args.gpu]]
    told = estimate(SHAPES[args.target], cycle, device)
    print(
        f"ESTIMATE (roofline, not measured): {args.target}, bfloat16, {args.rows} x {args.context} tokens, {args.nodes} nodes\n"
        f"{gpus[args.gpu]}: {device.bandwidth / 1e12:g} TB/s, {device.half / 1e12:g} TFLOP/s ({device.source})\n"
    )
    print("| part | launches | MB | GFLOP | us | bound by | share |\n|---|---|---|---|---|---|---|")
    for part in told["parts"]:  # type: ignore[attr-defined]
        mark = " *" if part["ours"] else ""
        print(
            f"| {part['part']}{mark} | {part['launches']} | {part['bytes'] / 1e6:.2f} | {part['flops'] / 1e9:.2f} "
            f"| {part['us']:.2f} | {part['bound']} | {part['share']:.1%} |"
        )
    print(
        f"\na cycle: {told['us']:.0f} us, of which this package's kernels (*) {told['kernels_share']:.1%}; a step of plain "
        f"decoding: {told['plain_step_us']:.0f} us; with an ASSUMED tau of {args.tau:g}: "
        f"{told['speedup_at_tau']:.2f}x\nnot counted: launches, norms, rotations, activations, the host"
    )
    limits = {"gpu": gpus[args.gpu], **asdict(device)}
    print(json.dumps({"estimate": "roofline", "target": args.target, **asdict(cycle), "device": limits, **told}))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except EagleError as error:
        sys.exit(f"error: {error}")
