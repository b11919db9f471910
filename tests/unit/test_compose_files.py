"""What docker/compose.yaml puts together: three hosts of one job, asked by Prometheus, shown by Grafana."""

from __future__ import annotations

import json
import re
import shutil
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml

from keepstep.adapters.host_metrics import HostMetrics
from keepstep.adapters.prometheus import Metrics
from keepstep.core.causes import FailureCause
from keepstep.intake.contract import load_contract
from tests.support.dashboard import DASHBOARD, expressions, metrics_of, panels

ROOT = Path(__file__).resolve().parents[2]
DOCKER = ROOT / "docker"
HOSTS = ["algo-1", "algo-2", "algo-3"]
BASE = "/opt/ml/"


def read(name: str) -> Any:
    return yaml.safe_load((DOCKER / name).read_text())


def services() -> dict[str, Any]:
    """Every service, with what each variable is where nothing is set."""
    text = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", (DOCKER / "compose.yaml").read_text())
    assert "$" not in text, "a variable without a default"
    return yaml.safe_load(text)["services"]


def mounts(service: str) -> dict[str, Path]:
    """Where a container finds what of the source tree."""
    split = [volume.split(":") for volume in services()[service]["volumes"]]
    assert all(words[2] == "ro" for words in split if len(words) > 1)
    return {words[1]: DOCKER / words[0] for words in split if len(words) > 1}


@pytest.fixture(scope="module")
def exported() -> set[str]:
    """Every series that an agent may show; a label without values has none of its own, but its name is there."""
    metrics = Metrics("127.0.0.1", 0, FailureCause)
    HostMetrics(metrics.registry)
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{metrics.port}/metrics", timeout=5) as answer:
            told = re.findall(r"^# TYPE (\w+) (\w+)$", answer.read().decode(), re.MULTILINE)
    finally:
        metrics.close()
    parts = {"histogram": ("_bucket", "_sum", "_count")}
    return {name + part for name, kind in told for part in parts.get(kind, ("",)) if not name.endswith("_created")}


def test_each_host_is_told_of_the_same_job(tmp_path: Path) -> None:
    """By the files that are mounted, as keepstep itself reads them."""
    for host in HOSTS:
        for place, source in mounts(host).items():
            to = tmp_path / host / place.removeprefix(BASE)
            to.parent.mkdir(parents=True, exist_ok=True)
            (shutil.copytree if source.is_dir() else shutil.copy)(source, to)
        contract = load_contract(tmp_path / host, services()[host]["environment"])
        assert (contract.current_host, list(contract.hosts)) == (host, HOSTS)
        assert contract.code_dir / contract.entry == tmp_path / host / "code" / "digits_keras.py"
        assert contract.job_name == "digits"
        assert contract.store == "s3://keepstep/digits"
        assert services()[host]["hostname"] == host


def test_prometheus_asks_each_host_where_it_listens() -> None:
    (job,) = read("prometheus.yml")["scrape_configs"]
    (static,) = job["static_configs"]
    listens = {service: config["command"][-1] for service, config in services().items() if service in HOSTS}
    assert set(listens.values()) == {"telemetry.listen=0.0.0.0:9404"}
    assert static["targets"] == [f"{host}:9404" for host in listens]
    assert sorted(listens) == HOSTS


def test_nothing_is_reached_from_another_machine_and_every_image_is_pinned() -> None:
    for name, service in services().items():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ())), name
        assert re.search(r":(\w*\d+\.\d+\.\d+|keepstep)$", service["image"]), name


def test_moto_is_the_one_that_the_tests_run_with() -> None:
    pinned = re.search(r"^moto==([\d.]+)", (ROOT / "requirements" / "dev.txt").read_text(), re.MULTILINE)
    assert pinned is not None
    assert services()["s3"]["image"] == f"motoserver/moto:{pinned[1]}"


@pytest.mark.parametrize(("title", "expression"), expressions())
def test_a_panel_asks_for_what_is_exported(title: str, expression: str, exported: set[str]) -> None:
    assert metrics_of(expression), title
    assert metrics_of(expression) <= exported


def test_all_that_is_exported_is_shown(exported: set[str]) -> None:
    """A histogram by some of its parts."""
    shown = {re.sub(r"_(bucket|sum|count)$", "", name) for _, asked in expressions() for name in metrics_of(asked)}
    assert {re.sub(r"_(bucket|sum|count)$", "", name) for name in exported} == shown


def test_the_panels_do_not_lie_on_each_other() -> None:
    taken = set()
    for panel in panels():
        at = panel["gridPos"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert not cells & taken, panel["title"]
        assert at["x"] + at["w"] <= 24, panel["title"]
        taken |= cells
    numbers = [panel["id"] for panel in json.loads(DASHBOARD.read_text())["panels"]]
    assert len(numbers) == len(set(numbers))


def test_grafana_finds_the_dashboard_and_the_dashboard_its_source() -> None:
    found = mounts("grafana")
    home = services()["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    (provider,) = yaml.safe_load((found["/etc/grafana/provisioning"] / "dashboards" / "keepstep.yaml").read_text())[
        "providers"
    ]
    (source,) = read("grafana/provisioning/datasources/prometheus.yaml")["datasources"]
    folder = provider["options"]["path"]
    assert (found[folder] / Path(home).relative_to(folder)).samefile(DASHBOARD)
    asked = [each["datasource"] for panel in panels() for each in (panel, *panel["targets"])]
    assert {(each["type"], each["uid"]) for each in asked} == {(source["type"], source["uid"])}
