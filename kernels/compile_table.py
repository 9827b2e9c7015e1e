"""Compiles every shipped kernel version to GPU code and reads its registers, spills and shared memory. No GPU needed.

    python -m eagle.kernels.compile_table                      all of them: many minutes
    python -m eagle.kernels.compile_table --representative     what continuous integration compiles
    python -m eagle.kernels.compile_table --kernel commit --arch 90 --jobs 4 --output table.md

Ends in one JSON line; exit code 1 when a version does not compile, spills although it promises not to, or wants more
shared memory than the architecture has. What a kernel ships is what `variants()` in its triton.py yields.
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
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path

from eagle.errors import EagleError
from eagle.kernels.variants import Variant

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
    problem = ""
    if built.metadata.shared > ARCHITECTURES[arch] * 1024:
        problem = f"wants {built.metadata.shared} bytes of shared memory, sm_{arch} has {ARCHITECTURES[arch]} KiB"
    elif spilled and variant.no_spills:
        problem = f"spills {spilled} bytes"
    return Compiled(
        kernel=variant.kernel,
        name=variant.name,
        arch=arch,
        registers=registers,
        spilled=spilled,
        shared=built.metadata.shared,
        warps=variant.num_warps,
        seconds=round(time.perf_counter() - started, 2),
        problem=problem,
    )


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


def _job(wanted: tuple[str, str, int]) -> Compiled:
    kernel, name, arch = wanted
    variant = next(v for v in offered([kernel], representative=False) if v.name == name)
    return compile_variant(variant, arch)


def compiled(wanted: Sequence[tuple[str, str, int]], *, jobs: int) -> Iterator[Compiled]:
    """Rows of the table for (kernel, variant's name, architecture), in that order."""
    if jobs == 1:
        yield from map(_job, wanted)
        return
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        yield from pool.map(_job, wanted)


def markdown(rows: Sequence[Compiled]) -> str:
    """The table: a line per kernel version, a group of columns per architecture."""
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


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m eagle.kernels.compile_table", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--kernel", action="append", help="a kernel folder; may be given again; all of them otherwise")
    parser.add_argument("--arch", action="append", type=int, choices=list(ARCHITECTURES), help="all of them otherwise")
    parser.add_argument("--match", default="", help="only versions whose name contains this text")
    parser.add_argument("--representative", action="store_true", help="only what continuous integration compiles")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--output", type=Path, help="also write the table to this file")
    args = parser.parse_args(arguments)
    unknown = set(args.kernel or ()) - set(folders())
    if unknown:
        raise EagleError(f"no kernel named {', '.join(sorted(unknown))}; expected some of {', '.join(folders())}")
    os.environ["TRITON_INTERPRET"] = "0"  # read when a kernel's module is imported, here and in the processes

    import triton

    variants = [
        v for v in offered(args.kernel or folders(), representative=args.representative) if args.match in v.name
    ]
    wanted = [
        (v.kernel, v.name, arch) for v in variants for arch in args.arch or ARCHITECTURES if arch in v.architectures
    ]
    rows = []
    for row in compiled(wanted, jobs=args.jobs):
        rows.append(row)
        if row.problem or sys.stderr.isatty():
            print(f"{len(rows)}/{len(wanted)} sm_{row.arch} {row.kernel} {row.name} {row.problem}", file=sys.stderr)
    table = markdown(rows)
    print(table)
    if args.output:
        args.output.write_text(f"triton {triton.__version__}\n\n{table}\n", encoding="utf-8")
    problems = [asdict(row) for row in rows if row.problem]
    summary = {
        "triton": triton.__version__,
        "versions": len(variants),
        "compiled": len(rows) - sum("compile" in row.problem for row in rows),
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
