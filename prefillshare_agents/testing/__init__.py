"""Test your graph without a GPU: a fake server that speaks the real one's contract.

`FakeServer` answers from a script and says how much of their prompts the calls shared; the pytest
plugin beside it has it as the fixture `prefillshare_server`.
"""

from ._request import Request
from ._script import Answer, Failure, tool_call
from ._server import FakeServer

__all__ = ["Answer", "Failure", "FakeServer", "Request", "tool_call"]
