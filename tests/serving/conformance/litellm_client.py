"""The server behind litellm, as an OpenAI-compatible one: litellm_client.py URL MODEL."""

import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # or it looks for prices on the network
import litellm

url, model = sys.argv[1:]
asked = {"api_base": f"{url}/v1", "api_key": "sk-test", "max_retries": 0, "temperature": 0, "max_tokens": 16}
messages = [{"role": "user", "content": "Who are you?"}]

answer = litellm.completion(model=f"openai/{model}", messages=messages, **asked)
text = answer.choices[0].message.content
assert text and answer.usage.total_tokens > 16
stream = litellm.completion(
    model=f"openai/{model}", messages=messages, stream=True, stream_options={"include_usage": True}, **asked
)
assert "".join(part.choices[0].delta.content or "" for part in stream if part.choices) == text
plain = litellm.text_completion(model=f"text-completion-openai/{model}", prompt="It was", **asked)
assert plain.choices[0].text
try:
    litellm.completion(model=f"openai/{model}", messages=messages, **asked | {"max_tokens": 0})
except litellm.BadRequestError as error:
    assert "max_tokens" in str(error)
else:
    raise AssertionError("no BadRequestError")
print("litellm ok")
