"""What the engine counts arrives as Prometheus counts it: each time what was added since."""

from deltagram.serving.metrics import Metrics
from deltagram.serving.worker import COUNTS


def message(count: int, misses: dict[str, int], cached: tuple[int, int] | None) -> dict[str, object]:
    gauges = dict.fromkeys(
        ("running", "waiting", "pages_used", "slots_used", "prefix_pages", "prefix_checkpoints"), count
    )
    counts = dict.fromkeys(COUNTS, count)
    return {"gauges": gauges, "counts": counts, "prefix_misses": misses, "cached_rows": cached, "step": None}


def test_counts_rise_to_the_engine_s_own() -> None:
    metrics = Metrics()
    metrics.step(message(3, {"no_entry": 2}, (5, 9)))
    metrics.step(message(7, {"no_entry": 2, "evicted": 1}, None))
    metrics.step(message(8, {"no_entry": 4, "evicted": 1}, (6, 12)))
    lines = metrics.text().decode().splitlines()
    for name in COUNTS:
        assert f"deltagram_{name.removeprefix('num_')}_total 8.0" in lines
    assert 'deltagram_prefix_misses_total{reason="no_entry"} 4.0' in lines
    assert 'deltagram_prefix_misses_total{reason="evicted"} 1.0' in lines
    assert "deltagram_cached_row_hits_total 6.0" in lines and "deltagram_cached_row_lookups_total 12.0" in lines
    assert "deltagram_prefix_checkpoints 8.0" in lines
