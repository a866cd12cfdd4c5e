"""The reference of the router's metrics, from the object that counts them."""

from collections.abc import Iterator
from typing import NamedTuple

from prometheus_client.metrics import MetricWrapperBase

from prefillshare_server.router.metrics import Metrics
from scripts.docs.markdown import code, page, table

INTRODUCTION = """\
# Metrics

`GET /metrics` of the router, in Prometheus' text format. Labels never hold session ids. A
histogram `X` is the three series `X_bucket`, `X_sum` and `X_count`. The workers have metrics of
their own, whose names begin with `vllm:`, at their own addresses.
"""


class Metric(NamedTuple):
    """One metric as a scraper sees it."""

    name: str
    kind: str
    labels: tuple[str, ...]
    description: str


def metrics() -> Iterator[Metric]:
    """All of a router, in the order in which it makes them."""
    for each in vars(Metrics()).values():
        if not isinstance(each, MetricWrapperBase):
            continue
        [family] = each.describe()
        name = f"{family.name}_total" if family.type == "counter" else family.name
        # Label names have no public reader, and without samples no metric shows them.
        yield Metric(name, family.type, tuple(each._labelnames), family.documentation)


def metrics_page() -> str:
    """The page."""
    rows = [
        [code(each.name), each.kind, ", ".join(map(code, each.labels)) or "–", each.description]
        for each in metrics()
    ]
    return page(INTRODUCTION, table(["name", "type", "labels", "what it counts"], rows))
