"""The page at /, in a real browser: by keyboard, by day and by night, on a desk and on a phone."""

import os
import shutil
import time

import pytest

DESK, PHONE = (1100, 800), (360, 640)

# Contrast of every text with what is behind it (WCAG 2: 4.5 for small text), and what sticks out.
LOOK = """
const channel = v => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
const light = c => 0.2126 * channel(c[0]) + 0.7152 * channel(c[1]) + 0.0722 * channel(c[2]);
const canvas = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
const colour = s => { canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = s; canvas.fillRect(0, 0, 1, 1);
  return [...canvas.getImageData(0, 0, 1, 1).data]; };
const behind = e => { for (; e; e = e.parentElement) {
  const c = colour(getComputedStyle(e).backgroundColor); if (c[3] > 250) return c; } return [255, 255, 255]; };
const shown = [...document.querySelectorAll('h1, span, .turn, .note, button, summary, label, textarea')];
return {
  contrasts: shown.filter(e => e.textContent.trim() || e.value).map(e => {
    const a = light(colour(getComputedStyle(e).color)), b = light(behind(e));
    return [e.textContent.trim().slice(0, 30), (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05)]; }),
  page: light(colour(getComputedStyle(document.body).backgroundColor)),
  wide: document.documentElement.scrollWidth - innerWidth,
  high: document.documentElement.scrollHeight - innerHeight,
  small: [...document.querySelectorAll('button, textarea')].filter(e => e.getBoundingClientRect().height < 40).length,
  typed: parseFloat(getComputedStyle(document.querySelector('textarea')).fontSize),
  elsewhere: performance.getEntriesByType('resource').filter(r => !r.name.startsWith(location.origin)).length,
};
"""


@pytest.fixture(scope="module")
def browser():
    binary, driver = (shutil.which(name) for name in ("chromium", "chromedriver"))
    if binary is None or driver is None:
        if os.environ.get("CI"):
            pytest.fail("no chromium and chromedriver, which CI installs")
        pytest.skip("no chromium and chromedriver on this machine (Debian: chromium chromium-driver)")
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for word in ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"):
        options.add_argument(word)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    window = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield window
    window.quit()


class Page:
    """The page in a browser; it is used by its keyboard."""

    def __init__(self, browser, url: str, size=DESK, scheme: str = "light") -> None:
        width, height = size
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": size == PHONE}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        features = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", features)
        self.browser = browser
        browser.get(url)
        self.until(lambda: self.all("#model")[0].text)

    def all(self, selector: str):
        return self.browser.find_elements("css selector", selector)

    def until(self, test, seconds: float = 15.0) -> None:
        deadline = time.monotonic() + seconds
        while not test():
            assert time.monotonic() < deadline, self.all("body")[0].text
            time.sleep(0.02)

    def press(self, *keys: str) -> None:
        from selenium.webdriver.common.action_chains import ActionChains

        ActionChains(self.browser).send_keys(*keys).perform()

    def press_shifted(self, key: str) -> None:
        from selenium.webdriver.common.action_chains import ActionChains
        from selenium.webdriver.common.keys import Keys

        ActionChains(self.browser).key_down(Keys.SHIFT).send_keys(key).key_up(Keys.SHIFT).perform()

    def set(self, field: str, value: object) -> None:
        self.browser.execute_script(f"document.getElementById('{field}').value = '{value}'")

    def answers(self) -> list[str]:
        return [element.text for element in self.all(".assistant")]

    def idle(self) -> bool:
        return self.all("#send")[0].text == "Send"

    def save(self, name: str) -> None:
        """A picture, for whoever wants to look."""
        if folder := os.environ.get("DELTAGRAM_SCREENSHOTS"):
            self.browser.save_screenshot(f"{folder}/{name}.png")


@pytest.fixture
def page(browser, start_paced):
    return lambda *arguments, **look: Page(browser, start_paced(*arguments).url, **look)


@pytest.mark.parametrize("size", [DESK, PHONE], ids=["desk", "phone"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_conversation_by_keyboard(page, size, scheme):
    from selenium.webdriver.common.keys import Keys

    shown = page(size=size, scheme=scheme)
    shown.save(f"{scheme}-{size[0]}-empty")
    shown.set("max_tokens", 30)
    shown.press("One")
    shown.press_shifted(Keys.ENTER)
    shown.press("two", Keys.ENTER)
    shown.until(lambda: shown.answers() and shown.idle())
    assert [element.text for element in shown.all(".user")] == ["One\ntwo"]
    assert shown.answers() == ["abcdefghijklmnopqrstuvwxyzabcd"]
    assert shown.all(".note")[0].text.startswith("30 tokens, ")
    shown.set("max_tokens", 2000)
    shown.press("Go on " * 20, Keys.ENTER)
    shown.until(lambda: len(shown.answers()) == 2 and len(shown.answers()[1]) > 5)
    early = shown.answers()[1]
    assert not shown.idle() and shown.all(".assistant[aria-busy=true]")
    shown.save(f"{scheme}-{size[0]}-talk")
    look = shown.browser.execute_script(LOOK)
    assert min(contrast for _, contrast in look["contrasts"]) >= 4.5, look["contrasts"]
    assert (look["page"] > 0.5) == (scheme == "light")
    assert look["wide"] <= 0 and look["high"] <= 0 and look["small"] == look["elsewhere"] == 0 and look["typed"] >= 16
    shown.until(lambda: len(shown.answers()[1]) > len(early))
    shown.press(Keys.ESCAPE)
    shown.until(shown.idle)
    stopped = shown.answers()[1]
    assert stopped.startswith(early) and len(stopped) < 2000 and shown.all(".note")[-1].text == "stopped"
    time.sleep(0.2)
    assert shown.answers()[1] == stopped
    logged = [entry for entry in shown.browser.get_log("browser") if entry["level"] == "SEVERE"]
    assert not logged, logged


def test_what_the_server_refuses_is_shown_and_a_new_chat_begins(page):
    from selenium.webdriver.common.keys import Keys

    shown = page()
    shown.set("max_tokens", 0)
    shown.press("Hello", Keys.ENTER)
    shown.until(lambda: shown.all(".wrong"))
    assert "max_tokens must be an integer" in shown.all(".wrong")[0].text and shown.answers() == []
    shown.all("#new")[0].click()
    assert shown.all("#log > *") == []
    shown.set("max_tokens", 3)
    shown.press("<b>Again</b>", Keys.ENTER)  # the message field has the focus again
    shown.until(lambda: shown.answers() == ["abc"])
    assert shown.all(".user")[0].text == "<b>Again</b>"


def test_with_a_key_the_browser_asks_for_it(browser, start_paced):
    from selenium.webdriver.common.keys import Keys

    server = start_paced("--api-key", "sk-page")
    shown = Page(browser, server.url.replace("//", "//me:sk-page@"))
    shown.set("max_tokens", 3)
    shown.press("Hi", Keys.ENTER)
    shown.until(lambda: shown.answers() == ["abc"])


def test_nothing_but_the_page_itself_may_run(server):
    answer = server.client.get("/")
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "connect-src 'self'" in policy and "innerHTML" not in answer.text
