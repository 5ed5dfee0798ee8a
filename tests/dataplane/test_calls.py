"""calls.toml says what CUDA says: names, prototypes, versions and values against NVIDIA's headers from PyPI."""

from __future__ import annotations

import re
import shutil
import subprocess
from functools import cache
from importlib import metadata
from pathlib import Path

import pytest

from kvmpool.dataplane import calltable
from kvmpool.dataplane.calltable import Table, TableInvalid, base_name, load
from tests.dataplane import shim

TABLE = shim.DATAPLANE / "calls.toml"
_DEFINE = re.compile(r"#\s*define (cu\w+)\s+(?:__CUDA_API_PT[DS][SZ]\()?(cu[A-Z]\w+)\)?")
_PER_THREAD = re.compile(r"__CUDA_API_PT(DS|SZ)\((cu[A-Z]\w+)\)")
_PROTOTYPE = r"CUresult CUDAAPI\s+{}\(([^)]*)\)"
NOT_IN_CUDA_H = {"cuProfilerStart", "cuProfilerStop"}  # cudaProfiler.h, which the wheel lacks

SMALL_TABLE = """
[op.alloc]
class = "sync"
why = "test"
in = ["va"]
[driver]
cuInit = ["unsigned int"]
[call.cuStreamCreate]
class = "async"
args = ["CUstream *phStream : new stream", "unsigned int Flags"]
abi = {{ cuStreamCreate = 2000 }}
{more}
[errors]
CUDA_SUCCESS = 0
[unsupported]
names = "cuGraphCreate"
"""


@cache
def table() -> Table:
    return load(TABLE)


def in_header() -> list[calltable.Call]:
    return [call for call in table().calls if call.name not in NOT_IN_CUDA_H]


@cache
def header(name: str) -> str:
    """A header of the wheel nvidia-cuda-runtime. Skips where that is not installed."""
    try:
        files = metadata.files("nvidia-cuda-runtime") or []
    except metadata.PackageNotFoundError:
        pytest.skip("nvidia-cuda-runtime is not installed: pip install 'kvmpool[test]'")
    (found,) = (file for file in files if file.name == name)
    return Path(str(found.locate())).read_text()


@cache
def defines() -> dict[str, str]:
    return dict(_DEFINE.findall(header("cuda.h")))


@cache
def versions() -> dict[tuple[str, str], list[int]]:
    found: dict[tuple[str, str], set[int]] = {}
    for name, version, suffix in re.findall(r"PFN_(cu\w+?)_v(\d+)(_ptsz|_ptds)?\)", header("cudaTypedefs.h")):
        found.setdefault((name, suffix), set()).add(int(version))
    return {key: sorted(values) for key, values in found.items()}


def their_names() -> set[str]:
    names = {"cuProfilerInitialize", "cuProfilerStart", "cuProfilerStop"}
    for file in ("cuda.h", "cudaGL.h", "cudaEGL.h", "cudaVDPAU.h"):
        text = header(file)
        names |= set(re.findall(r"CUDAAPI\s+(cu[A-Z]\w+)\s*\(", text))
        names |= {target for _, target in _DEFINE.findall(text)}
        names |= {f"{name}_pt{kind.lower()}" for kind, name in _PER_THREAD.findall(text)}
    return names


def their_types(symbol: str) -> list[str]:
    """Parameter types of an exported symbol: the name's own prototype, or that of the name that resolves to it."""
    text, plain = header("cuda.h"), re.sub(r"_pt[ds][sz]$", "", symbol)
    base = base_name(plain)
    written = next((name for name, renamed in defines().items() if renamed == plain), plain)
    found = list(re.finditer(_PROTOTYPE.format(written), text))
    assert found, f"{symbol}: cuda.h has no prototype"
    # the oldest forms stand in the header's last section, behind the one that a macro renames
    match = found[-1] if base == plain and defines().get(base, base) != plain else found[0]
    parameters = " ".join(match[1].split())
    return [] if parameters == "void" else [_type(parameter) for parameter in parameters.split(",")]


def _type(parameter: str) -> str:
    return re.sub(r"\s*\w+$", "", parameter.strip()).replace(" *", "*")


def test_every_name_of_the_driver_api_is_in_the_table() -> None:
    ours = {symbol.name for call in table().calls for symbol in call.symbols} | set(table().unsupported)
    assert their_names() - ours == set()
    assert ours - their_names() == set(), "names that CUDA does not have"


@pytest.mark.parametrize("call", in_header(), ids=lambda call: call.name)
def test_prototypes_are_those_of_cuda_h(call: calltable.Call) -> None:
    ours = [arg.type.replace(" *", "*") for arg in call.args]
    assert ours == their_types(call.name)


@pytest.mark.parametrize("call", in_header(), ids=lambda call: call.name)
def test_versions_are_those_of_cudas_typedefs(call: calltable.Call) -> None:
    for symbol in call.symbols:
        suffix = symbol.name[-5:] if symbol.per_thread else ""
        known = versions().get((symbol.base, suffix)) or versions()[symbol.base, ""]
        assert symbol.version in known, f"{symbol.name}: {symbol.version} is none of {known}"


def test_error_codes_are_those_of_cuda_h() -> None:
    text = header("cuda.h")
    section = text[text.index("typedef enum cudaError_enum") : text.index("} CUresult;")]
    theirs = {(int(code), name) for name, code in re.findall(r"(CUDA_(?:SUCCESS|ERROR_\w+))\s*=\s*(\d+)", section)}
    assert set(table().errors) == theirs


STRUCTURES = ("CUlaunchConfig", "CUlaunchAttribute", "CUdevprop", "CUctxCreateParams", "CUmemAllocationProp",
              "CUmemAccessDesc", "CUuuid", "CUdeviceptr", "CUresult", "CUjit_option", "CUdevice_attribute",
              "CUDA_MEMCPY2D", "CUDA_MEMCPY3D", "CUDA_KERNEL_NODE_PARAMS", "CUDA_KERNEL_NODE_PARAMS_v1",
              "CUDA_MEMSET_NODE_PARAMS", "CUDA_GRAPH_INSTANTIATE_PARAMS", "CUgraphExecUpdateResultInfo",
              "CUgraphEdgeData", "CUmemPoolProps", "CUDA_MEMCPY3D_PEER")  # fmt: skip


def test_structures_and_values_of_our_header_are_those_of_cuda_h(tmp_path: Path) -> None:
    ours = (shim.SOURCES / "cuda_abi.h").read_text()
    values = sorted(set(re.findall(r"^    (CU[A-Z_0-9]+) = ", ours, re.MULTILINE)))
    assert len(values) > 40
    lines = [f'printf("{name} %zu\\n", sizeof({name}));' for name in STRUCTURES]
    lines += [f'printf("{name} %d\\n", (int){name});' for name in values]
    lines.append('printf("%zu %zu\\n", offsetof(CUlaunchConfig, attrs), offsetof(CUmemAllocationProp, allocFlags));')
    (tmp_path / "cuda.h").write_text(header("cuda.h"))
    printed = []
    for include in (str(shim.SOURCES / "cuda_abi.h"), str(tmp_path / "cuda.h")):
        program = (
            f'#include <stddef.h>\n#include <stdio.h>\n#include "{include}"\nint main(void) {{ {"".join(lines)} }}'
        )
        (tmp_path / "p.c").write_text(program)
        subprocess.run(["gcc", "-w", "-o", tmp_path / "p", tmp_path / "p.c"], check=True)
        printed.append(subprocess.run([tmp_path / "p"], check=True, capture_output=True, text=True).stdout.splitlines())
    assert printed[0] == printed[1]


def test_the_capability_hash_changes_with_what_travels(tmp_path: Path) -> None:
    def hash_of(text: str) -> bytes:
        path = tmp_path / "calls.toml"
        path.write_text(text)
        return load(path).capability_hash()

    plain = SMALL_TABLE.format(more="")
    assert hash_of(plain) == hash_of(plain)
    assert hash_of(plain) != hash_of(plain.replace('in = ["va"]', 'in = ["va", "bytes"]'))
    assert hash_of(plain) != hash_of(plain.replace("unsigned int Flags", "size_t Flags"))
    assert hash_of(plain) == hash_of(plain.replace("cuGraphCreate", "cuGraphDestroy"))


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ('[call.cuA]\nclass = "local"\nargs = []\nabi = { cuStreamCreate = 1 }', "listed twice: cuStreamCreate"),
        ('[call.cuA]\nclass = "as cuB"\nargs = []\nabi = { cuA = 1 }', "forwards to cuB"),
        ('[call.cuA]\nclass = "async"\nargs = ["int *p : out"]\nabi = { cuA = 1 }', "nothing can come out"),
        ('[call.cuA]\nclass = "sync"\nargs = ["int p : use lamp"]\nabi = { cuA = 1 }', "objects are context"),
        ('[call.cuA]\nclass = "sync"\nargs = []\nabi = { cuA_v2 = 1 }', "its own name is missing"),
        ('[op.b]\nclass = "sync"\nin = []', "needs `in`, a list, and `why`"),
    ],
)
def test_a_table_that_is_wrong_is_refused_by_entry(tmp_path: Path, more: str, words: str) -> None:
    path = tmp_path / "calls.toml"
    path.write_text(SMALL_TABLE.format(more=more))
    with pytest.raises(TableInvalid, match=re.escape(words)):
        load(path)


@pytest.mark.native
def test_the_library_exports_every_name_nothing_else_and_needs_only_the_c_library() -> None:
    if shutil.which("nm") is None:
        pytest.skip("binutils is not installed")
    library = shim.build("plain") / "shim" / "libcuda.so.1"
    listed = subprocess.run(["nm", "-D", "--defined-only", library], check=True, capture_output=True, text=True).stdout
    exported = {line.split()[-1] for line in listed.splitlines()}
    ours = {symbol.name for call in table().calls for symbol in call.symbols} | set(table().unsupported)
    assert exported == ours
    dynamic = subprocess.run(["readelf", "-d", library], check=True, capture_output=True, text=True).stdout
    needed = set(re.findall(r"NEEDED.*\[(.*)\]", dynamic))
    assert needed <= {"libc.so.6", "ld-linux-x86-64.so.2"}
    assert "soname: [libcuda.so.1]" in dynamic
