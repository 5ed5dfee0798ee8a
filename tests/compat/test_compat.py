"""`kvmpool compat` over programs compiled here: each class, what it says to do, and the exit codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from kvmpool.cli.compat import compat
from tests.compat.programs import (
    ELF,
    LZ4,
    PTX,
    ZSTD,
    compiled,
    entry,
    fatbin,
    library,
    runtime,
    section,
    wrapper,
)

DRIVER = "int cuInit(unsigned); int cuTexObjectCreate(void **, unsigned);\n"
CALLS = "int main(void) { void *g; return cuInit(0) + cuTexObjectCreate(&g, 0); }\n"


def run(*words: str | Path, code: int) -> Result:
    done = CliRunner().invoke(compat, [str(word) for word in words], catch_exceptions=False)
    assert done.exit_code == code, done.output
    return done


def asked(*paths: Path, code: int) -> list[dict[str, Any]]:
    found = json.loads(run(*paths, "-o", "json", code=code).stdout)
    assert isinstance(found, list)
    return found


def test_a_program_without_cuda_is_told_so(tmp_path: Path) -> None:
    program = compiled(tmp_path, "plain", "int main(void) { return 0; }")
    [body] = asked(program, code=0)
    assert (body["class"], body["works"], body["reasons"]) == ("no CUDA", True, [])


def test_a_program_linked_with_the_driver_is_class_a_and_what_it_lacks_is_named(tmp_path: Path) -> None:
    libcuda = library(tmp_path, "libcuda.so.1", ["cuInit", "cuTexObjectCreate"])
    program = compiled(tmp_path, "driver", DRIVER + CALLS, str(libcuda))
    [body] = asked(program, code=0)
    assert body["class"] == "A"
    assert body["imports"] == ["cuInit", "cuTexObjectCreate"]
    assert body["reasons"] == ["it is linked with libcuda.so.1", "it imports the driver's cuInit, cuTexObjectCreate"]
    named = set(body["unsupported"])
    assert named <= {"cuTexObjectCreate"}
    told = run(program, code=0).stdout
    assert ("cuTexObjectCreate: answer CUDA_ERROR_NOT_SUPPORTED" in told) == bool(named)


def test_an_import_that_no_driver_has_is_named(tmp_path: Path) -> None:
    libcuda = library(tmp_path, "libcuda.so.1", ["cuInventedCall", "cuWGLGetDevice"])
    source = (
        "int cuInventedCall(void), cuWGLGetDevice(void); int main(void) { return cuInventedCall() + cuWGLGetDevice(); }"
    )
    [body] = asked(compiled(tmp_path, "odd", source, str(libcuda)), code=0)
    assert body["unknown"] == ["cuInventedCall"]
    assert body["unsupported"] == ["cuWGLGetDevice"]


@pytest.mark.parametrize("text", ["libcuda.so.1", "libcuda.so", "/usr/lib/x86_64-linux-gnu/libcuda.so.1"])
def test_a_program_that_opens_the_driver_itself_is_class_a(tmp_path: Path, text: str) -> None:
    source = f'#include <dlfcn.h>\nint main(void) {{ return dlopen("{text}", RTLD_NOW) == 0; }}'
    [body] = asked(compiled(tmp_path, "opens", source, "-ldl"), code=0)
    assert (body["class"], body["opens"]) == ("A", [text.rpartition("/")[2]])


def test_a_sentence_that_names_a_library_is_no_use_of_it(tmp_path: Path) -> None:
    source = '#include <stdio.h>\nint main(void) { return printf("%s", "cannot open libcuda.so.1") < 0; }'
    assert asked(compiled(tmp_path, "words", source), code=0)[0]["class"] == "no CUDA"


def test_the_runtime_as_a_library_is_class_b(tmp_path: Path) -> None:
    source = "int cudaMalloc(void **, unsigned long); int main(void) { void *p; return cudaMalloc(&p, 1); }"
    program = compiled(tmp_path, "dynamic", source, str(runtime("libcudart.so.13")))
    [body] = asked(program, code=4)
    assert (body["class"], body["works"]) == ("B", False)
    assert "it is linked with libcudart.so.13" in body["reasons"]
    assert asked(runtime("libcudart.so.13"), code=4)[0]["class"] == "B"


@pytest.mark.parametrize("stripped", [False, True])
def test_the_runtime_inside_is_told_by_name_and_why(tmp_path: Path, stripped: bool) -> None:
    source = "int cudaMalloc(void **, unsigned long); int main(void) { void *p; return cudaMalloc(&p, 1); }"
    archive = str(runtime("libcudart_static.a"))
    flags = [archive, "-ldl", "-lpthread", "-lrt", *(["-s"] if stripped else [])]
    program = compiled(tmp_path, "static", source, *flags)
    [body] = asked(program, code=4)
    assert body["class"] == "static cudart"
    told = run(program, code=4).stdout
    assert "circumvents the check" in told
    assert "use the driver API" in told


def test_an_extension_module_that_leaves_the_runtime_to_others_is_class_b(tmp_path: Path) -> None:
    source = "int cudaMalloc(void **, unsigned long); int go(void) { void *p; return cudaMalloc(&p, 1); }"
    module = compiled(tmp_path, "fast.cpython-311-x86_64-linux-gnu.so", source, "-shared", "-fPIC")
    assert asked(module, code=4)[0]["class"] == "B"


def test_cublas_is_class_c_also_beside_the_runtime(tmp_path: Path) -> None:
    libs = [
        library(tmp_path, "libcublas.so.12", ["cublasCreate_v2"]),
        library(tmp_path, "libcudart.so.12", ["cudaFree"]),
    ]
    source = "int cublasCreate_v2(void), cudaFree(void); int main(void) { return cublasCreate_v2() + cudaFree(); }"
    [body] = asked(compiled(tmp_path, "blas", source, *map(str, libs)), code=4)
    assert (body["class"], body["reasons"]) == ("C", ["it is linked with libcublas.so.12"])


@pytest.mark.parametrize(("flag", "runpath"), [("--enable-new-dtags", True), ("--disable-new-dtags", False)])
def test_a_library_found_by_the_search_path_decides_the_class(tmp_path: Path, flag: str, runpath: bool) -> None:
    below = tmp_path / "libs"
    below.mkdir()
    cudart = library(below, "libcudart.so.12", ["cudaFree"])
    mine = compiled(below, "libmine.so", "int cudaFree(void); int go(void) { return cudaFree(); }", "-shared", "-fPIC",
                    "-Wl,-soname,libmine.so", str(cudart))  # fmt: skip
    program = compiled(tmp_path, "uses", "int go(void); int main(void) { return go(); }", str(mine),
                       f"-Wl,-rpath,$ORIGIN/libs,{flag}", "-Wl,--allow-shlib-undefined")  # fmt: skip
    [body] = asked(program, code=4)
    assert body["class"] == "B"
    assert body["search"] == [str(below)]
    assert body["libraries"] == [{"path": str(mine), "class": "B"}]
    assert body["reasons"][0] == "libmine.so: it is linked with libcudart.so.12"


def test_gpu_code_is_listed_by_kind_target_and_compression(tmp_path: Path) -> None:
    code = fatbin(entry(PTX, 75), entry(ELF, 80, ZSTD), entry(ELF, 90)) + bytes(8) + fatbin(entry(ELF, 80, ZSTD))
    source = section(".nv_fatbin", code) + section(".nvFatBinSegment", wrapper() * 2)
    [body] = asked(compiled(tmp_path, "kernels", source + "int main(void) { return 0; }"), code=0)
    assert body["code"] == ["ELF sm_80 (zstd)", "ELF sm_90", "PTX compute_75"]
    assert (body["fatbins"], body["damage"]) == (2, "")


def test_machine_code_alone_is_said_to_be_for_its_cards_only(tmp_path: Path) -> None:
    source = section(".nv_fatbin", fatbin(entry(ELF, 86, LZ4)))
    told = run(compiled(tmp_path, "sass", source + "int main(void) { return 0; }"), code=0).stdout
    assert "ELF sm_86 (lz4)" in told
    assert "no PTX: runs only on cards of those kinds" in told


def test_a_folder_is_all_its_modules_and_several_answers_are_a_table(tmp_path: Path) -> None:
    (tmp_path / "pkg/deep").mkdir(parents=True)
    compiled(tmp_path / "pkg", "plain.so", "int one;", "-shared", "-fPIC")
    compiled(
        tmp_path / "pkg/deep", "gpu.so", "int cudaFree(void); int f(void) { return cudaFree(); }", "-shared", "-fPIC"
    )
    done = run(tmp_path / "pkg", code=4)
    lines = done.stdout.splitlines()
    assert lines[0].split() == ["PROGRAM", "CLASS", "WORKS", "CODE", "REASON"]
    assert [line.split()[1] for line in lines[1:]] == ["B"]
    assert done.stderr == "1 more use no CUDA\n"
    assert len(run(tmp_path / "pkg", tmp_path / "pkg/plain.so", code=4).stdout.splitlines()) == 3
    assert len(asked(tmp_path / "pkg", code=4)) == 2
    (tmp_path / "empty").mkdir()
    assert "no shared library" in run(tmp_path / "empty", code=3).stderr


def test_exit_codes_tell_missing_from_unreadable_and_others_are_still_answered(tmp_path: Path) -> None:
    good = compiled(tmp_path, "plain", "int main(void) { return 0; }")
    assert "there is no such file" in run(tmp_path / "nothing", code=3).stderr
    (tmp_path / "script").write_text("#!/bin/sh\n")
    done = run(tmp_path / "script", good, tmp_path / "nothing", code=1)
    assert "a script, not an ELF program" in done.stderr
    assert "no CUDA" in done.stdout
