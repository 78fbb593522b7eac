"""Writes symbols.def: which symbol serves which name, from which CUDA version on, in which stream mode.

    python list_symbols.py /usr/local/cuda/include

It writes stubs.def too: every symbol once.

The header lists its function types as PFN_<name>_v<version>[_ptds|_ptsz]; a name's n-th version is the symbol
<name>_v<n>, its first has no number.
"""

import re
import sys
from pathlib import Path

EXCEPTIONS = {
    # cuGraphInstantiate has meant cuGraphInstantiateWithFlags since 12.0, whose symbol has a name of its own.
    ("cuGraphInstantiate", 12000, ""): "cuGraphInstantiateWithFlags",
}
# Entry points outside cudaTypedefs.h's core part that programs ask for.
EXTRA = [
    ("cuProfilerInitialize", 4000, "", "cuProfilerInitialize"),
    ("cuProfilerStart", 4000, "", "cuProfilerStart"),
    ("cuProfilerStop", 4000, "", "cuProfilerStop"),
]


def entries(include: Path) -> list[tuple[str, int, str, str]]:
    text = (include / "cudaTypedefs.h").read_text()
    found = re.findall(r"typedef CUresult ?\(CUDAAPI \*PFN_(cu\w+?)_v(\d+)(_ptds|_ptsz)?\)", text)
    plain: dict[str, list[int]] = {}
    for name, version, suffix in found:
        if not suffix:
            plain.setdefault(name, []).append(int(version))
    rows = []
    for name, version, suffix in found:
        number = sum(1 for other in plain[name] if other <= int(version))
        symbol = name + (f"_v{number}" if number > 1 else "") + suffix
        rows.append((name, int(version), suffix, symbol))
    rows += [(name, version, suffix, symbol) for (name, version, suffix), symbol in EXCEPTIONS.items()]
    return sorted(set(rows + EXTRA))


def main() -> None:
    lines = [
        "/* SYMBOL(name, since, per-thread stream, symbol): by list_symbols.py, by name, then version. */"
    ]
    for name, version, suffix, symbol in entries(Path(sys.argv[1])):
        lines.append(f"SYMBOL({name}, {version}, {int(bool(suffix))}, {symbol})")
    here = Path(__file__).parent
    (here / "symbols.def").write_text("\n".join(lines) + "\n")
    symbols = sorted({symbol for *_, symbol in entries(Path(sys.argv[1]))})
    (here / "stubs.def").write_text("".join(f"STUB({symbol})\n" for symbol in symbols))


main()
