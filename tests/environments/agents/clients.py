"""Unmodified clients as agents: OpenAI's SDK, its Agents SDK, smolagents."""

import os
from typing import Any

from openai import AsyncOpenAI, OpenAI

from tests.environments.agents.programs import WEATHER


def run(task: Any) -> Any:
    return globals()[task.metadata["program"]](task)


def sdk_tools(task: Any) -> float:
    """A loop with tools; the first turn is streamed."""
    client = OpenAI(max_retries=0)
    assert [model.id for model in client.models.list()] == ["policy"]
    messages: list[Any] = [{"role": "user", "content": task.question}]
    stream = client.chat.completions.create(
        model="policy", messages=messages, tools=[WEATHER], stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    calls: dict[int, dict[str, Any]] = {}
    words, finish, tokens = "", None, 0
    for chunk in stream:
        tokens += chunk.usage.completion_tokens if chunk.usage else 0
        for choice in chunk.choices:
            words += choice.delta.content or ""
            finish = choice.finish_reason or finish
            for call in choice.delta.tool_calls or ():
                calls[call.index] = {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.function.name, "arguments": call.function.arguments},
                }
    assert finish == "tool_calls" and tokens > 0 and len(calls) == 1, (finish, tokens, calls)
    messages.append({"role": "assistant", "content": words or None, "tool_calls": list(calls.values())})
    messages.append({"role": "tool", "tool_call_id": calls[0]["id"], "content": "sunny"})
    done = client.chat.completions.create(model="policy", messages=messages, tools=[WEATHER], logprobs=True)
    said = done.choices[0]
    assert said.finish_reason == "stop" and not said.message.tool_calls
    assert said.logprobs is not None and len(said.logprobs.content or ()) == done.usage.completion_tokens
    return float(said.message.content == "It is sunny.")


def sdk_thinking(task: Any) -> float:
    """A call and an answer whose reasoning is sent back, with the API that the task names."""
    client = OpenAI(max_retries=0)
    asked: list[Any] = [{"role": "user", "content": task.question}]
    if task.answers[0] == "chat":
        done = client.chat.completions.create(model="policy", messages=asked, tools=[WEATHER])
        said = done.choices[0].message
        result = {"role": "tool", "tool_call_id": said.tool_calls[0].id, "content": "sunny"}
        asked += [said.model_dump(exclude_none=True), result]
        done = client.chat.completions.create(model="policy", messages=asked, tools=[WEATHER])
        asked += [done.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "so?"}]
        client.chat.completions.create(model="policy", messages=asked, tools=[WEATHER])
        return 1.0
    tools: list[Any] = [{"type": "function", "strict": False, **WEATHER["function"]}]
    first = client.responses.create(model="policy", input=asked, tools=tools)
    assert [one.type for one in first.output] == ["reasoning", "function_call"], first
    assert 0 < first.usage.output_tokens_details.reasoning_tokens < first.usage.output_tokens, first.usage
    asked += [one.model_dump() for one in first.output]
    asked.append({"type": "function_call_output", "call_id": first.output[1].call_id, "output": "sunny"})
    with client.responses.stream(model="policy", input=asked, tools=tools) as stream:
        thought = "".join(event.delta for event in stream if event.type == "response.reasoning_text.delta")
        second = stream.get_final_response()
    assert [one.type for one in second.output] == ["reasoning", "message"], second
    assert [one.text for one in second.output[0].content] == [thought]
    asked += [*(one.model_dump() for one in second.output), {"role": "user", "content": "so?"}]
    client.responses.create(model="policy", input=asked, tools=tools)
    return float(thought == "It shines.")


def sdk_streamed_calls(task: Any) -> float:
    """Two calls of a streamed turn."""
    messages: list[Any] = [{"role": "user", "content": task.question}]
    client = OpenAI(max_retries=0)
    with client.chat.completions.stream(model="policy", messages=messages, tools=[WEATHER]) as stream:
        choice = stream.get_final_completion().choices[0]
    assert choice.finish_reason == "tool_calls", choice
    calls = [[call.function.name, call.function.arguments] for call in choice.message.tool_calls or ()]
    return float(calls == [["weather", '{"city": "Oslo"}'], ["weather", '{"town": "Oslo"}']])


async def sdk_parallel(task: Any) -> float:
    """Two requests at the same time."""
    import asyncio

    client = AsyncOpenAI(max_retries=0)
    asked = [
        client.chat.completions.create(model="policy", messages=[{"role": "user", "content": text}])
        for text in ("left", "right")
    ]
    found = await asyncio.gather(*asked)
    return float(len({one.id for one in found}))


def sdk_responses(task: Any) -> float:
    """``/v1/responses``, whole and streamed."""
    client = OpenAI(max_retries=0)
    tool = {"type": "function", "strict": False, **WEATHER["function"]}
    items: list[Any] = [{"role": "user", "content": task.question}]
    first = client.responses.create(model="policy", instructions="Be brief.", input=items, tools=[tool])
    [call] = first.output
    assert call.type == "function_call" and call.name == "weather", first
    items += [one.model_dump() for one in first.output]
    items.append({"type": "function_call_output", "call_id": call.call_id, "output": "sunny"})
    with client.responses.stream(
        model="policy", instructions="Be brief.", input=items, tools=[tool]
    ) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        assert stream.get_final_response().output_text == text
    return float(text == "It is sunny.")


def sdk_untold(task: Any) -> float:
    """Answers without finish reason and usage, with both APIs."""
    client = OpenAI(max_retries=0)
    messages: list[Any] = [{"role": "user", "content": task.question}]
    done = client.chat.completions.create(model="policy", messages=messages)
    assert (done.choices[0].finish_reason, done.usage) == (None, None), done
    with client.chat.completions.stream(model="policy", messages=messages,
                                        stream_options={"include_usage": True}) as stream:  # fmt: skip
        streamed = stream.get_final_completion()
    assert (streamed.choices[0].finish_reason, streamed.usage) == (None, None), streamed
    response = client.responses.create(model="policy", input=messages)
    assert (response.status, response.usage) == ("completed", None), response
    words = {done.choices[0].message.content, streamed.choices[0].message.content, response.output_text}
    return float(words == {"It is sunny."})


def agents_sdk(task: Any) -> float:
    """OpenAI's Agents SDK with its default API."""
    from agents import Agent, Runner, function_tool, set_tracing_disabled

    set_tracing_disabled(True)

    @function_tool
    def weather(city: str) -> str:
        """The weather of a city."""
        return "sunny"

    agent = Agent(name="Forecaster", instructions="Be brief.", tools=[weather], model="policy")
    return float(Runner.run_sync(agent, task.question, max_turns=4).final_output == "It is sunny.")


def _model() -> Any:
    from smolagents import OpenAIServerModel

    return OpenAIServerModel(
        model_id="policy", api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"]
    )


def smol_tools(task: Any) -> float:
    """smolagents' agent that calls tools natively."""
    from smolagents import ToolCallingAgent, tool

    @tool
    def weather(city: str) -> str:
        """The weather of a city.

        Args:
            city: its name
        """
        return "sunny"

    agent = ToolCallingAgent(tools=[weather], model=_model(), max_steps=4, verbosity_level=0)
    return float(agent.run(task.question) == "It is sunny.")


def smol_code(task: Any) -> float:
    """smolagents' agent that writes Python."""
    from smolagents import CodeAgent

    agent = CodeAgent(tools=[], model=_model(), max_steps=4, verbosity_level=0)
    return float(agent.run(task.question) == 6)


def agents_sdk_defaults(task: Any) -> float:
    """OpenAI's Agents SDK with a tool argument that has a default."""
    from agents import Agent, Runner, function_tool, set_tracing_disabled

    set_tracing_disabled(True)

    @function_tool
    def weather(city: str, days: int = 1) -> str:
        """The weather of a city."""
        return f"sunny for {days}"

    agent = Agent(name="Forecaster", instructions="Be brief.", tools=[weather], model="policy")
    return float(Runner.run_sync(agent, task.question, max_turns=4).final_output == "It is sunny.")


def agents_sdk_typed(task: Any) -> float:
    """OpenAI's Agents SDK with an output type and single calls."""
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
