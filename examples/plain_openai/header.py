"""Any OpenAI client can share a prefill: one header names the session, `model` names the role.

python -m examples.plain_openai.header [http://127.0.0.1:8000/v1]
"""

import sys
import uuid
from typing import Any

from openai import OpenAI

client = OpenAI(
    base_url=sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1",
    api_key="local",
    default_headers={"X-Session-ID": uuid.uuid4().hex},
)
context: list[Any] = [
    {
        "role": "user",
        "content": "A train leaves at 9:40 and arrives at 13:15. It stops three times for five "
        "minutes and once, at the border, for a quarter of an hour. How long does it move?",
    }
]
# The role's own instructions lead the request; the server moves them behind the conversation, so
# both roles share the prefill of everything in `context`.
for role, instructions in [
    ("planner", "List the steps to the answer."),
    ("critic", "Check the steps."),
]:
    answer = client.chat.completions.create(
        model=role,
        messages=[{"role": "system", "content": instructions}, *context],
        max_tokens=32,
        temperature=0,
    )
    text = answer.choices[0].message.content
    context.append({"role": "assistant", "content": text})

    assert answer.usage is not None
    details = answer.usage.prompt_tokens_details
    cached = details.cached_tokens if details else 0
    print(f"{role}: {text}")
    print(f"  {cached} of {answer.usage.prompt_tokens} prompt tokens were prefilled already\n")
