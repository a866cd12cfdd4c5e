"""One model answers, another one checks: an ordinary program of the OpenAI client."""

from typing import Any

from openai import OpenAI
from openai.types.chat import ChatCompletion

from examples.react.graph import MAX_TOKENS, OUTPUTS
from examples.react.roles import INSTRUCTIONS
from examples.react.tools import FACTS, calculator, lookup


def answer(base_url: str, question: str) -> list[ChatCompletion]:
    """Let the solver answer and the critic judge, on what the program has looked up."""
    places = [place for place in FACTS if place in question]
    heights = sorted((FACTS[place]["height_m"] for place in places), reverse=True)
    known = [lookup.invoke({"place": place}) for place in places]
    known.append(calculator.invoke({"expression": " / ".join(map(str, heights))}))
    context: list[Any] = [{"role": "user", "content": text} for text in (question, *known)]

    client = OpenAI(base_url=base_url, api_key="local")
    completions = []
    for model in ("solver", "critic"):
        completion = client.chat.completions.create(
            model=model,
            messages=[{"role": "system", "content": INSTRUCTIONS[model]}, *context],
            response_format=form(model),
            max_tokens=MAX_TOKENS,
            temperature=0,
        )
        context.append({"role": "assistant", "content": completion.choices[0].message.content})
        completions.append(completion)
    client.close()
    return completions


def form(model: str) -> Any:
    schema = {"name": model, "schema": OUTPUTS[model].model_json_schema(), "strict": True}
    return {"type": "json_schema", "json_schema": schema}
