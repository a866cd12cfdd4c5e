"""The same supervisor, given all that its agents did."""

from tests.prefix.programs import supervisor

ANSWERS = supervisor.ANSWERS
BREAKS = supervisor.BREAKS


def main() -> None:
    supervisor.run("full_history")
