"""The inspector in a real browser: headless Chromium, where one is installed."""

import json
import shutil

import pytest

from served import SCRIPTS, Served

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="needs chromium and chromedriver")
SIZES = {"desk": (1280, 1000), "phone": (390, 844)}


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    from selenium.webdriver import Chrome, ChromeOptions, ChromeService

    options = ChromeOptions()
    options.binary_location = CHROMIUM
    flags = "headless=new no-sandbox disable-gpu disable-quic no-first-run disable-background-networking disable-sync"
    for flag in f"{flags} disable-component-update user-data-dir={tmp_path_factory.mktemp('profile')}".split():
        options.add_argument(f"--{flag}")
    made = Chrome(options=options, service=ChromeService(DRIVER))
    yield made
    made.quit()


@pytest.fixture
def page(browser, scripted_decoder, request):
    """The inspector of a running server, in one size."""
    width, height = SIZES[request.param]
    with Served(scripted_decoder) as served:
        browser.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride",
            {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500},
        )
        browser.get(served.url.removesuffix("/v1") + "/ui")
        wait(browser, "return document.getElementById('model').options.length === 1")
        yield browser


def wait(browser, script):
    from selenium.webdriver.support.ui import WebDriverWait

    return WebDriverWait(browser, 15, 0.05).until(lambda b: b.execute_script(script))


def ask(page, message):
    """Write a message and send it, with the keyboard alone."""
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    field = page.find_element(By.ID, "message")
    field.clear()
    field.send_keys(message)
    field.send_keys(Keys.CONTROL, Keys.ENTER)
    wait(page, "return !document.getElementById('send').disabled && document.querySelectorAll('#recent button').length")


@pytest.mark.parametrize("page", list(SIZES), indirect=True)
def test_a_call_is_shown_with_its_sources_its_times_and_in_the_list(page):
    ask(page, "weather")
    shown = page.execute_script("return document.getElementById('answer').textContent")
    assert shown == SCRIPTS["weather"]
    sources = page.execute_script("return [...document.querySelectorAll('#answer .tok')].map(e => e.classList[1])")
    assert {"schema", "target"} <= set(sources)
    call = page.execute_script("return document.getElementById('calls').textContent")
    assert call == 'Call: get_weather({"city": "Oslo", "days": 3})'
    bars = page.execute_script("return document.querySelectorAll('#timeline rect').length")
    facts = page.execute_script("return [...document.querySelectorAll('#facts div')].map(e => e.textContent)")
    rounds = int(next(fact for fact in facts if fact.endswith("rounds")).removesuffix("rounds"))
    assert bars == rounds + 1 > 2  # the prompt has one too
    assert page.execute_script("return document.querySelector('#recent button').textContent") == "weather"


@pytest.mark.parametrize("page", list(SIZES), indirect=True)
def test_nothing_overflows_and_everything_has_a_name(page):
    ask(page, "two")
    assert page.execute_script("return document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    unnamed = page.execute_script("""
        return [...document.querySelectorAll('input, select, textarea, button')].filter(e =>
            !e.textContent.trim() && !document.querySelector(`label[for="${e.id}"]`)).length""")
    assert unnamed == 0
    assert [entry for entry in page.get_log("browser") if entry["level"] == "SEVERE"] == []


@pytest.mark.parametrize("page", ["desk"], indirect=True)
def test_mistakes_are_told_and_nothing_is_lost(page):
    page.execute_script("document.getElementById('tools').value = '[{'")
    page.execute_script("document.getElementById('send').click()")
    assert "Tools are not JSON" in wait(page, "return document.getElementById('error').textContent")
    page.execute_script("document.getElementById('tools').value = arguments[0]", json.dumps([{"type": "function"}]))
    page.execute_script("document.getElementById('send').click()")
    assert "must be an object with a name" in wait(page, "return document.getElementById('error').textContent")
    assert page.execute_script("return document.getElementById('message').value")


@pytest.mark.parametrize("page", ["desk"], indirect=True)
def test_colours_can_be_read(page):
    """WCAG AA: every text colour of an answer against its ground has a contrast of 4.5 or more, light and dark."""
    ask(page, "weather")
    for scheme in ("light", "dark"):
        wanted = [{"name": "prefers-color-scheme", "value": scheme}]
        page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": wanted})
        pairs = page.execute_script("""
            const ground = getComputedStyle(document.getElementById('answer')).backgroundColor;
            return [...document.querySelectorAll('#legend .tok')].map(e => [getComputedStyle(e).color, ground])""")
        for ink, ground in pairs:
            assert contrast(ink, ground) >= 4.5, (scheme, ink, ground)
    page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def contrast(first, second):
    """Return the WCAG contrast of two CSS colours, `rgb(..)`."""

    def luminance(colour):
        parts = [int(part.split(".")[0]) / 255 for part in colour[colour.index("(") + 1 : -1].split(",")[:3]]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    light, dark = sorted((luminance(first), luminance(second)), reverse=True)
    return (light + 0.05) / (dark + 0.05)
