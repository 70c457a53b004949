"""What is asked of Prometheus to scale workers, by KEDA and by the Prometheus adapter."""

import re

import yaml
from manifests import KUBERNETES, Manifest, of_kind, render

ALL = "gpu+all"  # the variant with KEDA


def adapter_rules() -> list[Manifest]:
    text = (KUBERNETES / "components" / "autoscaling" / "prometheus-adapter.yaml").read_text(encoding="utf-8")
    rules = yaml.safe_load(text)["rules"]
    return [*rules["custom"], *rules["external"]]


def queries() -> dict[str, str]:
    """What is asked of Prometheus, for scaling; the adapter's templates as it would fill them in."""
    found = {}
    for item in of_kind(render(ALL), "ScaledObject"):
        for index, trigger in enumerate(item["spec"]["triggers"]):
            found[f"{item['metadata']['name']} {index}"] = trigger["metadata"]["query"]
    for rule in adapter_rules():
        series = re.match(r"\w+", rule["seriesQuery"])
        assert series is not None
        query = rule["metricsQuery"].replace("<<.Series>>", series[0])
        query = query.replace("<<.LabelMatchers>>", 'namespace="pageferry"').replace("<<.GroupBy>>", "pod")
        found[rule.get("name", {}).get("as", series[0])] = query
    return found
