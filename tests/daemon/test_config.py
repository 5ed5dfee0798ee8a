"""Configuration files as people write them, with every kind of mistake at once."""

from __future__ import annotations

import re
import tomllib
from dataclasses import fields, replace
from pathlib import Path

import pytest

from kvmpool.core.health import Limits
from kvmpool.core.model import Settings
from kvmpool.daemon.config import Config, PolicySection, load
from kvmpool.errors import ConfigInvalid


def _write(folder: Path, text: str, **more: str) -> Path:
    main = folder / "kvmpoold.toml"
    main.write_text(text)
    for name, content in more.items():
        (folder / "conf.d").mkdir(exist_ok=True)
        (folder / "conf.d" / f"{name}.toml").write_text(content)
    return main


def _faults(path: Path) -> list[str]:
    with pytest.raises(ConfigInvalid) as refused:
        load(path)
    return str(refused.value).splitlines()


def test_without_a_file_the_defaults_hold(tmp_path: Path) -> None:
    config = load(_write(tmp_path, ""))
    assert config.socket == Path("/run/kvmpool/kvmpoold.sock")
    assert config.store_file == Path("/var/lib/kvmpool/store.db")
    assert config.host.name


def test_every_section_and_key_is_read(tmp_path: Path) -> None:
    text = """
    [host]
    name = "h0"
    [paths]
    run = "/r"
    state = "/s"
    [device]
    kmsg = ""
    inventory_interval_s = 2
    nvml = false
    [health]
    probe_s = 1
    lost_reads = 5
    [cards]
    match = ["10de:*", "1002:5159"]
    [dataplane]
    listen = "unix"
    [policy]
    memory_ratio = 1.5
    breaker_min_cards = 4
    [hook]
    deadline_s = 10
    """
    config = load(_write(tmp_path, text))
    assert config.host.name == "h0"
    assert config.socket == Path("/r/kvmpoold.sock")
    assert config.device.inventory_interval_s == 2.0
    assert config.health == Limits(probe_s=1.0, lost_reads=5)
    assert config.cards.match == ("10de:*", "1002:5159")
    assert config.settings.memory_ratio == 1.5
    assert config.settings.breaker_min_cards == 4
    assert config.settings.prepare_deadline_s < config.hook.deadline_s


def test_a_file_of_conf_d_overrides_single_keys_in_the_order_of_names(tmp_path: Path) -> None:
    config = load(
        _write(
            tmp_path,
            "[paths]\nrun='/a'\nstate='/s'",
            b="[paths]\nrun='/b'",
            c="[paths]\nrun='/c'",
            a="[paths]\nrun='/x'",
        )
    )
    assert (config.paths.run, config.paths.state) == ("/c", "/s")
    assert [Path(name).name for name in config.files] == ["kvmpoold.toml", "a.toml", "b.toml", "c.toml"]


def test_all_faults_of_all_files_are_reported_at_once_each_with_file_and_key(tmp_path: Path) -> None:
    main = _write(
        tmp_path,
        "[host]\nname = 7\n[hooks]\nx = 1\n[hook]\ndeadlines = 3\n[policy]\nmemory_ratio = -1\npaused = 1\n",
        x="[device]\nkmsg = 'dev/kmsg'\n[cards]\nmatch = []\n[dataplane]\nlisten = 'tcp:h:70000'\n",
        y="[broken",
    )
    faults = _faults(main)
    assert len(faults) == 9
    assert f"{main}: host.name = 7: must be a text" in faults
    assert f"{main}: [hooks] is not a section (did you mean hook?)" in faults
    assert f"{main}: hook.deadlines is not a key (did you mean deadline_s?)" in faults
    assert f"{main}: policy.memory_ratio = -1: must be from 0.1 to 16.0" in faults
    assert f"{main}: policy.paused = 1: must be true or false" in faults
    assert any("x.toml: device.kmsg = 'dev/kmsg': must be an absolute path" in fault for fault in faults)
    assert any("x.toml: cards.match = []" in fault for fault in faults)
    assert any("x.toml: dataplane.listen" in fault and "65535" in fault for fault in faults)
    assert any("y.toml: not TOML" in fault for fault in faults)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("host = 3", "write [host]"),
        ("[paths]\nrun = \"/a\\u0000b\"", "must be an absolute path"),
        ("[store]\nkind = 'etcd'", "must be sqlite"),
        ("[libvirt]\nuri = 'qemu'", "a libvirt URI"),
        ("[cards]\nmatch = ['10DE:*']", "vendor:device"),
        ("[cards]\nmatch = [1]", "must be a text"),
        ("[hook]\ndeadline_s = nan", "must be from"),
        ("[hook]\ndeadline_s = true", "must be a number"),
        ("[policy]\nbreaker_min_cards = 1.5", "must be a whole number"),
        ("[health]\nlost_reads = 0", "must be from 1 to 1000"),
        ("[qqqqqq]\n", "known: host, paths"),
        ("\x00", "not TOML"),
    ],
)  # fmt: skip
def test_a_single_fault_names_its_remedy(tmp_path: Path, text: str, told: str) -> None:
    [fault] = _faults(_write(tmp_path, text))
    assert told in fault


def test_a_named_file_that_is_missing_or_not_utf8_is_a_fault(tmp_path: Path) -> None:
    assert "cannot be read: No such file" in _faults(tmp_path / "none.toml")[0]
    bad = tmp_path / "bad.toml"
    bad.write_bytes(b"\xff\xfe")
    assert "not TOML" in _faults(bad)[0]


def test_the_policy_section_knows_every_setting_of_the_core_with_its_default() -> None:
    policy = {each.name: each.default for each in fields(PolicySection)}
    core = {each.name: each.default for each in fields(Settings) if each.name != "prepare_deadline_s"}
    assert policy == core
    assert Config().settings == Settings(prepare_deadline_s=Config().prepare_deadline_s)


def test_the_documented_file_has_every_key_at_its_default(tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "docs" / "kvmpoold.toml").read_text()
    plain = re.sub("^# (?=[a-z_]+ = )", "", text, flags=re.MULTILINE)
    file = tmp_path / "kvmpoold.toml"
    file.write_text(re.sub("(?m)^name = .*$", "", plain))
    config = load(file)
    assert replace(config, files=(), host=Config().host) == Config()
    documented = tomllib.loads(plain)
    sections = [each.name for each in fields(Config) if each.name != "files"]
    assert list(documented) == sections
    for name in sections:
        assert list(documented[name]) == [each.name for each in fields(getattr(Config(), name))]
