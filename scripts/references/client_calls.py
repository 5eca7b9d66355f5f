"""The typical calls of a client of language models; ``scripts/references/clients`` runs this.

    VENV/bin/python client_calls.py CLIENT URL SMALL MODEL

CLIENT is a package that VENV has. SMALL and MODEL are models of the server at URL; MODEL knows
tools. A line of JSON is printed for each call: its name, and what came or why it failed.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterable
from typing import Any

SAY = "Name three fruits."
WEATHER = "What is the weather in Paris? Use the tool."
PERSON = "Ann is 31 years old."
MANY = 128  # tokens of an answer


def weather(city: str) -> str:
    """Returns the weather of a city.

    Args:
        city: the name of the city
    """
    return f"It rains in {city}."


TOOL = {
    "name": "weather",
    "description": "Returns the weather of a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    },
}


def person() -> Any:
    """Returns a pydantic model of a person."""
    from pydantic import BaseModel

    class Person(BaseModel):
        name: str
        age: int

    return Person


def joined(pieces: Iterable[str | None]) -> str:
    """Returns the text of a stream of at least two pieces."""
    found = [piece for piece in pieces if piece]
    assert len(found) > 1, f"one piece: {found}"
    return "".join(found)


Calls = dict[str, Callable[[], Any]]


def openai(url: str, small: str, model: str) -> Calls:
    client = importlib.import_module("openai").OpenAI(base_url=f"{url}/v1", api_key="none")
    said = [{"role": "user", "content": SAY}]
    chat, common = client.chat.completions, {"model": small, "messages": said, "max_tokens": MANY}
    asked = {"model": model, "messages": [{"role": "user", "content": WEATHER}]}
    tools = {"tools": [{"type": "function", "function": TOOL}], "tool_choice": "auto"}
    return {
        "models": lambda: ", ".join(each.id for each in client.models.list()),
        "chat": lambda: chat.create(**common).choices[0].message.content,
        "stream": lambda: joined(
            each.choices[0].delta.content for each in chat.create(**common, stream=True)
        ),
        "tools": lambda: chat.create(**asked, **tools).choices[0].message.tool_calls[0].function,
        "structured output": lambda: chat.parse(
            model=model,
            messages=[{"role": "user", "content": PERSON}],
            response_format=person(),
        ).choices[0].message.parsed,
        "responses": lambda: client.responses.create(
            model=small, input=SAY, max_output_tokens=MANY
        ).output_text,
    }  # fmt: skip


def anthropic(url: str, small: str, model: str) -> Calls:
    client = importlib.import_module("anthropic").Anthropic(base_url=url, api_key="none")
    common = {"model": small, "max_tokens": MANY, "messages": [{"role": "user", "content": SAY}]}
    tool = {"name": TOOL["name"], "description": "", "input_schema": TOOL["parameters"]}

    def stream() -> str:
        with client.messages.stream(**common) as events:
            return joined(events.text_stream)

    def call() -> Any:
        asked = {**common, "model": model, "messages": [{"role": "user", "content": WEATHER}]}
        blocks = client.messages.create(**asked, tools=[tool]).content
        return next(each.input for each in blocks if each.type == "tool_use")

    return {
        "message": lambda: client.messages.create(**common).content[0].text,
        "stream": stream,
        "tools": call,
        "count tokens": lambda: client.messages.count_tokens(
            model=small, messages=common["messages"]
        ).input_tokens,
    }  # fmt: skip


def litellm(url: str, small: str, model: str) -> Calls:
    complete = importlib.import_module("litellm").completion
    at = {"api_base": f"{url}/v1", "api_key": "none"}
    common = {"messages": [{"role": "user", "content": SAY}], "max_tokens": MANY, **at}
    asked = {"messages": [{"role": "user", "content": WEATHER}], **at}
    tools = [{"type": "function", "function": TOOL}]
    big, little = f"openai/{model}", f"openai/{small}"
    return {
        "chat": lambda: complete(little, **common).choices[0].message.content,
        "stream": lambda: joined(
            each.choices[0].delta.content for each in complete(little, **common, stream=True)
        ),
        "tools": lambda: complete(big, **asked, tools=tools).choices[0].message.tool_calls[0]
        .function.arguments,
        "structured output": lambda: complete(
            big, messages=[{"role": "user", "content": PERSON}], response_format=person(), **at
        ).choices[0].message.content,
    }  # fmt: skip


def langchain_openai(url: str, small: str, model: str) -> Calls:
    make = importlib.import_module("langchain_openai").ChatOpenAI
    at = {"base_url": f"{url}/v1", "api_key": "none", "max_tokens": MANY}
    little, big = make(model=small, **at), make(model=model, **at)
    return {
        "chat": lambda: little.invoke(SAY).content,
        "stream": lambda: joined(each.content for each in little.stream(SAY)),
        "tools": lambda: big.bind_tools([weather]).invoke(WEATHER).tool_calls[0],
        "structured output": lambda: big.with_structured_output(person()).invoke(PERSON),
    }


def llm(url: str, small: str, model: str) -> Calls:
    models = importlib.import_module("llm.default_plugins.openai_models")

    def made(name: str, **options: Any) -> Any:
        found = models.Chat(name, model_name=name, api_base=f"{url}/v1", **options)
        found.key = "none"
        return found

    little, big = made(small), made(model, supports_tools=True, supports_schema=True)
    return {
        "chat": lambda: little.prompt(SAY, stream=False, max_tokens=MANY).text(),
        "stream": lambda: joined(little.prompt(SAY, max_tokens=MANY)),
        "tools": lambda: big.chain(WEATHER, tools=[weather], stream=False).text(),
        "structured output": lambda: big.prompt(PERSON, schema=person(), stream=False).text(),
    }


def instructor(url: str, small: str, model: str) -> Calls:
    package, client = (importlib.import_module(name) for name in ("instructor", "openai"))
    plain = client.OpenAI(base_url=f"{url}/v1", api_key="none")

    def made(mode: str) -> Any:
        create = package.from_openai(plain, mode=package.Mode[mode]).chat.completions.create
        said = [{"role": "user", "content": PERSON}]
        return create(model=model, messages=said, response_model=person())

    modes = ("TOOLS", "JSON", "JSON_SCHEMA")
    return {f"structured output by {mode}": lambda mode=mode: made(mode) for mode in modes}


def pydantic_ai(url: str, small: str, model: str) -> Calls:
    agent = importlib.import_module("pydantic_ai").Agent
    chat = importlib.import_module("pydantic_ai.models.openai").OpenAIChatModel
    provider = importlib.import_module("pydantic_ai.providers.openai").OpenAIProvider
    at = provider(base_url=f"{url}/v1", api_key="none")
    little, big = chat(small, provider=at), chat(model, provider=at)

    def stream() -> str:
        return joined(agent(little).run_stream_sync(SAY).stream_text(delta=True, debounce_by=None))

    return {
        "chat": lambda: agent(little).run_sync(SAY, model_settings={"max_tokens": MANY}).output,
        "stream": stream,
        "tools": lambda: agent(big, tools=[weather]).run_sync(WEATHER).output,
        "structured output": lambda: agent(big, output_type=person()).run_sync(PERSON).output,
    }


def dspy(url: str, small: str, model: str) -> Calls:
    package = importlib.import_module("dspy")
    package.configure(
        lm=package.LM(f"openai/{model}", api_base=f"{url}/v1", api_key="none", max_tokens=MANY)
    )
    return {
        "predict": lambda: package.Predict("question -> answer")(question="2 + 2?").answer,
        "chain of thought": lambda: package.ChainOfThought("question -> answer: int")(
            question="What is 3 + 4?"
        ).answer,
        "tools": lambda: package.ReAct("question -> answer", tools=[weather], max_iters=2)(
            question=WEATHER
        ).answer,
    }  # fmt: skip


def smolagents(url: str, small: str, model: str) -> Calls:
    package = importlib.import_module("smolagents")
    at = {"api_base": f"{url}/v1", "api_key": "none"}
    little = package.OpenAIServerModel(small, max_tokens=MANY, **at)
    big = package.OpenAIServerModel(model, **at)
    said = [{"role": "user", "content": [{"type": "text", "text": SAY}]}]

    def agent() -> Any:
        made = package.ToolCallingAgent(
            [package.tool(weather)], big, max_steps=3, verbosity_level=0
        )
        answer = made.run(WEATHER)
        calls = [call.name for step in made.memory.steps for call in
                 getattr(step, "tool_calls", None) or []]  # fmt: skip
        assert "weather" in calls, f"calls: {calls}"
        return answer

    return {
        "chat": lambda: little.generate(said).content,
        "stream": lambda: joined(each.content for each in little.generate_stream(said)),
        "tools": agent,
    }


def main(client: str, url: str, small: str, model: str) -> None:
    calls = globals()[client.replace("-", "_")](url, small, model)
    for name, call in calls.items():
        try:
            shown, works = " ".join(str(call()).split()), True
            assert shown, "nothing came"
        except Exception as error:
            shown, works = f"{type(error).__name__}: {' '.join(str(error).split())}", False
            if os.environ.get("VERBOSE"):
                traceback.print_exc()
        print(json.dumps({"call": name, "works": works, "shown": shown[:200]}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
