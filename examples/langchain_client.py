"""Use the server with LangChain: a chain of prompt, model and parser; its stream; a batch.

python examples/langchain_client.py [--base-url http://127.0.0.1:8000/v1] [--model NAME]
"""

from __future__ import annotations

import argparse
import os

from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI
from pydantic import SecretStr


def main() -> None:
    """Run the example against the server of the command line."""
    parser = argparse.ArgumentParser(description="Use Aquifer with LangChain.")
    parser.add_argument(
        "--base-url", default=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1")
    )
    parser.add_argument("--model", default="demo", help="a name that the server serves")
    arguments = parser.parse_args()

    model = ChatOpenAI(
        base_url=arguments.base_url,
        api_key=SecretStr(os.environ.get("OPENAI_API_KEY", "not-needed")),
        model=arguments.model,
        max_tokens=40,
        temperature=0,
        extra_body={"top_k": 40},  # a field beyond OpenAI's API
    )
    prompt = ChatPromptTemplate.from_messages([("user", "Tell me a story about {topic}.")])
    chain = prompt | model | StrOutputParser()

    print("chat: ", end="")
    for text in chain.stream({"topic": "a small boat"}):
        print(text, end="", flush=True)
    print()

    topics = ["a fox", "a cat"]
    for topic, story in zip(
        topics, chain.batch([{"topic": topic} for topic in topics]), strict=True
    ):
        print(f"{topic}: {story}")

    usage = model.invoke("Tell me a story about a small boat.").usage_metadata
    if usage is not None:
        print(f"usage: {usage['input_tokens']} in, {usage['output_tokens']} out")


if __name__ == "__main__":
    main()
