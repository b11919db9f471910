"""The command of an etcd member, and what is said where there is no usable etcd."""

from __future__ import annotations

from pathlib import Path

import pytest

from keepstep.adapters.etcd_member import (
    EtcdMissing,
    MemberSpec,
    choose_data_dir,
    find_etcd,
    is_health_answer,
    parse_version,
    plan_member,
)


def spec(host: str = "10.0.0.1") -> MemberSpec:
    return MemberSpec("algo-1", host, 2379, 2380, Path("/data"), Path("/log"), "nonce")


def test_the_command_of_a_single_member():
    command = plan_member(Path("/usr/bin/etcd"), spec())
    assert command.endpoint == "http://10.0.0.1:2379"
    assert command.log_path == Path("/log")
    assert command.argv[0] == "/usr/bin/etcd"
    assert {
        "--name=algo-1",
        "--data-dir=/data",
        "--listen-client-urls=http://10.0.0.1:2379",
        "--initial-cluster=algo-1=http://10.0.0.1:2380",
        "--initial-cluster-token=nonce",
        "--auto-compaction-mode=revision",
    } <= set(command.argv)
    assert not any(name.startswith("ETCD_") and name != "ETCD_UNSUPPORTED_ARCH" for name in command.env)


def test_an_ipv6_host_is_bracketed():
    assert plan_member(Path("/usr/bin/etcd"), spec("fd00::1")).endpoint == "http://[fd00::1]:2379"


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("etcd Version: 3.4.23\nGit SHA: x\n", (3, 4, 23)),
        ("etcd Version: 3.6.0-rc.1\n", (3, 6, 0)),
        ("", None),
        ("bash: etcd: no such thing", None),
    ],
)
def test_versions(text, version):
    assert parse_version(text) == version


@pytest.mark.parametrize(
    ("script", "complaint"),
    [
        (None, "not on PATH"),
        ("echo 'etcd Version: 3.3.25'", "is etcd 3.3.25"),
        ("echo hello", "says 'hello"),
    ],
)
def test_an_unusable_etcd_is_refused_with_what_to_install(tmp_path, script, complaint):
    if script is not None:
        program = tmp_path / "etcd"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
    with pytest.raises(EtcdMissing, match=complaint) as caught:
        find_etcd(str(tmp_path))
    assert "etcd-server" in str(caught.value)


def test_an_etcd_that_can_not_be_executed_is_refused(tmp_path):
    program = tmp_path / "etcd"
    program.write_bytes(b"\x7fELF and nothing else")
    program.chmod(0o755)
    with pytest.raises(EtcdMissing, match="does not run"):
        find_etcd(str(tmp_path))


def test_data_goes_to_memory_only_where_there_is_room(tmp_path):
    assert choose_data_dir("d", tmp_path, shared_memory=tmp_path / "absent") == tmp_path / "d"
    # No file system that tests run on offers less than nothing: /proc has no room at all.
    assert choose_data_dir("d", tmp_path, shared_memory=Path("/proc")) == tmp_path / "d"


@pytest.mark.parametrize(
    ("answer", "healthy"),
    [
        (b'HTTP/1.1 200 OK\r\nContent-Length: 17\r\n\r\n{"health":"true"}', True),
        (b'HTTP/1.1 200 OK\r\n\r\n{"health":"true","reason":""}', True),
        (b'HTTP/1.1 503 Service Unavailable\r\n\r\n{"health":"false"}', False),
        (b'HTTP/1.1 200 OK\r\n\r\n{"health":"false"}', False),
        (b"HTTP/1.1 200 OK\r\n\r\n[]", False),
        (b"HTTP/1.1 200 OK\r\n\r\nhello", False),
        (b"", False),
    ],
)
def test_health(answer, healthy):
    assert is_health_answer(answer) is healthy
