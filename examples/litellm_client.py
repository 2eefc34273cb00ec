"""Use the server with litellm: a streamed chat, and two requests at once.

python examples/litellm_client.py [--base-url http://127.0.0.1:8000/v1] [--model NAME]

litellm downloads a list of prices when it is imported; LITELLM_LOCAL_MODEL_COST_MAP=True makes it
use the list that it ships.
"""

from __future__ import annotations

import argparse
import asyncio
import os

import litellm


async def main() -> None:
    """Run the example against the server of the command line."""
    parser = argparse.ArgumentParser(description="Use Aquifer with litellm.")
    parser.add_argument(
        "--base-url", default=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1")
    )
    parser.add_argument("--model", default="demo", help="a name that the server serves")
    arguments = parser.parse_args()

    server = {
        # "openai/" tells litellm which API the server speaks; the rest is the model's name.
        "model": f"openai/{arguments.model}",
        "api_base": arguments.base_url,
        "api_key": os.environ.get("OPENAI_API_KEY", "not-needed"),
        "max_tokens": 40,
        "temperature": 0,
    }

    print("chat: ", end="")
    question = {"role": "user", "content": "Tell me a story about a small boat."}
    async for chunk in await litellm.acompletion(**server, messages=[question], stream=True):
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()

    animals = ("fox", "cat")
    answers = await asyncio.gather(
        *(
            litellm.acompletion(
                **server, messages=[{"role": "user", "content": f"Tell me a story about a {it}."}]
            )
            for it in animals
        )
    )
    for animal, answer in zip(animals, answers, strict=True):
        print(f"{animal}: {answer.choices[0].message.content}")
        print(f"usage: {answer.usage.prompt_tokens} in, {answer.usage.completion_tokens} out")


if __name__ == "__main__":
    asyncio.run(main())
