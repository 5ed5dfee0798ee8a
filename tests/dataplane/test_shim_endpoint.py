"""Where the shim looks for its endpoint, and in which order: in a mount namespace with files of its own."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.dataplane import shim

pytestmark = [
    pytest.mark.native,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root for a mount namespace"),
]

NAMESPACE = """
set -e
mkdir -p {tmp}/etc/kvmpool {tmp}/run/kvmpool {tmp}/lay
mount -t tmpfs none {tmp}/lay
mkdir {tmp}/lay/upper {tmp}/lay/inner
mount -t overlay overlay -o lowerdir=/etc,upperdir={tmp}/lay/upper,workdir={tmp}/lay/inner /etc
mount -t tmpfs none /run
mkdir -p /run/kvmpool /etc/kvmpool
cp -r {tmp}/etc/kvmpool/. /etc/kvmpool/
cp -r {tmp}/run/kvmpool/. /run/kvmpool/
exec {guest} init
"""


@pytest.fixture
def host(tmp_path: Path) -> Iterator[shim.Host]:
    with shim.host(tmp_path, "plain") as running:
        yield running


def run(host: shim.Host, files: dict[str, str], **extra: str) -> tuple[str, str]:
    """What the guest printed, and its log, with these files (paths from /) and no variable but `extra`."""
    for name, text in files.items():
        path = host.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    environment = host.environment(**extra)
    if "KVMPOOL_ENDPOINT" not in extra:
        del environment["KVMPOOL_ENDPOINT"]
    script = NAMESPACE.format(tmp=host.folder, guest=host.built / "guest")
    command = ["unshare", "--mount", "--propagation", "private", "sh", "-c", script]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)
    if "unshare:" in done.stderr or "mount:" in done.stderr:
        pytest.skip(f"no mount namespace with an overlay here: {done.stderr.strip()}")
    log = host.folder / "log"
    return done.stdout, log.read_text() if log.exists() else ""


def test_the_files_that_the_boot_unit_wrote_are_used(host: shim.Host) -> None:
    printed, log = run(host, {"run/kvmpool/endpoint": f"unix:{host.folder}/s\n", "run/kvmpool/claim": "gpu7\n"})
    assert printed == "init=0\ncount=0\n"
    assert "claim gpu7" in log


def test_the_configuration_goes_before_the_boot_units_files(host: shim.Host) -> None:
    config = f"# by hand\nendpoint = unix:{host.folder}/s\nclaim=gpu3\nunknown = passed over\n"
    printed, log = run(host, {"etc/kvmpool/guest.conf": config, "run/kvmpool/endpoint": "unix:/nowhere\n"})
    assert printed == "init=0\ncount=0\n"
    assert "claim gpu3" in log


def test_the_environment_goes_before_all_files(host: shim.Host) -> None:
    files = {"etc/kvmpool/guest.conf": "endpoint = unix:/nowhere\n", "run/kvmpool/endpoint": "unix:/nowhere\n"}
    printed, log = run(host, files, KVMPOOL_ENDPOINT=f"unix:{host.folder}/s", KVMPOOL_CLAIM="gpu1")
    assert printed == "init=0\ncount=0\n"
    assert "claim gpu1" in log


def test_with_no_endpoint_at_all_there_is_no_device(host: shim.Host) -> None:
    printed, log = run(host, {})
    assert printed == "init=100\ncount=3\n"
    assert "no endpoint: set KVMPOOL_ENDPOINT" in log


@pytest.mark.parametrize("claim", ["../gpu0", "", "a" * 40, "gpu 0"])
def test_a_claim_that_is_no_name_is_no_device(host: shim.Host, claim: str) -> None:
    printed, _ = run(host, {}, KVMPOOL_ENDPOINT=f"unix:{host.folder}/s", KVMPOOL_CLAIM=claim)
    assert printed == "init=100\ncount=3\n"
