"""Asks axe-core whether a page can be used by everybody."""

from importlib.resources import files
from typing import Any

from browser import Visit

AXE = (files("axe_playwright_python") / "axe.min.js").read_text()
SERIOUS = """async () => {
    const found = await axe.run(document, { resultTypes: ["violations"] });
    return found.violations.filter((one) => ["serious", "critical"].includes(one.impact)).map((one) =>
        `${one.id}: ${one.help}; ${one.nodes.slice(0, 4).map((node) => node.html.slice(0, 300) + " " +
            node.any.map((check) => check.message).join("; ")).join("\\n    ")}`);
}"""
STILL = """async () => {
    const still = new CSSStyleSheet();
    still.replaceSync("*, ::before, ::after { transition: none !important; animation: none !important }");
    document.adoptedStyleSheets = [still];
    const fading = () => document.querySelector("[class*=-enter-active], [class*=-leave-active]");
    for (let left = 200; left && fading(); left--) await new Promise(requestAnimationFrame);
    await new Promise((drawn) => requestAnimationFrame(() => requestAnimationFrame(drawn)));
}"""
DARK_PHONE = {
    "viewport": {"width": 390, "height": 780},
    "is_mobile": True,
    "has_touch": True,
    "color_scheme": "dark",
}


def has_nothing_serious(there: Visit) -> None:
    """Asks axe-core, with nothing half faded in."""
    there.page.evaluate(STILL)
    there.page.evaluate(AXE)
    found: list[Any] = there.page.evaluate(SERIOUS)
    assert not found, "\n".join(found)
