"""Settings of a chat and of the page: method, model, samplers, colours, the key."""

from __future__ import annotations

from typing import Any

import pytest
from waiting import wait_for

pytestmark = pytest.mark.slow


def fill(site: Any, **values: str) -> None:
    """Types into fields of the settings; what they had goes."""
    site.press("Settings")
    for name, value in values.items():
        field = site.browser.find_element("id", name)
        field.clear()
        field.send_keys(value)
    site.press("Close", "#settings")


def test_method_and_budget_of_a_message(site: Any) -> None:
    options = site.all("#method option")
    assert [each.text for each in options] == ["full", "lfps", "topk", "fasa"]
    assert [each.is_enabled() for each in options] == [True, True, True, False]
    assert "not calibrated" in options[3].get_attribute("title")
    assert site.js("return document.getElementById('method').value") == "full"
    assert site.texts("#using") == ["full: reads all rows (the server's method)"]
    options[1].click()
    words = "lfps: dense below 7,680 tokens (the server's method is full)"
    assert site.texts("#using") == [words]
    assert site.all("#budget")[0].get_attribute("placeholder") == "5%"
    site.all("#budget")[0].send_keys("12%")
    site.send("One")
    options[2].click()
    site.send("Two")
    options[0].click()
    assert not site.all("#budget")[0].is_enabled(), "full reads all rows"
    site.send("Three")
    asked = [(a["method"], a.get("budget")) for a in site.server.asked]
    assert asked == [("lfps", "12%"), ("topk", "12%"), ("full", None)]
    site.open()
    site.press("One")
    assert site.js("return document.getElementById('method').value") == "full"
    assert all("sparse_from" not in a for a in site.server.asked)
    site.all("#method option")[2].click()
    site.press("New chat")
    assert site.js("return document.getElementById('method').value") == "topk", "as the last chat"


def test_the_server_chooses_unless_somebody_does(site: Any) -> None:
    """Another default of the server is the page's, in a chat whose method nobody has chosen."""
    method = "return document.getElementById('method').value"
    site.send("One")
    site.server.method = "lfps"
    site.open()
    assert site.js(method) == "lfps"
    assert site.texts("#using") == ["lfps: dense below 7,680 tokens (the server's method)"]
    site.press("One")
    assert site.js(method) == "lfps"
    site.press("Settings")
    site.browser.find_element("id", "from-first").click()
    site.press("Close", "#settings")
    assert site.texts("#using") == ["lfps: sparse from the first row (the server's method)"]
    site.send("Two")
    assert site.server.asked[-1]["sparse_from"] == 0
    site.server.models[0] |= {"method": "topk", "method_options": {"budget": "77"}}
    site.open()
    assert site.js(method) == "topk"
    assert site.all("#budget")[0].get_attribute("placeholder") == "77"


OLD = """
    const done = arguments[0], settings = { method: 'lfps', 'at-once': true, budget: '9%' };
    const messages = [{ role: 'user', content: 'Old' }, { id: 'a', role: 'assistant',
        content: 'Answer', thinking: '', state: 'whole', about: { method: 'lfps' } }];
    const open = indexedDB.open('sparsekv-cli', 1);
    open.onsuccess = () => {
      const put = open.result.transaction('chats', 'readwrite').objectStore('chats')
          .put({ id: '1-2', title: 'Old', messages, settings, changed: 5 });
      put.transaction.oncomplete = () => { open.result.close(); done(); };
    };
"""


def test_conversations_of_an_older_page(site: Any) -> None:
    """They are read without loss, but what nobody had chosen is not taken into new chats."""
    site.browser.execute_async_script(OLD)
    site.open()
    method = "return document.getElementById('method').value"
    assert site.js(method) == "full"
    assert site.js("return document.getElementById('budget').value") == "9%"
    site.press("Old")
    assert site.js(method) == "lfps" and site.texts(".text") == ["Answer"]
    site.all(".edit")[0].click()
    site.server.answers.append(("Other",))
    site.browser.switch_to.active_element.send_keys("er\ue007")
    wait_for(lambda: site.texts(".text") == ["Other"])
    site.press("‹")
    assert site.texts(".user .said") == ["Old"] and site.texts(".text") == ["Answer"]


def test_stop_texts_and_a_schema(site: Any) -> None:
    fill(site, **{"stop-texts": "END\n\\n\\n", "schema": '{"type": "object"}'})
    site.send("One")
    asked = site.server.asked[-1]
    assert asked["stop"] == ["END", "\n\n"]
    assert asked["response_format"] == {"type": "json_object", "schema": {"type": "object"}}
    for wrong in ("{", "3", "[]", "null"):
        fill(site, schema=wrong)
        site.type("Two")
        assert site.browser.switch_to.active_element.get_attribute("id") == "schema", wrong
        site.press("Close", "#settings")
        assert len(site.server.asked) == 1
    fill(site, **{"stop-texts": "", "schema": ""})
    site.send("")
    assert not {"stop", "response_format"} & site.server.asked[-1].keys()


def test_the_help_of_methods(site: Any) -> None:
    """It is text, for a keyboard and a phone."""
    site.press("Settings")
    site.browser.find_element("css selector", "#settings summary").send_keys("\ue007")
    assert site.texts("#method-help dt") == ["full", "lfps", "topk", "fasa"]
    told = site.texts("#method-help dd")
    assert told[0] == "what full does; some texts"
    assert told[3] == "what fasa does; some texts; not for this model, or not calibrated"


def test_another_server_at_the_address(site: Any) -> None:
    name = site.browser.find_element("id", "model-name")
    assert name.text == "tiny · 1024 tokens of context"
    site.server.models = [site.server.model("other")]
    site.send("One", "Yes", ("model", "other"))
    wait_for(lambda: name.text == "other · 1024 tokens of context")
    site.server.models = [site.server.model("third")]
    site.js("document.dispatchEvent(new Event('visibilitychange'))")
    wait_for(lambda: name.text == "third · 1024 tokens of context")


def test_system_prompt_and_samplers(site: Any) -> None:
    assert site.js("return document.getElementById('top_k').placeholder") == "40"
    fill(site, system="Be short.", temperature="0", top_k="5", max_tokens="99", seed="7")
    site.press("Settings")
    for name in ("from-first", "think"):
        site.browser.find_element("id", name).click()
    site.press("Close", "#settings")
    site.send("One")
    asked = site.server.asked[0]
    assert asked["messages"][0] == {"role": "system", "content": "Be short."}
    numbers = {"temperature": 0, "top_k": 5, "max_tokens": 99, "seed": 7}
    assert asked.items() >= numbers.items()
    assert asked["chat_template_kwargs"] == {"enable_thinking": False}
    assert asked["sparse_from"] == 0 and not {"top_p", "min_p", "model"} & asked.keys()
    site.open()
    site.press("One")
    fill(site, system="", temperature="")
    site.send("Two")
    assert site.server.asked[1]["messages"][0]["role"] == "user"
    assert "temperature" not in site.server.asked[1] and site.server.asked[1]["seed"] == 7
    site.press("Settings")
    field = site.all("#temperature")[0]
    field.send_keys("1e999\ue00c")  # a browser does not tell the page what stands there
    site.type("Three")
    assert len(site.server.asked) == 2 and site.browser.switch_to.active_element == field


def test_several_models(site: Any) -> None:
    assert not site.browser.find_element("id", "model").is_displayed()
    site.server.models = [site.server.model("a"), site.server.model("b", ["full", "topk"])]
    unloaded = {"status": "unloaded", "context_length": 99, "thinking_switch": None}
    site.server.models[1] |= unloaded
    site.open()
    model = site.browser.find_element("id", "model")
    assert model.is_displayed() and model.text.split() == ["a", "b"]
    assert site.js("return document.getElementById('model').labels[0].textContent") == "Model"
    assert site.browser.find_element("id", "model-name").text == "1024 tokens of context"
    site.all("#model option")[1].click()
    assert site.browser.find_element("id", "model-name").text == "99 tokens of context"
    placeholder = "return document.getElementById('top_k').placeholder"
    assert site.js(placeholder) == "default", "it is not loaded"
    assert site.js("return document.getElementById('think-field').hidden")
    assert [each.is_enabled() for each in site.all("#method option")] == [True, False, True, False]
    site.send("One")
    assert site.server.asked[0]["model"] == "b" and site.server.asked[0]["method"] == "full"
    site.all("#method option")[2].click()
    site.server.slow = 2.0
    site.browser.get(site.server.url)
    site.wait("#chats .open").click()
    fill(site, seed="7")
    site.all("#budget")[0].send_keys("77")
    site.js("form.elements.prompt.value = 'Two'; form.requestSubmit()")
    assert site.texts("#method option") == [], "a message waits for them"
    site.server.answers.append(("Late",))
    wait_for(lambda: site.texts(".text") == ["An answer.", "Late"])
    assert site.js("return document.getElementById('model').value") == "b"
    assert site.texts(".about")[0].startswith("b · lfps · budget 5%")
    chosen = {"model": "b", "method": "topk", "budget": "77", "seed": 7}
    assert site.server.asked[1].items() >= chosen.items()


def test_a_model_that_is_gone(site: Any) -> None:
    """A chat goes on with the first one, and the page says so, also while it is open."""
    chosen = "return document.getElementById('model').value"
    site.server.models = [site.server.model(name) for name in ("a", "b", "c")]
    site.open()
    site.all("#model option")[2].click()
    site.send("One")
    site.all("#model option")[1].click()
    site.server.models = [site.server.model(name) for name in ("<b>a</b>", "c")]
    site.send("Two", 404, "the model 'b' does not exist: this server has <b>a</b>, c")
    words = "The model b is not on this server now: <b>a</b> answers."
    wait_for(lambda: site.browser.find_element("id", "model-gone").text == words)
    assert site.js(chosen) == "<b>a</b>" and site.texts("#model b") == []
    assert site.texts(".note.error")[-1].startswith("Error: the model 'b' does not exist")
    site.send("Three")
    assert site.server.asked[-1]["model"] == "<b>a</b>"
    assert site.texts("#model-gone") == [""]
    assert site.texts(".about")[-1].startswith("<b>a</b> · lfps")
    site.server.models = [site.server.model("d")]
    site.open()
    site.press("One")
    assert site.texts("#model-gone") == ["The model <b>a</b> is not on this server now: d answers."]
    site.send("Four")
    assert "model" not in site.server.asked[-1] and site.texts("#model-gone") == [""]


def test_colours(site: Any) -> None:
    def colours(scheme: str) -> list[str]:
        feature = {"name": "prefers-color-scheme", "value": scheme}
        site.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
        return site.js(
            "const canvas = document.getElementById('rows');"
            "const pixel = [...canvas.getContext('2d').getImageData(0, 0, 1, 1).data];"
            "return [getComputedStyle(document.body).backgroundColor, String(pixel)]"
        )

    site.send("One", ("rows", [[100]]))
    light, dark = ["rgb(251, 250, 247)", "11,95,165,255"], ["rgb(23, 23, 22)", "122,184,240,255"]
    wait_for(lambda: colours("light") == light)  # a change is drawn in the next frame
    wait_for(lambda: colours("dark") == dark)
    site.press("Settings")
    site.all("#theme option")[1].click()
    site.press("Close", "#settings")
    assert colours("dark") == light
    site.open()
    assert colours("dark")[0] == light[0], "the choice is kept"


def test_an_api_key(site: Any) -> None:
    site.server.key = "sesame"
    site.browser.get(site.server.url)
    key = wait_for(lambda: site.browser.find_element("id", "key"))
    wait_for(key.is_displayed)
    assert site.browser.switch_to.active_element == key
    name = site.browser.find_element("id", "model-name")
    wait_for(lambda: "the API key is missing" in name.text)
    site.type("One")
    key.send_keys("sesame\ue007")
    site.wait("#method option")
    assert site.server.asked == [] and site.js("return document.getElementById('prompt').value")
    assert "the API key" not in site.browser.find_element("id", "model-name").text
    assert site.js("return JSON.stringify(localStorage).includes('sesame')") is False
