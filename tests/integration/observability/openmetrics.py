"""Reads a page of metrics as OpenMetrics, strictly, and prints what exemplars it has: one JSON object."""

import json
import sys
import urllib.request

from prometheus_client.openmetrics.parser import text_string_to_metric_families

request = urllib.request.Request(sys.argv[1], headers={"Accept": "application/openmetrics-text; version=1.0.0"})
with urllib.request.urlopen(request, timeout=10) as answer:
    kind = answer.headers["content-type"]
    page = answer.read().decode()

exemplars = []
families = {}
for family in text_string_to_metric_families(page):
    families[family.name] = family.type
    for sample in family.samples:
        if sample.exemplar is None:
            continue
        assert sample.exemplar.value <= float(sample.labels["le"]), sample
        exemplars.append({
            "family": family.name,
            "model": sample.labels["model"],
            "labels": sample.exemplar.labels,
            "value": sample.exemplar.value,
            "timestamp": sample.exemplar.timestamp,
        })
print(json.dumps({"content_type": kind, "families": families, "exemplars": exemplars}))
