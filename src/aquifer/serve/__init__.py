"""The HTTP server: OpenAI's API in front, the process that owns the device behind.

    client --HTTP--> app -> generation -> client ==pipe== process -> Engine
                     web process, no torch        |       engine process

Text is the web process's business, tokens are the engine's; only ids cross the pipe.
"""
