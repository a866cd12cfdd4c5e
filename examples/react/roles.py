"""What each role is told: its instructions and tools, which end its prompts.

The specialists are trained on prompts with exactly these words (see `examples/specialists`).
"""

from typing import Any

from langchain_core.utils.function_calling import convert_to_openai_tool

from examples.react.tools import calculator, lookup

ROLES = ("planner", "toolcaller", "solver", "critic")

CALCULATE = "calculate"
"""The planner's next step when both heights are known."""

INSTRUCTIONS = {
    "planner": (
        "Think in one short sentence, then name the place whose height is still missing, or "
        f'"{CALCULATE}" when both heights are known. '
        'Answer with JSON: {"thought": "...", "next": "..."}'
    ),
    "toolcaller": (
        "Do the next step: look up the place, or divide the larger height by the smaller one."
    ),
    "solver": (
        "How many times higher is it? Use the number after the equals sign. "
        'Answer with JSON: {"answer": "..."}'
    ),
    "critic": (
        "Is the last answer the number after the equals sign? "
        'Answer with JSON: {"reason": "...", "verdict": "right" or "wrong"}'
    ),
}

TOOLS: dict[str, list[dict[str, Any]]] = {
    "toolcaller": [convert_to_openai_tool(item, strict=True) for item in (lookup, calculator)]
}
"""Role → tools; guided decoding keeps a strict tool's arguments to its schema."""
