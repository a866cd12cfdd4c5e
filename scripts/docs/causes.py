"""The causes of prefix breaks, from the package that finds them."""

from prefillshare_prefix import Cause
from scripts.docs.markdown import code, page, table

INTRODUCTION = """\
# Causes of prefix breaks

What the SDK's warnings, the linter, the server's answers and the label `cause` of the metric
`prefillshare_prefix_breaks_total` say.
"""


def causes_page() -> str:
    """The page."""
    rows = [[code(cause.value), cause.words, cause.fix] for cause in Cause]
    return page(INTRODUCTION, table(["cause", "what happened", "what to do"], rows))
