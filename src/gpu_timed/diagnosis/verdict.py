"""One sentence for somebody who has never seen gpu_timed before."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gpu_timed.diagnosis.devices import NO_DEVICE_WORDS
from gpu_timed.findings import Finding, Section


def verdict(sections: Sequence[Section]) -> str:
    """Say whether calls will be measured and delivered, and if not, why."""
    found = [(section.name, finding) for section in sections for finding in section.findings]
    problems = [finding for _, finding in found if finding.level == "problem"]
    if problems:
        more = f" ({len(problems) - 1} more below)" if len(problems) > 1 else ""
        return f"Not ready: {problems[0].text.rstrip('.')}{more}."
    disabled = _get(found, "settings", "disabled")
    if disabled is not None and disabled.values.get("value"):
        return f"Switched off: {disabled.text}."
    return f"{_measuring(found)}; {_delivery(found)}."


def _measuring(found: Iterable[tuple[str, Finding]]) -> str:
    found = list(found)
    devices = [f for section, f in found if section == "devices" and f.key.startswith("device.")]
    if not devices:
        none = _get(found, "devices", "none")
        if none is not None and none.level == "note":
            return "Nothing is known to be wrong, and no GPU is in use by this process yet"
        return f"gpu_timed works here without a GPU: {NO_DEVICE_WORDS}"
    named = str(devices[0].values.get("name") or "the GPU")
    more = f" and {len(devices) - 1} more" if len(devices) > 1 else ""
    placed = [f for section, f in found if section == "clock" and f.key.startswith("placement.")]
    width = placed[0].values.get("uncertainty_ns") if placed else None
    true = f", placed on the host's time to ± {width / 1e3:.3g} µs" if isinstance(width, int | float) else ""
    return f"Ready: the GPU's time on {named}{more} can be measured{true}"


def _delivery(found: Iterable[tuple[str, Finding]]) -> str:
    sent = _get(found, "export", "send")
    if sent is None or sent.values.get("answer") == "not_tried":
        return "whether spans arrive was not tried"
    if sent.level == "ok":
        return f"a test span arrived at {sent.values.get('url')}"
    return f"but {sent.text}"


def _get(found: Iterable[tuple[str, Finding]], section: str, key: str) -> Finding | None:
    return next((finding for name, finding in found if (name, finding.key) == (section, key)), None)
