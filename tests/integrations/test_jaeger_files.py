"""The files for Jaeger, the collector, Prometheus and Grafana agree with each other and with this library.

Nothing is started: what is held here is what can be held without Docker.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpu_timed.export import attributes

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parents[2]
HERE = ROOT / "integrations" / "jaeger"
README = (HERE / "README.md").read_text()
PROSE = " ".join(README.split())  # wherever its lines break
PARTS = ("receivers", "processors", "exporters", "connectors", "extensions")


def load(name: str) -> Any:
    return yaml.safe_load((HERE / name).read_text())


COMPOSE = load("compose.yaml")
COLLECTOR = load("collector.yaml")
JAEGER = load("jaeger.yaml")
PROMETHEUS = load("prometheus.yaml")
DASHBOARD = json.loads((HERE / "grafana/dashboards/dashboard.json").read_text())
DATASOURCE = load("grafana/provisioning/datasources/prometheus.yaml")["datasources"][0]
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
QUERIES = [target["expr"] for panel in PANELS for target in panel["targets"]]


def published(service: str) -> dict[int, int]:
    """Return the ports of *service* inside its container, and what they are on the machine."""
    found = {}
    for port in COMPOSE["services"][service]["ports"]:
        address, outside, inside = port.split(":")
        assert address == "127.0.0.1", f"{service} has no password and is open to the network on {port}"
        found[int(inside)] = int(outside)
    return found


def port(endpoint: str) -> int:
    return int(endpoint.rpartition(":")[2])


def documented() -> dict[str, set[str]]:
    """Return the metrics that README lists, each with its labels."""
    rows = re.findall(r"^\| `(\w+)` \| ((?:`\w+`(?:, )?)+) \| (.*) \|$", README, re.MULTILINE)
    found: dict[str, set[str]] = {}
    for metric, labels, meaning in rows:
        held = set(re.findall(r"`(\w+)`", labels))
        if meaning.startswith("histogram"):
            found[f"{metric}_bucket"] = held | {"le"}
            found[f"{metric}_sum"] = found[f"{metric}_count"] = held
        else:
            found[metric] = held
    return found


def without_variables(query: str) -> str:
    """Put into *query* what Grafana puts there."""
    return query.replace("$__rate_interval", "1m").replace("$service", ".*").replace("$warmth", "(warm|unknown)")


def test_every_file_is_used_and_parses() -> None:
    """No file lies here that nothing mounts or explains."""
    mounted = [
        volume.split(":")[0].removeprefix("./")
        for service in COMPOSE["services"].values()
        for volume in service.get("volumes", ())
    ]
    for file in HERE.rglob("*"):
        name = file.relative_to(HERE).as_posix()
        if file.is_file() and name not in ("README.md", "compose.yaml"):
            assert any(name == one or name.startswith(f"{one}/") for one in mounted), name
            assert (json.loads if file.suffix == ".json" else yaml.safe_load)(file.read_text()), name
    for one in mounted:
        assert (HERE / one).exists(), one


def test_images_are_pinned() -> None:
    """A tag that says which version; README names the same Jaeger, and so does the example."""
    images = {name: service["image"] for name, service in COMPOSE["services"].items()}
    for name, image in images.items():
        assert re.fullmatch(r"[\w./-]+:v?\d+\.\d+\.\d+", image), name
    assert set(re.findall(r"jaegertracing/jaeger:[\w.]+", README)) == {images["jaeger"]}
    example = (ROOT / "examples/to_jaeger.py").read_text()
    assert set(re.findall(r"jaegertracing/jaeger:[\w.]+", example)) == {images["jaeger"]}


@pytest.mark.parametrize("held", [COLLECTOR, JAEGER], ids=["collector", "jaeger"])
def test_pipelines_use_what_is_defined_and_all_of_it(held: dict[str, Any]) -> None:
    """Every component of a pipeline is defined, and every component that is defined is used."""
    defined = {part: set(held.get(part, ())) for part in PARTS}
    used: dict[str, set[str]] = {part: set() for part in PARTS}
    used["extensions"] = set(held["service"].get("extensions", ()))
    for pipeline in held["service"]["pipelines"].values():
        assert pipeline["receivers"]
        assert pipeline["exporters"]
        for part in ("receivers", "processors", "exporters"):
            used[part] |= set(pipeline.get(part, ()))
    sources, sinks = used["receivers"] & defined["connectors"], used["exporters"] & defined["connectors"]
    assert sources == sinks == defined["connectors"], "a connector ends one pipeline and begins another"
    for part in ("receivers", "processors", "exporters", "extensions"):
        assert used[part] - defined["connectors"] == defined[part], part
    for signal in held["service"]["pipelines"]:
        assert signal.partition("/")[0] in ("traces", "metrics", "logs")


def test_the_collector_is_bounded_and_leaves_the_host_alone() -> None:
    """The limiter comes first everywhere, Go is told of it, and no processor detects resources."""
    limiter = COLLECTOR["processors"]["memory_limiter"]
    assert limiter["spike_limit_mib"] < limiter["limit_mib"]
    for pipeline in COLLECTOR["service"]["pipelines"].values():
        assert pipeline["processors"] == ["memory_limiter", "batch"]
    collector = COMPOSE["services"]["collector"]
    soft = int(collector["environment"]["GOMEMLIMIT"].removesuffix("MiB"))
    assert soft == pytest.approx(0.8 * limiter["limit_mib"], abs=1)
    assert limiter["limit_mib"] < int(collector["mem_limit"].removesuffix("m"))
    assert f"more than {limiter['limit_mib'] - limiter['spike_limit_mib']} MiB" in PROSE
    assert not any(name.startswith("resourcedetection") for name in COLLECTOR["processors"])


def test_traces_reach_jaeger() -> None:
    """The ports that the collector listens on are published, and it sends to the one that Jaeger listens on."""
    protocols = COLLECTOR["receivers"]["otlp"]["protocols"]
    assert published("collector") == {
        port(protocols["grpc"]["endpoint"]): 4317,
        port(protocols["http"]["endpoint"]): 4318,
    }
    exporter = COLLECTOR["exporters"]["otlp_grpc/jaeger"]
    host, _, number = exporter["endpoint"].partition(":")
    assert COMPOSE["services"][host]["image"].startswith("jaegertracing/jaeger:")
    assert int(number) == port(JAEGER["receivers"]["otlp"]["protocols"]["grpc"]["endpoint"])
    assert exporter["sending_queue"]["queue_size"] == int(re.search(r"up to (\d+) batches", PROSE)[1])
    assert published("jaeger") == {port(JAEGER["extensions"]["jaeger_query"]["http"]["endpoint"]): 16686}
    storage = JAEGER["extensions"]["jaeger_storage"]
    query = JAEGER["extensions"]["jaeger_query"]["storage"]
    assert query["traces"] in storage["backends"]
    assert JAEGER["exporters"]["jaeger_storage_exporter"]["trace_storage"] == query["traces"]
    most = storage["backends"][query["traces"]]["memory"]["max_traces"]
    assert f"the newest {most:,} (" in PROSE


def test_metrics_reach_grafana_and_jaeger() -> None:
    """Prometheus asks where the collector answers; Grafana and Jaeger ask where Prometheus answers."""
    targets = {
        target: job
        for job in PROMETHEUS["scrape_configs"]
        for one in job["static_configs"]
        for target in one["targets"]
    }
    own = COLLECTOR["service"]["telemetry"]["metrics"]["readers"][0]["pull"]["exporter"]["prometheus"]["port"]
    offered = port(COLLECTOR["exporters"]["prometheus"]["endpoint"])
    assert set(targets) == {f"collector:{offered}", f"collector:{own}"}
    assert targets[f"collector:{offered}"]["honor_labels"], "or job would be the scrape's, not the service's"
    (inside,) = published("prometheus")
    address = f"http://prometheus:{inside}"
    (metrics,) = (one["prometheus"] for one in JAEGER["extensions"]["jaeger_storage"]["metric_backends"].values())
    assert metrics["endpoint"] == DATASOURCE["url"] == address
    assert metrics["latency_unit"] == COLLECTOR["connectors"]["spanmetrics"]["histogram"]["unit"] == "s"
    assert (
        JAEGER["extensions"]["jaeger_query"]["storage"]["metrics"]
        in JAEGER["extensions"]["jaeger_storage"]["metric_backends"]
    )
    (destination,) = DATASOURCE["jsonData"]["exemplarTraceIdDestinations"]
    assert destination["url"].startswith(f"http://localhost:{published('jaeger')[16686]}/trace/")
    assert COLLECTOR["exporters"]["prometheus"]["enable_open_metrics"], "exemplars travel in no other format"


def test_readme_names_the_ports_that_are_open() -> None:
    """Each port on the machine is in README's table, and no other."""
    opened = {outside for service in COMPOSE["services"] for outside in published(service).values()}
    table = README.partition("## What runs")[2].partition("## ")[0]
    assert {int(number) for number in re.findall(r"localhost:(\d+)", table)} == opened


def test_spanmetrics_separates_cold_from_warm_by_our_own_names() -> None:
    """Its dimensions are attributes that gpu_timed sets, and its buckets begin where GPU work does."""
    spanmetrics = COLLECTOR["connectors"]["spanmetrics"]
    assert [one["name"] for one in spanmetrics["dimensions"]] == [attributes.WARMTH, attributes.MODE]
    sizes = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
    buckets = [
        float(number) * sizes[unit]
        for number, unit in (
            re.fullmatch(r"(\d+)(us|ms|s)", one).groups() for one in spanmetrics["histogram"]["explicit"]["buckets"]
        )
    ]
    assert buckets == sorted(set(buckets))
    assert buckets[0] <= 10e-6


def selectors(node: Any, promql: Any) -> Iterator[Any]:
    """Yield each selection of a metric in a parsed query."""
    if isinstance(node, promql.VectorSelector):
        yield node
    for name in ("expr", "lhs", "rhs", "param", "vs", "vector_selector"):
        inner = getattr(node, name, None)
        if inner is not None and not isinstance(inner, str):
            yield from selectors(inner, promql)
    for inner in getattr(node, "args", None) or ():
        yield from selectors(inner, promql)


@pytest.mark.parametrize("query", QUERIES)
def test_query_is_promql_over_documented_metrics(query: str) -> None:
    """It parses, and each metric and each label in it is one that README lists."""
    promql = pytest.importorskip("promql_parser")
    parsed = promql.parse(without_variables(query))
    found = list(selectors(parsed, promql))
    listed = documented()
    assert found
    assert len(found) == len(re.findall(r"\b(?:gpu_timed|traces_span_metrics)_\w+\{", query)), (
        "a selector was not found"
    )
    labels: set[str] = set()
    for one in found:
        assert one.name in listed, one.name
        labels |= listed[one.name]
        for matcher in one.matchers.matchers:
            assert matcher.name in listed[one.name], f"{one.name} has no label {matcher.name}"
    for grouped in re.findall(r"\bby \(([^)]*)\)", query):
        assert {label.strip() for label in grouped.split(",")} <= labels, grouped


def test_every_documented_metric_is_shown() -> None:
    """README lists nothing that the dashboard has no panel for."""
    together = " ".join(QUERIES)
    for metric in documented():
        base = re.sub(r"_(bucket|sum|count)$", "", metric)
        assert re.search(rf"\b{base}(_bucket|_sum|_count)?\{{", together), base
    assert len(documented()) == 4 * 3 + 4


def test_no_panel_mixes_cold_with_warm() -> None:
    """Every duration is chosen by warmth, and cold is not chosen by default."""
    for query in QUERIES:
        for metric, chosen in re.findall(r"(\w+_seconds_\w+)\{([^}]*)\}", query):
            assert re.search(r'warmth=~"\$warmth"', chosen), metric
    (warmth,) = (one for one in DASHBOARD["templating"]["list"] if one["name"] == "warmth")
    assert set(warmth["query"].split(",")) == {"warm", "unknown", "cold"}
    assert "cold" not in warmth["current"]["value"]


def test_dashboard_is_whole() -> None:
    """Ids are unique, panels lie side by side, legends use labels of their queries, the data source exists."""
    assert DATASOURCE["uid"] == "prometheus"
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert at["x"] + at["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells
    variables = {one["name"] for one in DASHBOARD["templating"]["list"]}
    for panel in PANELS:
        assert panel["description"]
        assert panel["datasource"]["uid"] == DATASOURCE["uid"]
        for target in panel["targets"]:
            assert set(re.findall(r"\$(?!__)(\w+)", target["expr"])) <= variables
            by = set(re.split(r", ", ", ".join(re.findall(r"\bby \(([^)]*)\)", target["expr"]))))
            assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= by, target["legendFormat"]
    provider = load("grafana/provisioning/dashboards/gpu_timed.yaml")["providers"][0]["options"]["path"]
    assert f"./grafana/dashboards:{provider}:ro" in COMPOSE["services"]["grafana"]["volumes"]


def test_the_three_commands_are_there() -> None:
    """What README tells to run exists."""
    first = re.search(r"```bash\n(.*?)```", README, re.DOTALL)
    assert first
    compose, install, example = first[1].strip().splitlines()
    assert (ROOT / re.search(r"-f (\S+)", compose)[1]).is_file()
    assert (ROOT / example.removeprefix("python ")).is_file()
    extra = re.search(r"\.\[(\w+)\]", install)[1]
    assert re.search(rf"^{extra} = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)


def test_the_metrics_listed_are_those_that_are_exported() -> None:
    """Prometheus's names and labels of what gpu_timed's own code exports: neither side can change alone."""
    from gpu_timed.export import metrics

    def prometheus(name: str) -> str:
        return name.replace(".", "_")

    seconds = (metrics.DEVICE_DURATION, metrics.LAUNCH_DURATION, metrics.QUEUE_DURATION)
    labels = {prometheus(name) for name in (metrics.SPAN_NAME, metrics.MODE, metrics.WARMTH)}
    held = {name: labels for name, labels in documented().items() if name.startswith("gpu_timed_")}

    def has(metric: str, suffix: str, wanted: set[str]) -> None:
        (found,) = {
            frozenset(each - {"le"}) for name, each in held.items() if name.startswith(f"{prometheus(metric)}_{suffix}")
        }
        assert found == wanted

    for name in seconds:
        has(name, "seconds", {"job", *labels})
    has(metrics.CALLS, "total", {"job", prometheus(metrics.SPAN_NAME)})
    has(metrics.COLD, "total", {"job", *map(prometheus, (metrics.SPAN_NAME, metrics.PROBE))})
    has(metrics.LOST, "total", {"job", prometheus(metrics.REASON)})
