"""Use the server with OpenAI's own client: models, a streamed chat, log probabilities, errors.

python examples/openai_client.py [--base-url http://127.0.0.1:8000/v1] [--model NAME]
"""

from __future__ import annotations

import argparse
import os

from openai import BadRequestError, OpenAI


def main() -> None:
    """Run the example against the server of the command line."""
    parser = argparse.ArgumentParser(description="Use Aquifer with OpenAI's client.")
    parser.add_argument(
        "--base-url", default=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1")
    )
    parser.add_argument("--model", help="default: the first model that the server lists")
    arguments = parser.parse_args()

    # The client refuses to start without a key; a server without --api-key ignores it.
    client = OpenAI(
        base_url=arguments.base_url, api_key=os.environ.get("OPENAI_API_KEY", "not-needed")
    )
    names = [model.id for model in client.models.list()]
    model = arguments.model or names[0]
    print(f"models: {', '.join(names)}")

    print("chat: ", end="")
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "Tell me a story about a small boat."}],
        max_tokens=40,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        if chunk.choices:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
        elif chunk.usage is not None:  # the last event
            print(f"\nusage: {chunk.usage.prompt_tokens} in, {chunk.usage.completion_tokens} out")

    completion = client.completions.create(
        model=model,
        prompt="Once upon a",
        max_tokens=4,
        temperature=0,
        logprobs=1,
        extra_body={"repetition_penalty": 1.05},  # a field beyond OpenAI's API
    )
    choice = completion.choices[0]
    print(f"completion: {choice.text!r}, finish reason: {choice.finish_reason}")
    if choice.logprobs is not None:
        values = choice.logprobs.token_logprobs or []
        tokens = choice.logprobs.tokens or []
        for token, value in zip(tokens, values, strict=True):
            print(f"  {token!r}: {value:.3f}")

    try:
        client.completions.create(model=model, prompt="Hello", temperature=-1)
    except BadRequestError as error:
        print(f"refused: {error.body}")


if __name__ == "__main__":
    main()
