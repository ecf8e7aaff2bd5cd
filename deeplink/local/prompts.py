"""The demo's requests: 5 to 500 prompt tokens, below, at and above the engines' block sizes, no two alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

NEW_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request. No prompt begins as another does, so that no engine's prefix cache can help with it.

    `whole` asks for all NEW_TOKENS tokens, past the model's own end of the answer.
    """

    name: str
    path: str
    fields: Mapping[str, Any]
    stream: bool = True
    whole: bool = True

    def body(self, model: str, *, ids: bool = True) -> dict[str, Any]:
        """Greedy, NEW_TOKENS tokens, with their ids; without `ids` not those of chats."""
        body = {
            "model": model,
            **self.fields,
            "max_tokens": NEW_TOKENS,
            "temperature": 0,
            "ignore_eos": self.whole,
        }
        if ids or "messages" not in self.fields:
            body["return_token_ids"] = True
        if self.stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return body


def completion(name: str, text: str, stream: bool = True) -> Prompt:
    return Prompt(name, "/v1/completions", {"prompt": text}, stream)


def chat(name: str, text: str, whole: bool = True) -> Prompt:
    fields = {"messages": [{"role": "user", "content": text}]}
    return Prompt(name, "/v1/chat/completions", fields, whole=whole)


def _logbook(days: int) -> str:
    """About 18 tokens a day; the days differ, so a wrong or misplaced block changes what follows."""
    weather = ("rain", "fog", "snow", "clear skies", "a storm")
    places = ("the harbour", "the northern cape", "an empty island", "the old lighthouse")
    return "The logbook of the ship. " + " ".join(
        f"On day {day} we sailed past {places[day % 4]} under {weather[day % 5]}, and all were well."
        for day in range(1, days + 1)
    )


PROMPTS = (
    completion("5 tokens", "The capital of France is"),
    chat("chat", "Explain in simple words why the sky is blue and the sunset is red."),
    completion(
        "not streamed",
        "Once upon a time there was a miller who had three sons, a mill, a donkey and a cat. The sons had to "
        "grind, the donkey had to fetch the corn and carry the flour, and the cat had to chase the mice. "
        "When the miller died, the three sons divided what he had: the eldest got the mill, the second the "
        "donkey, and the third nothing but the cat, for",
        stream=False,
    ),
    completion("long", f"{_logbook(10)} On day 11 we"),
    completion("longest", f"Here is a very long record. {_logbook(22)} On day 23 we"),
)

WELCOME = chat("chat", "In two sentences: how does a language model write a text?", whole=False)
