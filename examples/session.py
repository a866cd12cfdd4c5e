"""A session in twenty lines: two roles answer one context, which is prefilled once.

python examples/session.py [http://127.0.0.1:8000/v1]
"""

import sys

import rich

from prefillshare_agents import Session

session = Session(base_url=sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1")
session.append(
    {
        "role": "user",
        "content": "A train leaves at 9:40 and arrives at 13:15. It stops three times for five "
        "minutes and once, at the border, for a quarter of an hour. How long does it move?",
    }
)
session.chat("planner", instructions="List the steps to the answer.", max_tokens=32)
for chunk in session.chat("critic", instructions="Check the steps.", max_tokens=32, stream=True):
    print(chunk.choices[0].delta.content or "" if chunk.choices else "\n", end="")

rich.print(session.usage)
session.close()
