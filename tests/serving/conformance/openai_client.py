"""All of the server with `openai`'s own client, whichever version is installed: openai_client.py URL MODEL."""

import asyncio
import json
import re
import sys
from typing import Literal

import openai
from pydantic import BaseModel, ConfigDict

url, model = sys.argv[1:]
client = openai.OpenAI(base_url=f"{url}/v1", api_key="sk-test", max_retries=0)
GREEDY = {"temperature": 0, "max_tokens": 24, "seed": 1}
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who are you?"}]

# Models
assert [each.id for each in client.models.list()] == [model] and client.models.retrieve(model).owned_by == "deltagram"

# Completions: whole, streamed, several, with probabilities
whole = client.completions.create(model=model, prompt="It was a fine", logprobs=2, **GREEDY)
(choice,) = whole.choices
assert whole.object == "text_completion" and choice.finish_reason in ("stop", "length") and choice.text
assert whole.usage.completion_tokens == len(choice.logprobs.tokens) <= 24
assert "".join(choice.logprobs.tokens).startswith(choice.text)
chunks = list(client.completions.create(model=model, prompt="It was a fine", logprobs=2, stream=True, **GREEDY))
assert "".join(chunk.choices[0].text for chunk in chunks) == choice.text
assert chunks[-1].choices[0].finish_reason == choice.finish_reason
many = client.completions.create(model=model, prompt=["One", "Two"], n=2, max_tokens=5, seed=3)
assert [each.index for each in many.choices] == [0, 1, 2, 3]
tokens = client.completions.create(model=model, prompt=[5, 6, 7], max_tokens=2)
assert tokens.usage.prompt_tokens == 3

# Stop strings, bias, penalties and what OpenAI does not have
space = client.completions.create(model=model, prompt="It was a fine", stop=[choice.text[5:9]], **GREEDY)
assert space.choices[0].text == choice.text[: choice.text.index(choice.text[5:9])]
biased = client.completions.create(model=model, prompt="a", logit_bias={"300": 100}, max_tokens=4, temperature=0)
again = client.completions.create(model=model, prompt="a", logit_bias={"300": 100}, max_tokens=4, temperature=0)
assert biased.choices[0].text == again.choices[0].text
extra = {"top_k": 5, "min_p": 0.05, "repetition_penalty": 1.1}
client.completions.create(model=model, prompt="a", max_tokens=4, presence_penalty=0.5, top_p=0.9, extra_body=extra)
number = client.completions.create(model=model, prompt="a", max_tokens=20, extra_body={"regex": "[0-9]{3}"})
assert re.fullmatch("[0-9]{3}", number.choices[0].text)

# Chat: whole, streamed with usage, with probabilities
answer = client.chat.completions.create(model=model, messages=CHAT, logprobs=True, top_logprobs=3, **GREEDY)
message = answer.choices[0].message
assert message.role == "assistant" and len(answer.choices[0].logprobs.content[0].top_logprobs) == 3
stream = client.chat.completions.create(
    model=model, messages=CHAT, stream=True, stream_options={"include_usage": True}, **GREEDY
)
parts = list(stream)
assert "".join(part.choices[0].delta.content or "" for part in parts if part.choices) == message.content
assert parts[-1].usage == answer.usage and parts[0].choices[0].delta.role == "assistant"
said = message.model_dump()
client.chat.completions.create(model=model, messages=[*CHAT, said, CHAT[1]], max_completion_tokens=3)


# Structured output, also as the client itself asks for it
class Weather(BaseModel):
    model_config = ConfigDict(extra="forbid")

    sky: Literal["clear", "cloudy"]
    degrees: Literal[10, 20, 30]


schema = {"name": "weather", "schema": Weather.model_json_schema(), "strict": True}
form = {"type": "json_schema", "json_schema": schema}
made = client.chat.completions.create(model=model, messages=CHAT, response_format=form, max_tokens=60, seed=1)
assert Weather.model_validate_json(made.choices[0].message.content)
parse = getattr(client.chat.completions, "parse", None) or client.beta.chat.completions.parse
parsed = parse(model=model, messages=CHAT, response_format=Weather, max_tokens=60, seed=1)
assert isinstance(parsed.choices[0].message.parsed, Weather)
free = client.chat.completions.create(
    model=model, messages=CHAT, response_format={"type": "json_object"}, max_tokens=200, temperature=0.3, seed=2
)
if free.choices[0].finish_reason == "stop":
    assert isinstance(json.loads(free.choices[0].message.content), dict)

# Errors are the client's own
for error, call in {
    openai.BadRequestError: lambda: client.completions.create(model=model, prompt="a", max_tokens=0),
    openai.NotFoundError: lambda: client.completions.create(model="other", prompt="a"),
    openai.AuthenticationError: lambda: openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0).models.list(),
}.items():
    try:
        call()
    except error as caught:
        assert caught.body["message"]
    else:
        raise AssertionError(f"no {error.__name__}")


# The asynchronous client, many at once, some of which leave
async def together() -> None:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="sk-test", max_retries=0) as many:

        async def one(leave: bool) -> str:
            text = ""
            stream = await many.chat.completions.create(model=model, messages=CHAT, stream=True, **GREEDY)
            async for part in stream:
                text += part.choices[0].delta.content or ""
                if leave and text:
                    await stream.close()
                    return text
            return text

        texts = await asyncio.gather(*(one(leave=i % 2 == 1) for i in range(8)))
        assert all(text == message.content for text in texts[::2])


asyncio.run(together())
print("openai", openai.__version__, "ok")
