"""Conversations on the page: what a person does with them."""
from typing import Any

def test_first(site: Any) -> None:
    site.send("Hello there", "# Hi\n\nSome **bold** text\n\n```python\ndef f(x):\n    return 'a<b'\n```\n", ("rows", [[100, 50], [0, 10]]))
    print(site.texts(".message"), site.texts("#chats"), site.server.asked)
    site.browser.save_screenshot("/tmp/s1.png")
