"""Agents that want something of their answers; run in processes of their own."""

import urllib.error
from typing import Any

from tests.environments.agents.programs import chat

LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


def one_call(task: Any) -> float:
    """Takes one call a turn, and answers words with a request for it."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "a"}]
    said = chat(messages, tools=[LOOK], parallel_tool_calls=False)
    if said.get("tool_calls") or said["content"].count("<tool_call>") != 2:
        raise ValueError(said)
    messages += [said, {"role": "user", "content": "one, please"}]
    said = chat(messages, tools=[LOOK], parallel_tool_calls=False)
    [call] = said["tool_calls"]
    messages += [said, {"role": "tool", "tool_call_id": call["id"], "content": "seen"}]
    return float(chat(messages, tools=[LOOK], parallel_tool_calls=False)["content"] == "done")


def json_wanted(task: Any) -> float:
    """How many answers it gets to requests for JSON."""
    found = 0
    schema = {"name": "s", "schema": {"type": "object"}}
    for wanted in ({"type": "json_object"}, {"type": "json_schema", "json_schema": schema}):
        try:
            chat([{"role": "user", "content": "a"}], response_format=wanted)
        except urllib.error.HTTPError:
            continue
        found += 1
    chat([{"role": "user", "content": "b"}], response_format={"type": "text"})
    return float(found)


def typed(task: Any) -> float:
    """OpenAI's Agents SDK with a type for what comes out, and calls one by one."""
    from agents import Agent, ModelSettings, Runner, function_tool, set_tracing_disabled
    from pydantic import BaseModel

    set_tracing_disabled(True)

    class Weather(BaseModel):
        sky: str

    @function_tool
    def weather(city: str) -> str:
        """The weather of a city."""
        return "sunny"

    agent = Agent(
        name="Forecaster", instructions='Answer {"sky": ...}.', tools=[weather], model="policy",
        output_type=Weather, model_settings=ModelSettings(parallel_tool_calls=False),
    )  # fmt: skip
    return float(Runner.run_sync(agent, task.question, max_turns=4).final_output.sky == "sunny")
