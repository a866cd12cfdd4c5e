"""Reflexion: actor, evaluator and reflector, with a clock in the actor's prompt.

Lessons are kept in a list of their own and written into the first message of the next trial.
"""

from typing import Any

import openai

from prefillshare_prefix import Cause

ACTOR = "You are an expert researcher.\nCurrent time: {time}\n\nAnswer in about 50 words."
TASK = "How many primes below 100 end in 7? Think step by step and give the number."
ANSWERS = {
    "actor": ["There are 7: 7, 17, 37, 47, 67, 97, 87.", "There are 6: 7, 17, 37, 47, 67, 97."],
    "evaluator": ["Wrong: 87 is 3 times 29.", "Right."],
    "reflector": ["I should divide each candidate by 3."],
}
BREAKS: dict[str, list[tuple[int, Cause]]] = {
    # A longer task alone is another task: what it begins with is still shared.
    "context_first": [(3, Cause.UNRELATED)],
    "model": [
        (1, Cause.ROLE_PROMPT_FIRST),
        (2, Cause.ROLE_PROMPT_FIRST),
        (3, Cause.TIMESTAMP),
        (4, Cause.UNRELATED),
    ],
}


def main() -> None:
    clock = iter(["2025-03-01T10:41:07.201112", "2025-03-01T10:41:39.016320"])
    lessons: list[str] = []
    with openai.OpenAI() as client:

        def ask(role: str, prompt: str, messages: list[Any]) -> Any:
            head: Any = {"role": "system", "content": prompt}
            answer = client.chat.completions.create(model=role, messages=[head, *messages])
            return answer.choices[0].message.to_dict()

        for _ in range(2):
            task = "\n".join([TASK, *(f"Lesson: {lesson}" for lesson in lessons)])
            trial: list[Any] = [{"role": "user", "content": task}]
            trial.append(ask("actor", ACTOR.format(time=next(clock)), trial))
            trial.append(ask("evaluator", "Check every number of the last answer.", trial))
            if trial[-1]["content"] == "Right.":
                return
            lessons.append(ask("reflector", "Say what to do better next time.", trial)["content"])
