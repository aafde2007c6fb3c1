"""The status page in headless Chromium, and what its policy keeps out."""

from __future__ import annotations

import os
import re
import shutil

import httpx
import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

import running

HOSTILE = '<img src=x onerror="document.title=1"> & <b>text</b>'


@pytest.fixture(scope="module")
def guarded():
    with running.process("--api-key", "secret", "--block-size", 8, "--name", HOSTILE) as server:
        yield server.url


@pytest.fixture(scope="module")
def browser():
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    if not (chromium and driver):
        pytest.skip("needs Debian's chromium and chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for argument in (
        "headless=new",
        "no-sandbox",
        "disable-dev-shm-usage",
        "window-size=1000,1100",
    ):
        options.add_argument(f"--{argument}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = webdriver.Chrome(options, webdriver.ChromeService(driver))
    yield browser
    browser.quit()


def until(browser, condition, seconds=30):
    return WebDriverWait(browser, seconds, 0.05).until(condition)


def text(browser, identity):
    return browser.find_element(By.ID, identity).text


def generate(browser, prompt, tokens):
    for identity, value in (("prompt", prompt), ("tokens", str(tokens))):
        element = browser.find_element(By.ID, identity)
        element.clear()
        element.send_keys(value)
    browser.find_element(By.ID, "run").click()


def test_it_shows_speculation_as_it_streams(url, browser, tmp_path):
    browser.get(url)
    until(browser, lambda b: "context 4,096" in text(b, "state"))
    assert text(browser, "model") == "dflash-native-demo"
    generate(browser, "def quicksort(items):\n", 200)
    until(browser, lambda b: b.find_elements(By.CSS_SELECTOR, "#text .draft"))
    assert not browser.find_element(By.ID, "run").is_enabled()  # it is still on its way
    until(browser, lambda b: "drafts accepted" in text(b, "summary"))
    summary = text(browser, "summary")
    tokens, rounds, _, accepted, drafted = map(float, re.findall(r"[\d.]+\d|\d", summary))
    assert tokens == 200 and rounds < 150 and 0 < accepted <= drafted
    shown = browser.find_elements(By.CSS_SELECTOR, "#text .draft")
    assert accepted - 8 <= len(shown) <= accepted
    body = {"prompt": "def quicksort(items):\n", "max_tokens": 200}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()
    found = browser.find_element(By.ID, "text").get_property("textContent")
    assert found == body["prompt"] + answer["choices"][0]["text"]
    until(browser, lambda b: "of" in text(b, "positions"))
    for identity, words in (("memory", "active"), ("totals", "tokens a round"), ("cache", "")):
        assert words in text(browser, identity)
    keep = os.environ.get("DFLASH_NATIVE_SCREENSHOT", str(tmp_path / "page.png"))
    assert browser.save_screenshot(keep)
    assert not browser.get_log("browser")  # nothing was refused, nothing failed


def test_stop_ends_the_request(url, browser):
    browser.get(url)
    generate(browser, "import os\n", 4000)
    until(browser, lambda b: b.find_elements(By.CSS_SELECTOR, "#text .own"))
    browser.find_element(By.ID, "stop").click()
    until(browser, lambda b: text(b, "summary") == "Stopped.")
    assert running.until(lambda: running.idle(url)) < 2


def test_text_is_text_and_a_key_is_asked_for(guarded, browser):
    browser.get(guarded)
    until(browser, lambda b: "API key" in text(b, "state"))
    assert browser.find_element(By.ID, "state").get_attribute("class") == "fault"
    browser.find_element(By.ID, "key").send_keys("secret")
    until(browser, lambda b: text(b, "model") == HOSTILE)
    generate(browser, HOSTILE, 5)
    until(browser, lambda b: "drafts accepted" in text(b, "summary"))
    assert HOSTILE in text(browser, "text")
    assert browser.title == "dflash-native"
    assert not browser.find_elements(By.CSS_SELECTOR, "img, b")


def test_the_policy(url, browser):
    answer = httpx.get(url)
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy and "connect-src 'self'" in policy
    assert not re.search(r"(?:src|href)=|https?://|@import|url\(", answer.text)
    browser.get(url)
    browser.get_log("browser")
    browser.execute_script("document.body.setAttribute('onclick', 'document.title = 1')")
    browser.find_element(By.TAG_NAME, "body").click()
    assert browser.title == "dflash-native"
    assert any("Content Security Policy" in line["message"] for line in browser.get_log("browser"))
