"""What is shipped for operating fits the server: the dashboard's queries, the unit, the image."""

from __future__ import annotations

import configparser
import json
import re
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import yaml

from octavo.config import EngineConfig
from octavo.server.config import ServerConfig
from octavo.server.metrics import PATIENCE
from tests.server.scraping import Figures, Watched

REPO = Path(__file__).resolve().parent.parent.parent
DASHBOARD = json.loads((REPO / "deploy/grafana/octavo.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
QUERIES = [(panel["title"], target) for panel in PANELS for target in panel["targets"]]
DRAIN = ServerConfig(EngineConfig("demo")).drain_seconds


@pytest.fixture(scope="module")
def figures() -> Figures:
    w = Watched(vllm=False)  # the dashboard must do without other people's names
    w.add(10, 4)
    w.drain()
    return w.scrape()


def names_in(expression: str) -> set[str]:
    return set(re.findall(r"\b(?:octavo_|vllm:|process_)\w+", expression))


@pytest.mark.parametrize(("title", "target"), QUERIES, ids=[f"{title} {target['refId']}" for title, target in QUERIES])
def test_every_query_of_the_dashboard_finds_its_metrics_and_labels(
    figures: Figures, title: str, target: dict[str, Any]
) -> None:
    expression = target["expr"]
    names = names_in(expression)
    assert names
    assert len(re.findall(r'\{model_name="\$model_name"', expression)) == len(re.findall(r"(?:octavo_)\w+", expression))
    wanted = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
    for group in re.findall(r"by \(([^)]*)\)", expression):
        wanted |= set(group.split(", "))
    for name in names:
        labels = {label for sample in figures.samples[name] for label, _ in sample}
        assert wanted <= labels
        for label, value in re.findall(r', (\w+)="([^"]*)"', expression):
            if label in labels:
                assert value in figures.by(name, label)


def test_the_dashboard_shows_what_it_is_for() -> None:
    asked = {name for _, target in QUERIES for name in names_in(target["expr"])}
    assert asked >= {
        "octavo_memory_bytes",
        "octavo_requests_waiting",
        "octavo_requests_running",
        "octavo_limiting_resource",
        "octavo_time_to_first_token_seconds_bucket",
        "octavo_inter_token_latency_seconds_bucket",
        "octavo_request_latency_seconds_bucket",
        "octavo_generated_tokens_total",
        "octavo_preemption_discarded_tokens_total",
        "octavo_preemption_recomputed_tokens_total",
        "octavo_prefix_cache_hit_tokens_total",
        "octavo_prefix_cache_misses_total",
    }
    ledger = next(panel for panel in PANELS if "octavo_memory_bytes" in panel["targets"][0]["expr"])
    assert ledger["fieldConfig"]["defaults"]["unit"] == "bytes"
    assert ledger["fieldConfig"]["defaults"]["custom"]["stacking"]["mode"] == "normal"


def test_the_dashboard_lets_one_choose_the_data_source_and_the_model() -> None:
    datasource, model = DASHBOARD["templating"]["list"]
    assert (datasource["name"], datasource["type"]) == ("datasource", "datasource")
    assert (model["name"], model["query"]["query"]) == ("model_name", "label_values(octavo_info, model_name)")
    for panel in PANELS:
        assert panel["datasource"]["uid"] == "${datasource}"
        assert all(target["datasource"]["uid"] == "${datasource}" for target in panel["targets"])


def test_panels_have_ids_of_their_own_and_do_not_overlap() -> None:
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [{(x, y) for x in span(panel, "x", "w") for y in span(panel, "y", "h")} for panel in panels]
    assert all(a.isdisjoint(b) for a, b in combinations(cells, 2))
    assert all(x < 24 for covered in cells for x, _ in covered)


def span(panel: dict[str, Any], start: str, length: str) -> range:
    place = panel["gridPos"]
    return range(place[start], place[start] + place[length])


def test_the_unit_gives_a_drain_its_time_and_shuts_the_rest_of_the_system_off() -> None:
    unit = configparser.ConfigParser(strict=True, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]  # names keep their capitals
    unit.read(REPO / "deploy/octavo.service")
    service = unit["Service"]
    assert float(service["TimeoutStopSec"]) > DRAIN + 5
    assert service["KillSignal"] == "SIGTERM"
    assert "octavo serve --config" in service["ExecStart"]
    for name in ("DynamicUser", "NoNewPrivileges", "PrivateTmp", "ProtectKernelModules"):
        assert service[name] == "yes"
    assert service["ProtectSystem"] == "strict"
    assert "MemoryDenyWriteExecute" not in service  # torch compiles kernels at run time
    assert "ProcSubset" not in service  # the memory budget comes from /proc/meminfo


def test_the_image_runs_as_somebody_else_than_root_and_checks_health() -> None:
    text = (REPO / "Dockerfile").read_text()
    final = text[text.rindex("\nFROM ") :]
    assert final.split()[1] == "python:3.11-slim"
    assert re.search(r"^USER [1-9]\d*$", final, re.MULTILINE)
    assert "/health" in final[final.index("HEALTHCHECK") :]
    assert 'ENTRYPOINT ["octavo", "serve"]' in final
    assert "OCTAVO_HOST=0.0.0.0" in final
    copied = {name for line in re.findall(r"^COPY (?!--)(.*) \S+$", text, re.MULTILINE) for name in line.split()}
    ignored = (REPO / ".dockerignore").read_text().splitlines()
    for name in copied:
        assert (REPO / name).exists()
        assert f"!{name}" in ignored


def test_prometheus_waits_longer_for_a_scrape_than_a_scrape_for_the_engine() -> None:
    config = yaml.safe_load((REPO / "deploy/prometheus.yml").read_text())
    timeout, interval = (int(config["global"][name].rstrip("s")) for name in ("scrape_timeout", "scrape_interval"))
    assert PATIENCE < timeout <= interval
    (job,) = config["scrape_configs"]
    assert job["metrics_path"] == "/metrics"
