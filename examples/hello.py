"""The agent of the README: `midstream serve hello:agent`."""

from midstream import Agent, tool
from midstream.testing import ScriptedModel, calls, text  # a scripted model, which needs no key; see "Models"


@tool(has_effects=False)
def weather(city: str) -> str:
    """Return the weather of a city."""
    return f"{city}: 8 degrees, wind from the west"


script = [
    calls(("weather", '{"city": "Oslo"}'), text="Let me look. "),
    text("Take a coat: it is 8 degrees in Oslo."),
]
agent = Agent(ScriptedModel(script, delay_s=0.05), instructions="Be brief.", tools=[weather])
