"""Compiles every shipped kernel version to GPU code and reads its registers, spills and shared memory. No GPU needed.

    python -m eagle.kernels.compile_table --output kernels/compile_table.md   all of them: about an hour of one core
    python -m eagle.kernels.compile_table --representative                    what continuous integration compiles
    python -m eagle.kernels.compile_table --kernel commit --arch 90 --jobs 4

Results are kept in a file as they come (compile_cache.py): after a kill, or a change, the same command compiles only what
is missing. Versions that promise no spills (head dims 64 and 128 among them) come first. Ends in one JSON line; exit code 1
when a version does not compile, spills although it promises not to, or wants more shared memory than the architecture has.
What a kernel ships is what `variants()` in its triton.py yields.
"""

import argparse
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import cache
from multiprocessing import get_context
from pathlib import Path

from eagle.errors import EagleError
from eagle.files import atomic_path
from eagle.kernels.compile_cache import CompileCache, fingerprint
from eagle.kernels.measure import environment
from eagle.kernels.variants import Variant
from eagle.progress import ProgressBar, console

CACHE = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "eagle" / "compile_table.jsonl"
Wanted = tuple[str, str, int]
"""(kernel, variant's name, architecture)"""

ARCHITECTURES = {80: 163, 90: 227, 100: 227}
"""Compute capability (A100, H100 / H200, B200) -> KiB of shared memory that one program may use."""


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """One row of the table."""

    kernel: str
    name: str
    arch: int
    registers: int = 0
    """Per thread."""
    spilled: int = 0
    """Bytes of local memory per thread: the stack frame, which in these kernels holds spilled registers alone."""
    shared: int = 0
    """Bytes per program."""
    warps: int = 0
    seconds: float = 0.0
    problem: str = ""
    """Why this version must not ship; empty when it may."""


def folders() -> list[str]:
    """Kernels that have a Triton version."""
    return sorted(file.parent.name for file in Path(__file__).parent.glob("*/triton.py"))


def offered(kernels: Sequence[str], *, representative: bool) -> Iterator[Variant]:
    """The variants of these folders."""
    for kernel in kernels:
        for variant in importlib.import_module(f"eagle.kernels.{kernel}.triton").variants():
            if variant.representative or not representative:
                yield variant


def compile_variant(variant: Variant, arch: int) -> Compiled:
    """Compiles one version to a cubin for sm_<arch> and reads its resource usage. Failures end up in `problem`."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    started = time.perf_counter()
    names = variant.function.arg_names
    missing = set(names) ^ (set(variant.types) | set(variant.constants))
    assert not missing, f"{variant.kernel} {variant.name}: arguments {missing} are not described (or not there)"
    source = ASTSource(
        fn=variant.function,
        signature={name: variant.types.get(name, "constexpr") for name in names},
        constexprs=dict(variant.constants),
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in sorted(variant.divisible)},
    )
    options = {"num_warps": variant.num_warps, "num_stages": variant.num_stages, **variant.options}
    try:
        built = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    except Exception as error:  # whatever the compiler raises is the finding
        return Compiled(kernel=variant.kernel, name=variant.name, arch=arch, problem=f"does not compile: {error}"[:300])
    registers, spilled = resource_usage(built.asm["cubin"])
    row = Compiled(
        kernel=variant.kernel,
        name=variant.name,
        arch=arch,
        registers=registers,
        spilled=spilled,
        shared=built.metadata.shared,
        warps=variant.num_warps,
        seconds=round(time.perf_counter() - started, 2),
    )
    return judged(row, no_spills=variant.no_spills)


def resource_usage(cubin: bytes) -> tuple[int, int]:
    """(registers per thread, bytes of stack and local memory per thread) as cuobjdump, shipped with triton, tells them."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        told = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", told.stdout)
    assert found, f"cuobjdump's answer is not understood: {told.stdout}"
    registers, stack, local = map(int, found.groups())
    return registers, stack + local


def _job(wanted: Wanted) -> Compiled:
    kernel, name, arch = wanted
    return compile_variant(_known(kernel)[name], arch)


@cache
def _known(kernel: str) -> dict[str, Variant]:
    return {variant.name: variant for variant in offered([kernel], representative=False)}


def compiled(wanted: Sequence[Wanted], *, jobs: int) -> Iterator[Compiled]:
    """Rows of the table for what is wanted, in that order."""
    if jobs == 1:
        yield from map(_job, wanted)
        return
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        yield from pool.map(_job, wanted)


def table_of(variants: Sequence[Variant], archs: Sequence[int], *, jobs: int, cache_file: Path) -> list[Compiled]:
    """A row per variant and architecture it is launched on, in their order: from the cache, else compiled and put there."""
    known = CompileCache(cache_file, Compiled)
    keys = {
        (variant.kernel, variant.name, arch): fingerprint(variant, arch)
        for variant in variants
        for arch in archs
        if arch in variant.architectures
    }
    promised = {(variant.kernel, variant.name): variant.no_spills for variant in variants}
    rows = {
        wanted: judged(row, no_spills=promised[wanted[:2]])
        for wanted, key in keys.items()
        if (row := known.get(key)) is not None
    }
    missing = sorted((wanted for wanted in keys if wanted not in rows), key=lambda wanted: not promised[wanted[:2]])
    with ProgressBar("compiling", total=len(keys), unit="versions", done=len(rows)) as bar:
        for wanted, row in zip(missing, compiled(missing, jobs=jobs), strict=True):
            rows[wanted] = row
            if row.registers:  # what did not compile may be the fault of this run
                known.keep(keys[wanted], row)
            if row.problem:
                console.print(f"sm_{row.arch} {row.kernel} {row.name}: {row.problem}", markup=False)
            bar.advance(1, note=f"sm_{row.arch} {row.kernel} {row.name}")
    return [rows[wanted] for wanted in keys]


def judged(row: Compiled, *, no_spills: bool) -> Compiled:
    """The row with its problem, if its figures are one."""
    problem = row.problem if not row.registers else ""
    if row.shared > ARCHITECTURES[row.arch] * 1024:
        problem = f"wants {row.shared} bytes of shared memory, sm_{row.arch} has {ARCHITECTURES[row.arch]} KiB"
    elif row.spilled and no_spills:
        problem = f"spills {row.spilled} bytes"
    return replace(row, problem=problem)


def overview(rows: Sequence[Compiled]) -> str:
    """A line per kernel and architecture."""
    lines = [
        "| kernel | architecture | versions | most registers | versions that spill (most B) | most shared B | problems |",
        "|---|---|---|---|---|---|---|",
    ]
    for kernel, arch in sorted({(row.kernel, row.arch) for row in rows}):
        of = [row for row in rows if (row.kernel, row.arch) == (kernel, arch)]
        spilling = [row.spilled for row in of if row.spilled]
        lines.append(
            f"| {kernel} | sm_{arch} | {len(of)} | {max(row.registers for row in of)} "
            f"| {f'{len(spilling)} ({max(spilling)})' if spilling else 0} | {max(row.shared for row in of)} "
            f"| {sum(bool(row.problem) for row in of)} |"
        )
    return "\n".join(lines)


def markdown(rows: Sequence[Compiled]) -> str:
    """The table: a line per kernel version, a column per architecture."""
    archs = sorted({row.arch for row in rows})
    by_version: dict[tuple[str, str], dict[int, Compiled]] = {}
    for row in rows:
        by_version.setdefault((row.kernel, row.name), {})[row.arch] = row
    lines = [
        "| kernel | version | warps | "
        + " | ".join(f"sm_{arch} registers / spilled B / shared B" for arch in archs)
        + " |",
        "|" + "---|" * (3 + len(archs)),
    ]
    for (kernel, name), cells in by_version.items():
        told = [
            (c.problem if not c.registers else f"{c.registers} / {c.spilled} / {c.shared}") if c else "" for c in
            (cells.get(arch) for arch in archs)
        ]  # fmt: skip
        warps = next(iter(cells.values())).warps
        lines.append(f"| {kernel} | {name} | {warps} | {' | '.join(told)} |")
    return "\n".join(lines)


def document(rows: Sequence[Compiled], setting: Mapping[str, str]) -> str:
    """What is written to a file: what the table was made with, the overview, the table."""
    problems = [f"- sm_{row.arch} {row.kernel} {row.name}: {row.problem}" for row in rows if row.problem]
    listed = "\n".join([*problems, "", ""]) if problems else ""
    return f"""# Registers, spills and shared memory of every shipped kernel version

`python -m eagle.kernels.compile_table --output kernels/compile_table.md`, triton {setting["triton"]},
commit {setting["commit"]}: {len(rows)} compilations, {len(problems) or "no"} problems.

Compiled without a GPU; nothing was run. Registers are per thread, shared memory per program. Spilled: stack and local memory
per thread; none is promised for head dims 64 and 128, and for kernels without a head dim.

{overview(rows)}

{listed}{markdown(rows)}
"""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m eagle.kernels.compile_table", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--kernel", action="append", help="a kernel folder; may be given again; all of them otherwise")
    parser.add_argument("--arch", action="append", type=int, choices=list(ARCHITECTURES), help="all of them otherwise")
    parser.add_argument("--match", default="", help="only versions whose name contains this text")
    parser.add_argument("--representative", action="store_true", help="only what continuous integration compiles")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--cache", type=Path, default=CACHE, help="where results are kept (default: %(default)s)")
    parser.add_argument("--output", type=Path, help="also write the table to this file")
    args = parser.parse_args(arguments)
    unknown = set(args.kernel or ()) - set(folders())
    if unknown:
        raise EagleError(f"no kernel named {', '.join(sorted(unknown))}; expected some of {', '.join(folders())}")
    os.environ["TRITON_INTERPRET"] = "0"  # read when a kernel's module is imported, here and in the processes

    variants = [
        v for v in offered(args.kernel or folders(), representative=args.representative) if args.match in v.name
    ]
    rows = table_of(variants, args.arch or list(ARCHITECTURES), jobs=args.jobs, cache_file=args.cache)
    table, setting = markdown(rows), environment()
    print(f"{table}\n\n{overview(rows)}")
    if args.output:
        with atomic_path(args.output) as temporary:
            temporary.write_text(document(rows, setting), encoding="utf-8")
    problems = [asdict(row) for row in rows if row.problem]
    summary = {
        "triton": setting["triton"],
        "commit": setting["commit"],
        "versions": len(variants),
        "compiled": sum(row.registers > 0 for row in rows),
        "seconds": round(sum(row.seconds for row in rows), 1),
        "most_registers": max((row.registers for row in rows), default=0),
        "spilling": sum(row.spilled > 0 for row in rows),
        "most_shared": max((row.shared for row in rows), default=0),
        "problems": problems,
    }
    print(json.dumps(summary))
    return 1 if problems else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except EagleError as error:
        sys.exit(f"error: {error}")
